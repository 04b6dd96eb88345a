"""``README.md`` of a kit: what it is, what is in it, how to check it, bring it back to life and measure it again."""

from __future__ import annotations

import json
from pathlib import Path

from ddtree.kit.record import (
    ENVIRONMENT,
    EXPERIMENT,
    FETCH,
    PATCHES,
    VERIFY,
    CellSummary,
    EnvironmentRecord,
    ExperimentRecord,
    FetchList,
    KitRecord,
    PatchRecord,
    Place,
    read_record,
)
from ddtree.plain_text import printable
from ddtree.report.markdown import told_value

_PARTS = {
    "deployment.toml": "the deployment file: one description of the service",
    "services/": "the unit as the host had it (`.installed`), as the file gives it (`.rendered`), and how they differ",
    "process.json": "command line and environment of the process that served",
    "patches/": "files of the engine that were not as released: whole (`full/`), and for `git apply` (`diffs/`)",
    "env/": "packages with hashes, Python, driver, GPUs and topology, operating system",
    "model/": "the target's small files and `fetch.json`: its weights by revision, size and SHA-256",
    "drafter/": "the same of the drafter",
    "logs/": "the end of the service's log",
    "verify.json": "what `ddtree verify` found when the kit was sealed",
    "bench/": "scripts, sweep files and prompts, and `results/` as they were measured",
    "experiments/": "one folder for each measured configuration, with a manifest of its own",
    "REPORT.md": "findings from the results (`REPORT.html`: the same with plots)",
    "kit.json": "what is in the kit, and what could not be captured",
    "ro-crate-metadata.json": "the same for archives (RO-Crate, Process Run Crate)",
}


def guide(kit: KitRecord, payload: Path) -> str:
    """The text of ``README.md``."""
    lines = [f"# {kit.name}", "", _opening(kit), ""]
    if kit.even_if_failing:
        lines += ["**This kit was sealed although not every service was proven to do what it declares.**", ""]
    for place in kit.places:
        lines += _place(place, payload)
    lines += ["## What is in it", "", "All of it lies in `data/`.", ""]
    lines += [f"- `{name}`: {told}" for name, told in _PARTS.items() if (payload / name.rstrip("/")).exists()]
    if kit.masked:
        lines += ["", f"{sum(each.times for each in kit.masked)} secrets were masked: `kit.json` lists where."]
    for note in kit.notes:
        lines += ["", note]
    lines += ["", "## Check it", "", "From this kit's folder, with common tools:", ""]
    lines += [_code("sha256sum --quiet -c manifest-sha256.txt tagmanifest-sha256.txt"), ""]
    lines += ["Or all of it, names, forms and signatures too:", "", _code("ddtree kit check ."), ""]
    lines += ["## Bring it back to life", "", "Look at every step first, then go:", ""]
    lines += [_code("ddtree kit restore . --plan", "ddtree kit restore ."), ""]
    lines += ["It goes to this machine. For another one:", ""]
    lines += [_code("ddtree kit restore . --set host.kind='\"ssh\"' --set host.address='\"MACHINE\"'"), ""]
    lines += [
        "Secrets are not in the kit: their sources in `deployment.toml` must be there, or be given with `--set`.",
        "",
    ]
    lines += _experiments(kit, payload)
    return printable("\n".join(lines).rstrip() + "\n")


def _opening(kit: KitRecord) -> str:
    names = ", ".join(place.name for place in kit.places)
    return (
        f"Reproduction kit of {names}, sealed {kit.sealed} by {kit.tool}. Verdict at sealing: **{kit.verdict}**. "
        f"{len(kit.experiments)} measured configurations."
    )


def _place(place: Place, payload: Path) -> list[str]:
    folder = payload / place.folder
    lines = [
        f"## {place.name}",
        "",
        f"- engine: {place.engine}; service {'ran' if place.is_running else 'did not run'}",
    ]
    lines.append(f"- verdict: {place.verdict}{_findings(folder)}")
    if (folder / ENVIRONMENT).exists():
        environment = read_record(EnvironmentRecord, folder / ENVIRONMENT)
        hashed = sum(each.wheel_sha256 is not None for each in environment.packages)
        lines.append(
            f"- Python {environment.python}, {len(environment.packages)} packages, {hashed} with a wheel's hash"
        )
    if (folder / PATCHES).exists():
        patches = read_record(PatchRecord, folder / PATCHES)
        told = f"{len(patches.files)} changed files" if patches.base != "none" else "could not be compared"
        lines.append(f"- {patches.package} {patches.version or ''}: {told} (base: {patches.base})")
    for name in ("model", "drafter"):
        if (folder / name / FETCH).exists():
            lines.append(f"- {name}: {_weights(read_record(FetchList, folder / name / FETCH))}")
    lines += [f"- note: {note}" for note in place.notes]
    return [*lines, ""]


def _weights(fetch: FetchList) -> str:
    size = sum(each.size_bytes for each in fetch.files)
    whence = f"{fetch.repo}@{fetch.revision}" if fetch.repo else fetch.source
    return f"{whence}, {len(fetch.files)} files, {size / 1e9:.2f} GB" if fetch.files else whence


def _findings(folder: Path) -> str:
    try:
        told = json.loads((folder / VERIFY).read_text(encoding="utf-8"))
        bad = [each["claim"] for each in told.get("findings", ()) if each["status"] == "violated"]
        return f" ({'; '.join(bad)})" if bad else f" ({told['reason']})" if "reason" in told else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _experiments(kit: KitRecord, payload: Path) -> list[str]:
    if not kit.experiments:
        return []
    lines = ["## Measured", "", "Medians with 95 % intervals; tau: committed tokens a round.", ""]
    lines += ["| configuration | cell | tok/s of one user | tau | requests |", "| --- | --- | --- | --- | --- |"]
    for identity in kit.experiments:
        record = read_record(ExperimentRecord, payload / "experiments" / identity / EXPERIMENT)
        for cell in record.cells:
            numbers = f"{_told(cell.user_tok_s)} | {_told(cell.tau)} | {cell.requests}"
            lines.append(f"| {record.configuration} | {_cell(cell)} | {numbers} |")
    commands = list(dict.fromkeys(_command(kit, payload, identity) for identity in kit.experiments))
    return [*lines, "", "To measure again, what was run was:", "", _code(*commands), ""]


def _command(kit: KitRecord, payload: Path, identity: str) -> str:
    return " ".join(read_record(ExperimentRecord, payload / "experiments" / identity / EXPERIMENT).command)


def _cell(cell: CellSummary) -> str:
    context = "" if cell.context_tokens is None else f", context {cell.context_tokens}"
    return f"{cell.workload}{context}, {cell.concurrency} at once, T={cell.temperature:g}"


def _told(three: tuple[float, float, float] | None) -> str:
    return "" if three is None else f"{told_value(three[0])} [{told_value(three[1])}, {told_value(three[2])}]"


def _code(*lines: str) -> str:
    return "```sh\n" + "\n".join(lines) + "\n```"
