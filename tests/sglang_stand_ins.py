"""Runs SGLang's argument resolution on a machine without a GPU and without SGLang's heavy needs.

Packages that SGLang imports but that resolving arguments never uses are stood in for by modules whose every name is a
class that does nothing; torch says that it sees an H200. SGLang itself, its parser, its resolution and its plugin
loader are the released ones.

    python sglang_stand_ins.py SOURCE < cases.json     cases: [[flag, ...], ...]; one JSON line with an answer for each
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import pickle
import sys
import types
from typing import Any

STOOD_IN = {
    "triton",
    "tvm_ffi",
    "sgl_kernel",
    "flashinfer",
    "torchvision",
    "IPython",
    "aiohttp",
    "xgrammar",
    "sentencepiece",
}
OUR_FLAGS = "--speculative-ddtree"
SHOWN = (
    "speculative_algorithm", "speculative_num_draft_tokens", "speculative_eagle_topk", "speculative_num_steps",
    "speculative_dflash_block_size", "speculative_draft_attention_backend", "speculative_draft_model_path",
    "attention_backend", "max_running_requests", "enable_mixed_chunk",
)  # fmt: skip


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__call__()


class _Base:
    def __init_subclass__(cls, **_: Any) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return "cuda" if name == "backend" else _Base()


def _class(name: str) -> Any:
    return _Nothing(name, (_Base,), {})


class _Module(types.ModuleType):
    __path__ = ()  # a package
    __version__ = "999.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in STOOD_IN:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def prepare() -> None:
    """Make SGLang importable; transformers comes first, since it looks for what is installed."""
    import torch
    import transformers
    import transformers.utils.import_utils as gates

    for name in ("AutoConfig", "AutoTokenizer", "PretrainedConfig", "AutoModelForCausalLM"):
        getattr(transformers, name)

    def without_gate(cls: type, name: str) -> Any:
        try:
            return type.__getattribute__(cls, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return lambda *_, **__: None

    gates.DummyObject.__getattribute__ = without_gate
    for name in ("AutoImageProcessor", "AutoProcessor", "AutoVideoProcessor"):
        setattr(transformers, name, _class(name))
    sys.meta_path.append(_Finder())
    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=150754820096, multi_processor_count=132, warp_size=32
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.mem_get_info = lambda device=None: (150_000_000_000, 150_754_820_096)


def answer(flags: list[str]) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    for name in [name for name in os.environ if name.startswith("DDTREE_SGLANG")]:
        del os.environ[name]
    try:
        found = prepare_server_args(flags)
        if hasattr(found, "resolve_once"):  # since 0.5.23 a step of its own, before the server starts
            found.resolve_once()
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    # As the scheduler tells /server_info, in whose process the arguments come pickled.
    state = published(pickle.loads(pickle.dumps(found)))
    shown = {name: state.get(name) for name in SHOWN}
    shown["internal_state"] = {name: value for name, value in state.items() if "speculative" in name}
    shown["internal_state"] |= {"model_path": state["model_path"]}
    everything = {name: repr(value) for name, value in state.items() if name not in ("port", "model_config")}
    return shown | {"resolved": os.environ.get("DDTREE_SGLANG_RESOLVED"), "everything": everything}


def published(arguments: Any) -> dict[str, Any]:
    """Resolved arguments by name: all attributes, or what 0.5.23 makes of its sealed record when it is published."""
    if dataclasses.is_dataclass(arguments):
        return vars(arguments)
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.arg_groups.overrides import resolution_result

    state = {name: resolution_result(arguments, name) for name in sorted(field_names(type(arguments)))}
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(state["speculative_algorithm"])
    teller = object.__new__(SchedulerInternalStateController)
    teller.scheduler = types.SimpleNamespace(spec_algorithm=algorithm, draft_worker=None)
    teller._average_accept_length = lambda: None
    teller._add_speculative(state)
    return state


def worker(flags: list[str]) -> dict[str, Any]:
    """The worker's parts beside this SGLang's: what it puts in their place, and how target and drafter differ.

    Args:
        flags: of a server with a budget of 16.
    """
    import sglang.srt.runtime_context as context
    from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from ddtree.sglang.draft_input import RESERVED, DDTreeDraftInput
    from ddtree.sglang.draft_scope import DraftScope
    from ddtree.sglang.resolution import resolved_view
    from ddtree.sglang.width_table import KEY_FIELDS
    from ddtree.sglang.worker import DDTreeWorker

    for name in [name for name in os.environ if name.startswith("DDTREE_SGLANG")]:
        del os.environ[name]
    arguments = prepare_server_args(flags)
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
    set_global_server_args_for_scheduler(arguments)
    spec = getattr(context, "get_spec", lambda: None)()
    scope, names = DraftScope(arguments, 12), ("speculative_num_draft_tokens", "speculative_eagle_topk")

    def seen() -> dict[str, Any]:
        by_arguments = [getattr(resolved_view(given), names[0]) for given in (arguments, scope.arguments)]
        return {"arguments": by_arguments, "configuration": spec and [getattr(spec, name) for name in names]}

    before = seen()
    with scope():
        within = seen()
    view = resolved_view(arguments)
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    own = [name for name in vars(DDTreeWorker) if callable(getattr(DDTreeWorker, name)) and name != "__module__"]
    return {
        "of_sglang": sorted(name for name in own if name in vars(DFlashWorkerV2)),
        "rows": [algorithm.get_num_tokens_per_req_for_target_verify(17, draft) for draft in (False, True)],
        "reserved": RESERVED,
        "reserved_fields": [hasattr(DDTreeDraftInput, f"{RESERVED}_{end}") for end in ("cpu", "sum")],
        "before": before, "within": within, "after": seen(),
        "key_fields_missing": [name for name in KEY_FIELDS if not hasattr(view, name)],
        "read_by_the_worker": [view.sampling_backend, view.random_seed, view.ep_size],
    }  # fmt: skip


def verify_pass(own_tables: bool, graphs: bool) -> list[str]:
    """What the worker's verify pass does in turn; runner and pass are stood in."""
    import torch
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    from ddtree.kernels.tree_build import build_tree
    from ddtree.sglang.settings import TreeSettings
    from ddtree.sglang.tree_tables import KNOWN_PARAMETERS
    from ddtree.sglang.verify_mask import MaskBuffer, write_verify_mask
    from ddtree.sglang.worker import DDTreeWorker

    steps: list[str] = []

    class FlashAttentionBackend:
        topk, has_swa = 2, False

    def theirs(**_: Any) -> None:
        steps.append("by the mask")

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in KNOWN_PARAMETERS]
    theirs.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    backend = FlashAttentionBackend()
    backend._apply_cuda_graph_metadata = theirs  # type: ignore[attr-defined]
    globals()["build_trtllm_mha_page_table"] = lambda **_: None

    class Worker(DDTreeWorker):
        model_runner = types.SimpleNamespace(attn_backend=backend)
        kernels = types.SimpleNamespace(write_tree_tables=lambda *_: steps.append("own tables"))
        _is_first_rank, _resolved = True, types.SimpleNamespace(disable_cuda_graph=not graphs)
        settings = TreeSettings(2, 2, 4, own_tables=own_tables)

    def prepare(self: Any, batch: Any, target: Any) -> tuple[None, bool]:
        size, width = len(batch.seq_lens), 3
        zeros = functools.partial(torch.zeros, dtype=torch.int32)
        for name, rows in (("normal", size), ("expand", size * width)):
            made = types.SimpleNamespace(
                cache_seqlens_int32=zeros(rows), cu_seqlens_k=zeros(rows + 1), page_table=zeros(rows, width),
            )  # fmt: skip
            setattr(backend, f"target_verify_metadata_topk_{name}", {size: made})
        backend.max_context_len = backend.page_size = 1  # type: ignore[attr-defined]
        backend.req_to_token = None  # type: ignore[attr-defined]
        mode = types.SimpleNamespace(is_target_verify=lambda: True)
        given = {"bs": size, "seq_lens": batch.seq_lens, "req_pool_indices": batch.seq_lens, "forward_mode": mode}
        backend._apply_cuda_graph_metadata(**given)  # type: ignore[attr-defined]
        return None, True

    DFlashVerifyInput.prepare_for_verify = prepare
    worker = object.__new__(Worker)
    worker._tables, worker._mask = worker._make_tables(), MaskBuffer(write_verify_mask, torch.device("cpu"))
    seen = types.SimpleNamespace(logits_output=types.SimpleNamespace(hidden_states=1), can_run_cuda_graph=True)
    target = types.SimpleNamespace(forward_batch_generation=lambda **_: seen)
    worker._target_worker = target
    Worker.target_worker = target
    scores, tokens = torch.zeros(1, 3, 2), torch.arange(2).expand(1, 3, 2)
    tree = build_tree(scores, tokens, torch.zeros(1).long(), 2, torch.full((1,), 3))
    lengths = torch.ones(1, dtype=torch.int64)
    batch = types.SimpleNamespace(seq_lens=lengths, seq_lens_cpu=lengths, seq_lens_sum=1, spec_info=None)
    worker._verify(batch, types.SimpleNamespace(slots=torch.arange(4)[None]), tree)
    return steps


