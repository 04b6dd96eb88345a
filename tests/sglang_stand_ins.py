"""Runs SGLang's argument resolution on a machine without a GPU and without SGLang's heavy needs.

Packages that SGLang imports but that resolving arguments never uses are stood in for by modules whose every name is a
class that does nothing; torch says that it sees an H200. SGLang itself, its parser, its resolution and its plugin
loader are the released ones.

    python sglang_stand_ins.py SOURCE < cases.json     cases: [[flag, ...], ...]; one JSON line with an answer for each
"""

import dataclasses
import importlib.abc
import importlib.machinery
import json
import os
import pickle
import sys
import types
from typing import Any

STOOD_IN = {"triton", "sgl_kernel", "flashinfer", "torchvision", "IPython", "aiohttp", "xgrammar", "sentencepiece"}
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
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    everything = {
        field.name: repr(getattr(found, field.name)) for field in dataclasses.fields(found) if field.name != "port"
    }
    shown = {name: getattr(found, name, None) for name in SHOWN}
    # As the scheduler tells /server_info: all attributes of the arguments, which were pickled into its process.
    state = vars(pickle.loads(pickle.dumps(found)))
    shown["internal_state"] = {name: value for name, value in state.items() if "speculative" in name}
    shown["internal_state"] |= {"model_path": found.model_path}
    return shown | {"resolved": os.environ.get("DDTREE_SGLANG_RESOLVED"), "everything": everything}


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    cases = json.load(sys.stdin)
    prepare()
    from sglang.srt.plugins import load_plugins

    others = [flags for flags in cases if "DDTREE" not in flags and not any(f.startswith(OUR_FLAGS) for f in flags)]
    before = [answer(flags) for flags in others]
    load_plugins()
    told = {"before": before, "after": [answer(flags) for flags in others], "answers": [answer(f) for f in cases]}
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
