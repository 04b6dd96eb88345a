"""Every flag that is written is a flag of the engine's own parser, with a value that it takes."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from ddtree.deploy import load_deployment, to_deployment
from ddtree.deploy.combinations import TREE_BACKENDS, TREE_BACKENDS_MLA
from ddtree.deploy.flags import FLAGS, OTHER_SPELLINGS, key_of
from ddtree.deploy.render import render
from ddtree.deploy.sections import EngineKind
from ddtree.errors import UserError
from ddtree.user_cache import cache_folder

from .test_deployment import BASE, EXAMPLES, PLAIN, SGLANG, VLLM, changed

SGLANG_VERSION = "0.5.16"
FROM_OUR_PLUGIN = {
    "--speculative-ddtree-budget",
    "--speculative-ddtree-topk-cap",
    "--speculative-ddtree-draft-temperature",
}

# Of vLLM 0.32, vllm/engine/arg_utils.py and the OpenAI server's own; its wheels are too large to fetch for a test.
VLLM_FLAGS = """
--revision --served-model-name --trust-remote-code --tensor-parallel-size --enable-expert-parallel
--pipeline-parallel-size --data-parallel-size --nnodes --node-rank --master-addr --master-port --speculative-config
--dtype --enforce-eager --cudagraph-capture-sizes --attention-backend --gpu-memory-utilization --max-num-seqs
--max-model-len --host --port
"""

EVERYTHING: dict[EngineKind, list[dict[str, Any]]] = {
    "native": [
        changed(
            BASE,
            {
                "engine.venv": "/v",
                "model.served_name": "n",
                "speculation": {
                    "algorithm": "ddtree",
                    "budget": 8,
                    "topk_cap": 4,
                    "block_size": 8,
                    "draft_window": 64,
                    "draft_temperature": 0.8,
                },
                "runtime": {
                    "device": "cpu",
                    "dtype": "float32",
                    "memory_fraction": 0.5,
                    "max_running_requests": 3,
                    "context_length": 512,
                    "threads": 2,
                    "exact": True,
                    "extra_args": ["--max-queue", "3"],
                },
                "service.address": "0.0.0.0",
                "service.allow_unauthenticated": True,
            },
        ),
        changed(BASE, {"engine.venv": "/v", "secrets.api_key": {"env": "K"}, "speculation.budget": "auto"}),
        changed(BASE, {"engine.venv": "/v", "speculation": {"algorithm": "dflash", "budget": 4}}),
        changed(PLAIN, {"engine.venv": "/v", "model": {"demo": True}}),
    ],
    "sglang": [
        changed(
            SGLANG,
            {
                "model": {"hub": "a/b", "revision": "0" * 40, "trust_remote_code": True, "attention": "mla"},
                "drafter": {"hub": "a/d", "revision": "1" * 40},
                "parallelism": {"tp": 8, "ep": 4, "dp": 2, "nodes": 2, "node_rank": 1, "init_address": "10.0.0.1:5000"},
                "speculation": {
                    "algorithm": "ddtree",
                    "budget": 8,
                    "topk_cap": 4,
                    "block_size": 8,
                    "draft_window": 64,
                    "draft_temperature": 1,
                },
                "runtime": {
                    "dtype": "bfloat16",
                    "memory_fraction": 0.5,
                    "max_running_requests": 3,
                    "context_length": 512,
                    "cuda_graph_sizes": [1, 2],
                    "nvls": True,
                    "attention_backend": "triton",
                    "extra_args": ["--page-size", "64"],
                },
                "secrets.api_key": {"env": "K"},
                "service.allow_key_in_log": True,
            },
        ),
        changed(
            changed(SGLANG, {"drafter": None}),
            {
                "speculation": {"algorithm": "none"},
                "parallelism": {"tp": 8, "pp": 8, "dp": 2, "dp_attention": True},
                "runtime.cuda_graphs": False,
            },
        ),
    ],
    "vllm": [
        changed(
            VLLM,
            {
                "model": {"hub": "a/b", "revision": "0" * 40, "trust_remote_code": True},
                "drafter": {"hub": "a/d", "revision": "1" * 40},
                "parallelism": {"tp": 4, "ep": 8, "dp": 2, "nodes": 2, "init_address": "10.0.0.1:5000"},
                "runtime": {
                    "dtype": "bfloat16",
                    "memory_fraction": 0.5,
                    "max_running_requests": 3,
                    "context_length": 512,
                    "cuda_graph_sizes": [1, 2],
                    "attention_backend": "flashinfer",
                },
            },
        ),
        changed(
            changed(VLLM, {"drafter": None}),
            {
                "speculation": {"algorithm": "none"},
                "parallelism": {"tp": 2, "pp": 2},
                "runtime": {"cuda_graphs": False},
            },
        ),
    ],
}


def command(data: dict[str, Any]) -> tuple[str, ...]:
    return render(to_deployment(data)).command


def flags_in(words: tuple[str, ...]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("kind", ["native", "sglang", "vllm"])
def test_every_flag_of_the_table_is_written_by_some_deployment(kind: EngineKind) -> None:
    """So that the tests against the parsers see all of them."""
    written = set().union(*(flags_in(command(data)) for data in EVERYTHING[kind]))
    assert set(FLAGS[kind]) <= written, set(FLAGS[kind]) - written


def native_parser() -> Any:
    from ddtree.cli.main import app

    group: Any = typer.main.get_command(app)
    return group.commands["serve"]


def parse_native(words: tuple[str, ...]) -> dict[str, Any]:
    """What `ddtree serve` would be called with, by flag; it refuses what it does not know."""
    assert words[1] == "serve"
    parser = native_parser()
    with parser.make_context("serve", list(words[2:])) as context:
        return {flag: context.params[option.name] for option in parser.params for flag in option.opts}


@pytest.mark.parametrize("data", EVERYTHING["native"])
def test_the_native_server_takes_every_flag(data: dict[str, Any]) -> None:
    parse_native(command(data))


def test_the_native_server_understands_what_was_meant() -> None:
    told = parse_native(command(EVERYTHING["native"][0]))
    wanted = {
        "--model": Path("/models/target"),
        "--draft": Path("/models/drafter"),
        "--served-model-name": "n",
        "--mode": "tree",
        "--budget": "8",
        "--top-k-cap": 4,
        "--block-size": 8,
        "--draft-window": 64,
        "--draft-temperature": 0.8,
        "--device": "cpu",
        "--dtype": "float32",
        "--memory-fraction": 0.5,
        "--max-batch": 3,
        "--max-model-len": 512,
        "--threads": 2,
        "--max-queue": 3,
        "--host": "0.0.0.0",
        "--port": 8000,
        "--allow-unauthenticated": True,
    }
    assert {flag: told[flag] for flag in wanted} == wanted
    key_file = parse_native(command(EVERYTHING["native"][1]))["--api-key-file"]
    assert key_file == Path("/run/credentials/s.service/api_keys")
    assert parse_native(command(EVERYTHING["native"][2]))["--mode"] == "chain"
    assert parse_native(command(EVERYTHING["native"][3]))["--mode"] == "ar"


@pytest.mark.parametrize("path", [path for path in EXAMPLES if "cpu" in path.stem or "h200" in path.stem])
def test_native_examples_are_taken(path: Path) -> None:
    words = render(load_deployment(path)).command
    parse_native(words[words.index("serve") - 1 :])


def test_other_spellings_of_the_native_server_are_its_own() -> None:
    known = {name for option in native_parser().params for name in (*option.opts, *option.secondary_opts)}
    assert set(OTHER_SPELLINGS["native"]) <= known


@pytest.fixture(scope="session")
def sglang_source() -> str:
    """`server_args.py` of SGLang's wheel, fetched once (15 MB) from the index that pip uses."""
    kept = cache_folder() / "test-sources" / f"sglang-{SGLANG_VERSION}-server_args.py"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder = kept.parent / "wheel"
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        fetch += ["--only-binary", ":all:", f"sglang=={SGLANG_VERSION}"]
        try:
            done = subprocess.run(fetch, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(fetch, 1, "", "it took longer than two minutes")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            print(f"\nSGLANG'S FLAGS ARE NOT CHECKED: {reason}", file=sys.__stderr__, flush=True)
            pytest.skip(f"no sglang wheel: {reason}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            kept.write_bytes(content.read("sglang/srt/server_args.py"))
        wheel.unlink()
        folder.rmdir()
    return kept.read_text(encoding="utf-8")


def sglang_flags(source: str) -> dict[str, bool]:
    """Every flag of SGLang's parser to whether it is deprecated: from the annotated fields of its arguments and what
    it adds by hand."""
    found: dict[str, bool] = {}
    tree = ast.parse(source)
    (arguments,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    for field in arguments.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(field.annotation, ast.Subscript) or ast.unparse(field.annotation.value) != "A":
            continue
        told = {
            keyword.arg: keyword.value
            for node in ast.walk(field.annotation)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Arg"
            for keyword in node.keywords
        }
        if "no_cli" in told:
            continue
        name = ast.literal_eval(told["cli_name"]) if "cli_name" in told else f"--{field.target.id.replace('_', '-')}"
        for flag in [name, *(ast.literal_eval(told["aliases"]) if "aliases" in told else [])]:
            found[flag] = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            actions = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "action"]
            for flag in node.args:
                if isinstance(flag, ast.Constant) and str(flag.value).startswith("--"):
                    found[str(flag.value)] = any("Deprecated" in action for action in actions)
    return found


def test_sglang_knows_every_flag(sglang_source: str) -> None:
    known = sglang_flags(sglang_source)
    assert len(known) > 300, "its arguments are read otherwise now"
    ours = set(FLAGS["sglang"]) - FROM_OUR_PLUGIN
    assert ours <= set(known), ours - set(known)
    assert not [flag for flag in ours if known[flag]], "deprecated"
    assert set(known) >= set(OTHER_SPELLINGS["sglang"]) - {"--tp"}  # argparse takes that for --tp-size


def test_sglang_has_the_attention_backends_that_are_named(sglang_source: str) -> None:
    (choices,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(sglang_source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTENTION_BACKEND_CHOICES"
    ]
    assert {*TREE_BACKENDS, *TREE_BACKENDS_MLA} <= set(choices)


def test_every_other_flag_of_sglang_may_be_given(sglang_source: str) -> None:
    """A flag that no key says must not be refused for looking like one."""
    said = set(FLAGS["sglang"]) | set(OTHER_SPELLINGS["sglang"])
    refused = [flag for flag in sglang_flags(sglang_source) if flag not in said and key_of("sglang", flag)]
    assert refused == []


def test_vllm_knows_every_flag() -> None:
    assert set(FLAGS["vllm"]) <= set(VLLM_FLAGS.split())
    words = command(EVERYTHING["vllm"][0])
    assert words[:3] == ("/v/bin/vllm", "serve", "a/b")
    drafting = json.loads(words[words.index("--speculative-config") + 1])
    assert drafting == {"method": "dflash", "model": "a/d", "num_speculative_tokens": 7, "revision": "1" * 40}


@pytest.mark.parametrize(
    ("base", "flag"), [(BASE, "--draft-temperature"), (SGLANG, "--speculative-ddtree-draft-temperature")]
)
def test_a_draft_temperature_is_written_plainly_and_only_where_it_is_set(base: dict[str, Any], flag: str) -> None:
    for given, written in ((0.8, "0.8"), (1, "1.0"), (10, "10.0")):
        words = command(changed(base, {"engine.venv": "/v", "speculation.draft_temperature": given}))
        assert (flag, written) in pairwise(words)
    assert flag not in command(changed(base, {"engine.venv": "/v"}))


def test_kimi_is_rendered_as_it_was_found_to_work() -> None:
    commands = {path.stem: render(load_deployment(path)).command for path in EXAMPLES if "kimi" in path.stem}
    assert set(commands) == {"kimi-k2.6-8x-rtx-pro-6000", "kimi-k2.6-8x-b300"}
    for words in commands.values():
        for flag, value in {
            "--speculative-algorithm": "DDTREE",
            "--speculative-ddtree-budget": "8",
            "--speculative-ddtree-topk-cap": "4",
            "--speculative-dflash-block-size": "8",
            "--speculative-draft-window-size": "2048",
            "--attention-backend": "triton",
            "--tp-size": "8",
        }.items():
            assert (flag, value) in pairwise(words)
    pcie, nvlink = commands["kimi-k2.6-8x-rtx-pro-6000"], commands["kimi-k2.6-8x-b300"]
    assert ("--ep-size", "8") in pairwise(pcie) and "--enable-nccl-nvls" not in pcie
    assert "--ep-size" not in nvlink and "--enable-nccl-nvls" in nvlink


def test_what_serves_is_stated() -> None:
    assert render(to_deployment(changed(BASE, {"engine.executable": "/x/ddtree"}))).command[:2] == (
        "/x/ddtree",
        "serve",
    )
    own = render(to_deployment(BASE)).command
    assert own[:4] == (sys.executable, "-m", "ddtree", "serve")
    for base in (
        changed(SGLANG, {"engine.venv": None}),
        changed(BASE, {"host": {"kind": "ssh", "address": "h"}}),
    ):
        with pytest.raises(UserError, match=r"engine\.venv is missing"):
            render(to_deployment(base))


def test_custom_speculation_is_the_engines_own() -> None:
    base = changed(SGLANG, {"drafter": None, "speculation": {"algorithm": "custom"}})
    arguments = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]
    words = command(changed(base, {"runtime.extra_args": arguments}))
    assert words[-4:] == tuple(arguments)
    assert shlex.join(words).count("--speculative-algorithm") == 1