def draft_pass(in_graph: bool) -> list[str]:
    """What the worker's draft does in turn; head and pass are stood in."""
    import torch

    from ddtree.sglang.worker import DDTreeWorker

    steps: list[str] = []

    class Head:
        def take_temperatures(self, info: str, batch: int) -> None:
            steps.append(f"temperatures of {batch}: {info}")

        def __call__(self, hidden: str, *_: Any) -> None:
            steps.append(f"trees of {hidden}")

        def trees(self, batch: int) -> None:
            steps.append(f"{batch} trees read")

    def run(*_: Any) -> Any:
        steps.append("pass")
        states = types.SimpleNamespace(hidden_states="states")
        return types.SimpleNamespace(can_run_graph=in_graph, logits_output=states)

    worker = object.__new__(DDTreeWorker)
    worker._head, worker._draft_pass = Head(), run
    blocks = torch.zeros(3, 4)
    batch = types.SimpleNamespace(sampling_info="how they sample")
    worker._draft(batch, types.SimpleNamespace(block_ids=blocks, block_positions=blocks))
    return steps


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    cases = json.load(sys.stdin)
    prepare()
    from sglang.srt.plugins import load_plugins

    others = [flags for flags in cases if "DDTREE" not in flags and not any(f.startswith(OUR_FLAGS) for f in flags)]
    before = [answer(flags) for flags in others]
    load_plugins()
    told = {"before": before, "after": [answer(flags) for flags in others], "answers": [answer(f) for f in cases]}
    told |= {"worker": worker(next(flags for flags in cases if "DDTREE" in flags))}
    told |= {"verify_passes": [verify_pass(*asked) for asked in ((True, True), (False, True), (True, False))]}
    told |= {"draft_passes": [draft_pass(in_graph) for in_graph in (True, False)]}
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
