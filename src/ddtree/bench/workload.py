"""The prompts of a measurement: conversations from a JSONL file or from the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree.bench.record import WorkloadRecord
from ddtree.errors import UserError


@dataclass(frozen=True)
class Problem:
    """A conversation's user turns, and whatever else its line holds (what grading needs)."""

    id: str
    turns: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Workload:
    """Named prompts. ``source`` says whence without a machine's paths."""

    name: str
    source: str
    problems: tuple[Problem, ...]
    note: str | None = None

    def record(self) -> WorkloadRecord:
        told = json.dumps([[problem.id, problem.turns] for problem in self.problems])
        digest = hashlib.sha256(told.encode()).hexdigest()
        return WorkloadRecord(
            name=self.name, source=self.source, prompts=len(self.problems), sha256=digest, note=self.note
        )


@dataclass(frozen=True)
class HubSet:
    """Where a well-known set lies on the hub, and how a row becomes a prompt."""

    path: str
    config: str | None
    split: str
    turns: Callable[[dict[str, Any]], list[str]]


_FINAL_ANSWER = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_HUB = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", lambda row: [row["question"] + _FINAL_ANSWER]),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + _FINAL_ANSWER]),
    "humaneval": HubSet(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: [f"Complete this Python function and give all of it:\n```python\n{row['prompt']}\n```"],
    ),
    "mbpp": HubSet("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
}


def read_workload(spec: str, base: Path | None = None, limit: int | None = None) -> Workload:
    """A workload as it is typed: ``hub:NAME``, or a JSONL file, in front of which ``NAME=`` may stand.

    Args:
        base: folder that relative paths start from; the current one where None.
        limit: take only the first so many problems.

    Raises:
        UserError: there is no such file or set, or a line of it has no ``turns``.
    """
    name, equals, rest = spec.partition("=")
    if not equals:
        name, rest = "", spec
    if rest.startswith("hub:"):
        workload = _from_hub(rest.removeprefix("hub:"), name)
    else:
        path = Path(rest).expanduser()
        workload = _from_file(base / path if base else path, name)
    if "/" in workload.name:
        raise UserError(f"the workload's name {workload.name!r} has a slash", "choose another one")
    if limit is not None and limit < len(workload.problems):
        note = f"the first {limit} of {len(workload.problems)}"
        workload = Workload(workload.name, workload.source, workload.problems[:limit], note)
    return workload


def read_problems(path: Path) -> tuple[Problem, ...]:
    """The problems of a JSONL file; ``turns`` is required, ``id`` defaults to the line's number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "give a JSONL file, or hub:NAME") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", "give a JSONL file") from error
    found = [_read_line(f"{path}, line {number}", number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"{path} holds no prompts", 'write one object a line, such as {"turns": ["Hello!"]}')
    _refuse_doubles(path, found)
    return tuple(found)


def _from_file(path: Path, name: str) -> Workload:
    return Workload(name or path.stem, path.name, read_problems(path))


def _from_hub(hub_name: str, name: str) -> Workload:
    found = _HUB.get(hub_name)
    if found is None:
        raise UserError(f"no set is known as hub:{hub_name}", f"choose one of {', '.join(_HUB)}, or give a JSONL file")
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"hub:{hub_name} needs ddtree[hub]", "pip install 'ddtree[hub]', or give a JSONL file"
        ) from None
    try:
        rows = load_dataset(found.path, found.config, split=found.split)
    except Exception as error:  # whatever the hub's client raises: no network, no such set, a changed layout
        raise UserError(
            f"hub:{hub_name} could not be loaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            "give a JSONL file",
        ) from None
    problems = [
        Problem(f"{hub_name}/{number}", tuple(found.turns(dict(row))), dict(row)) for number, row in enumerate(rows)
    ]
    return Workload(name or hub_name, f"hub {found.path} {found.split}", tuple(problems))


def _read_line(place: str, number: int, line: str) -> Problem:
    remedy = 'write it as {"turns": ["Hello!"]}'
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error})", remedy) from error
    turns = content.get("turns") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise UserError(f"{place} has no 'turns' list of non-empty texts", remedy)
    if any("\ud800" <= character <= "\udfff" for turn in turns for character in turn):
        raise UserError(f"{place} is not valid Unicode text", "write characters whole, without lone surrogates")
    identity = content.get("id", f"line-{number}")
    if not isinstance(identity, str | int):
        raise UserError(f"{place}: 'id' is neither text nor a number", remedy)
    return Problem(str(identity), tuple(turns), content)


def _refuse_doubles(path: Path, problems: Iterable[Problem]) -> None:
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise UserError(f"{path} has the id {problem.id!r} twice", "give each line an id of its own")
        seen.add(problem.id)
