"""Two kits: what changed in configuration, environment, patches, machine and results."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree.doctor.recording import read_recording
from ddtree.errors import UserError
from ddtree.kit.record import (
    ENVIRONMENT,
    EXPERIMENT,
    FETCH,
    PATCHES,
    PROCESS,
    CellSummary,
    EnvironmentRecord,
    ExperimentRecord,
    FetchList,
    KitRecord,
    PatchRecord,
    Place,
    ProcessRecord,
    read_record,
)
from ddtree.plain_text import printable

Difference = dict[str, list[str]]


def compare_kits(old: tuple[Path, KitRecord], new: tuple[Path, KitRecord]) -> Difference:
    """Lines by subject; one without difference is left out. Lines begin with ``-``, ``+`` or a name."""
    found: Difference = {}
    before, after = ({place.name: place for place in kit.places} for _, kit in (old, new))
    names = list(dict.fromkeys([*before, *after]))
    if len(before) == len(after) == 1 and before.keys() != after.keys():
        found["deployments"] = [f"- {next(iter(before))}", f"+ {next(iter(after))}"]
        pairs = [("", next(iter(before.values())), next(iter(after.values())))]
    else:
        gone = [f"- {name}" for name in names if name not in after] + [f"+ {n}" for n in names if n not in before]
        found["deployments"] = gone
        several = len(names) > 1
        pairs = [(f"{n}: " if several else "", before[n], after[n]) for n in names if n in before and n in after]
    for prefix, one, other in pairs:
        for subject, lines in _places(old[0] / one.folder, new[0] / other.folder, one, other):
            found[f"{prefix}{subject}"] = list(lines)
    found["results"] = list(_results(old, new))
    return {printable(subject): [printable(line) for line in lines] for subject, lines in found.items() if lines}


def _places(old: Path, new: Path, before: Place, after: Place) -> Iterator[tuple[str, Iterator[str]]]:
    yield "verdict", _pair(before.verdict, after.verdict)
    yield "deployment file", _text(old / "deployment.toml", new / "deployment.toml")
    yield "unit", _text(_installed(old), _installed(new))
    yield "environment variables", _mapping(_variables(old), _variables(new))
    yield "packages", _mapping(_packages(old), _packages(new))
    yield "patches", _mapping(_patches(old), _patches(new))
    yield "machine", _mapping(_machine(old), _machine(new))
    for name in ("model", "drafter"):
        yield name, _mapping(_weights(old / name), _weights(new / name))


def _results(old: tuple[Path, KitRecord], new: tuple[Path, KitRecord]) -> Iterator[str]:
    before, after = _cells(*old), _cells(*new)
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            yield f"{'+' if one is None else '-'} {name}: {_numbers(other or one)}"
        elif one != other:
            ratio = (
                f"{other.user_tok_s[0] / one.user_tok_s[0]:.2f} times" if one.user_tok_s and other.user_tok_s else ""
            )
            yield f"{name}: {_numbers(one)} -> {_numbers(other)} {ratio}".rstrip()


def _cells(payload: Path, kit: KitRecord) -> dict[str, CellSummary]:
    found = {}
    for identity in kit.experiments:
        record = read_record(ExperimentRecord, payload / "experiments" / identity / EXPERIMENT)
        for cell in record.cells:
            context = "" if cell.context_tokens is None else f" ctx {cell.context_tokens}"
            where = f"{cell.workload}{context} c{cell.concurrency} t{cell.temperature:g}"
            found[f"{record.configuration}, {where}"] = cell
    return found


def _numbers(cell: CellSummary | None) -> str:
    if cell is None:
        return ""
    speed = f"{cell.user_tok_s[0]:.4g} tok/s" if cell.user_tok_s else "no answer"
    return f"{speed}, tau {cell.tau[0]:.3g}" if cell.tau else speed


def _pair(old: str, new: str) -> Iterator[str]:
    if old != new:
        yield f"- {old}"
        yield f"+ {new}"


def _text(old: Path | None, new: Path | None) -> Iterator[str]:
    before, after = (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path else [] for path in (old, new)
    )
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))
    yield from (line for line in lines[2:] if not line.startswith("@@"))


def _mapping(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            before, after = old.get(name), new.get(name)
            yield (
                f"- {name} {before}"
                if after is None
                else (f"+ {name} {after}" if before is None else f"{name}: {before} -> {after}")
            )


def _installed(folder: Path) -> Path | None:
    return next(iter(sorted((folder / "services").glob("*.installed"))), None)


def _variables(folder: Path) -> dict[str, str]:
    if not (folder / PROCESS).exists():
        return {}
    told = read_record(ProcessRecord, folder / PROCESS).environment
    return {name: value for name, value in told.items() if name != "INVOCATION_ID"}


def _packages(folder: Path) -> dict[str, str]:
    if not (folder / ENVIRONMENT).exists():
        return {}
    record = read_record(EnvironmentRecord, folder / ENVIRONMENT)
    found = {each.name: f"{each.version} ({(each.content_sha256 or '?')[:12]})" for each in record.packages}
    return {"Python": record.python, **found}


def _patches(folder: Path) -> dict[str, str]:
    if not (folder / PATCHES).exists():
        return {}
    record = read_record(PatchRecord, folder / PATCHES)
    return {each.path: f"{each.change} ({(each.sealed_sha256 or 'gone')[:12]})" for each in record.files}


def _machine(folder: Path) -> dict[str, str]:
    try:
        recording = read_recording(folder / "env" / "host.json")
    except UserError:
        return {}
    gpus = recording["gpus"].text.splitlines() if recording["gpus"].is_good else []
    told = {f"GPU {line.split(',')[0]}": ",".join(line.split(",")[1:4]).strip() for line in gpus}
    for name in ("kernel", "nvcc", "os_release", "cmdline"):
        if recording[name].is_good:
            told[name] = " ".join(recording[name].text.split())[:200]
    return told


def _weights(folder: Path) -> dict[str, str]:
    if not (folder / FETCH).exists():
        return {}
    record = read_record(FetchList, folder / FETCH)
    whence = {"source": f"{record.repo}@{record.revision}" if record.repo else record.source}
    return whence | {each.path: each.sha256[:12] for each in record.files}


def to_json(difference: Difference) -> dict[str, Any]:
    """Plain values, for machines."""
    return {"same": not difference, "differences": json.loads(json.dumps(difference))}
