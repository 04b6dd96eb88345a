"""The command without any model: help, version, and everything that is refused before a model is loaded."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from command import ddtree, is_one_line_for_the_user

import ddtree as package
from ddtree.cli import main as main_module
from ddtree.cli.main import run
from ddtree.errors import UserError

PROMPT = ("--prompt", "Hello")


def test_version() -> None:
    result = ddtree("--version")
    assert (result.returncode, result.stdout) == (0, f"ddtree {package.__version__}\n")


@pytest.mark.parametrize("verb", [(), ("demo",), ("generate",), ("chat",)])
def test_help_fits_a_narrow_terminal(verb: tuple[str, ...]) -> None:
    result = ddtree(*verb, "--help")
    assert result.returncode == 0
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 60
    assert result.stderr == ""


def test_every_promised_flag_of_generate_exists() -> None:
    shown = set(re.findall(r"--[a-z-]+", ddtree("generate", "--help", COLUMNS="120").stdout))
    wanted = """--model --draft --mode --budget --top-k-cap --block-size --draft-window --draft-temperature
        --prompt --prompts
        --max-new-tokens --temperature --seed --dtype --device --json --no-chat --max-model-len --memory-fraction
        --max-batch --top-p --top-k --min-p --repetition-penalty --presence-penalty --frequency-penalty --stop
        --threads --exact"""
    assert shown == {*wanted.split(), "--help"}


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from ddtree.cli.main import run; run(['generate', '--help'])"
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "--budget" in result.stdout
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("verb", [("demo",), ("generate", *PROMPT), ("chat",)])
def test_a_missing_extra_is_named(verb: tuple[str, ...], tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; from ddtree.cli.main import run; sys.exit(run({list(verb)!r}))"
    environment = os.environ | {"DDTREE_CACHE": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert is_one_line_for_the_user(result, f"ddtree {verb[0]} needs ddtree[engine]", "pip install 'ddtree[engine]'")
    assert list(tmp_path.iterdir()) == []  # told before anything is fetched


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate",), ("nothing to generate from", "--prompt")),
        (("generate", *PROMPT, "--prompts", "x.jsonl"), ("contradict",)),
        (("generate", "--prompt", ""), ("empty",)),
        (("generate", "--prompts", "no-such-file.jsonl"), ("no-such-file.jsonl", "No such file")),
        (("generate", "--prompts", "/"), ("cannot read /", "directory")),
        (("generate", *PROMPT, "--mode", "ar", "--budget", "8"), ("--budget has no meaning in mode ar",)),
        (("generate", *PROMPT, "--mode", "ar", "--top-k-cap", "8"), ("--top-k-cap",)),
        (("generate", *PROMPT, "--mode", "ar", "--block-size", "8"), ("--block-size",)),
        (("generate", *PROMPT, "--mode", "ar", "--draft-window", "8"), ("--draft-window",)),
        (("generate", *PROMPT, "--model", "m", "--budget", "8"), ("--budget has no meaning in mode ar", "add --draft")),
        (("generate", *PROMPT, "--model", "m", "--mode", "tree"), ("--mode tree needs a drafter", "add --draft DIR")),
        (("generate", *PROMPT, "--model", "m", "--mode", "chain"), ("--mode chain needs a drafter",)),
        (("generate", *PROMPT, "--mode", "chain", "--top-k-cap", "4"), ("--top-k-cap does not apply to a chain",)),
        (
            ("generate", *PROMPT, "--mode", "chain", "--draft-temperature", "0.8"),
            ("--draft-temperature does not apply to a chain",),
        ),
        (("generate", *PROMPT, "--mode", "ar", "--draft-temperature", "0.8"), ("--draft-temperature has no meaning",)),
        (("generate", *PROMPT, "--draft-temperature", "nan"), ("--draft-temperature", "no plain number")),
        (("generate", *PROMPT, "--draft-temperature", "0.05"), ("--draft-temperature", "at least 0.1")),
        (("generate", *PROMPT, "--top-p", "0.9"), ("--top-p has no effect at temperature 0",)),
        (("generate", *PROMPT, "--mode", "fast"), ("fast", "tree")),
        (("generate", *PROMPT, "--budget", "many"), ("--budget", "auto or a whole number")),
        (("generate", *PROMPT, "--budget", "8_0"), ("--budget is '8_0'", "choose auto or a whole number")),
        (("generate", *PROMPT, "--mode", "chain", "--budget", "auto"), ("budget is 'auto'", ": choose a whole number")),
        (("demo", "--budget", "8_0"), ("--budget", "'8_0' is not a whole number")),
        (("generate", *PROMPT, "--max-batch", "0"), ("--max-batch",)),
        (("generate", *PROMPT, "--frobnicate"), ("--frobnicate", "ddtree generate --help")),
        (("generate", *PROMPT, "surplus"), ("surplus",)),
        (("speak",), ("speak",)),
        (("chat", "--mode", "ar", "--budget", "3"), ("--budget",)),
        (("demo", "--dtype", "float8"), ("float8",)),
    ],
)
def test_contradictions_and_nonsense_are_refused(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert is_one_line_for_the_user(ddtree(*arguments), *words)


def test_no_arguments_shows_the_help() -> None:
    result = ddtree()
    assert result.returncode == 2 and "generate" in result.stdout + result.stderr


def test_faults_of_ours_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(main_module.typer.main, "get_command", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run(["--version"])


def test_a_user_error_is_one_line_whatever_it_holds() -> None:
    error = UserError("cause\nover lines", "  remedy\t here ")
    assert str(error) == "cause over lines: remedy here"
    assert (error.cause, error.remedy) == ("cause over lines", "remedy here")
    assert str(UserError("alone")) == "alone"


def test_a_closed_pipe_is_no_error_of_ours() -> None:
    command = f"'{sys.executable}' -m ddtree generate --help | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1, 141) and result.stderr == ""


def test_ctrl_c_exits_130(tmp_path: Path) -> None:
    """While the package index is being asked: an address that never answers."""
    environment = os.environ | {
        "DDTREE_CACHE": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://192.0.2.1/simple",  # an address reserved for documentation
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtree", "generate", *PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a parent in the background ignores it
    )
    assert process.stderr
    while "asking the package index" not in (line := process.stderr.readline()):
        assert line, "ended early"
    os.killpg(process.pid, signal.SIGINT)
    output, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == "" and "interrupted" in complaint and "Traceback" not in complaint
