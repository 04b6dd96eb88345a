"""How the results were measured, on what, and what gets them again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ddtree.bench.record import RunRecord, SessionRecord
from ddtree.report.configuration import configuration_of
from ddtree.report.markdown import table
from ddtree.report.results import ResultSet
from ddtree.report.server_facts import server_facts


def method(results: ResultSet) -> str:
    """What the numbers are, and how they came about."""
    if not results.measurements:
        return ""
    repetitions = sorted({each.numbers.repetitions for each in results.measurements})
    cached = [each.numbers.cached_share for each in results.measurements if each.numbers.cached_share is not None]
    lines = [
        f"- Repetitions: {', '.join(map(str, repetitions))}; repetition after repetition, the cells of each in another "
        "order. Values are medians; in brackets are 95 % intervals from a bootstrap over repetitions and the requests "
        "in them" + (", which are too narrow for fewer than 5 repetitions." if repetitions[0] < 5 else "."),
        "- tok/s of one user: (tokens - 1) / (last - first event), by the tokens of usage. TTFT is apart from it.",
        "- tok/s in total: tokens that arrived in the steady window, from when twice as many requests as slots were "
        "sent until the last was sent, over its length.",
        "- tau: committed tokens per round, the bonus token included, by "
        + " and ".join(
            sorted({f"the {each.numbers.tau_from}" for each in results.measurements if each.numbers.tau_from})
        )
        + "; its intervals are drawn over prompts.",
        "- Requests with errors are counted and enter no other number.",
    ]
    if len(results.runs) > 1:
        lines.append(
            f"- The {len(results.runs)} runs came one after the other: what drifted on the machine between them is in "
            "the numbers."
        )
    if cached:
        told = " to ".join(dict.fromkeys((f"{min(cached):.0%}", f"{max(cached):.0%}")))
        lines.append(f"- Of prompt tokens, {told} came from the server's prefix cache.")
    return "## How it was measured\n\n" + "\n".join(lines)


def reproduce(results: ResultSet) -> str:
    """The commands, and what they ran on."""
    commands = list(dict.fromkeys(_command(session.command) for session in results.sessions))
    commands += [command for each in results.grades if (command := _command(each.record.command)) not in commands]
    parts = ["## How to get it again", "```console\n" + "\n".join(f"$ {command}" for command in commands) + "\n```"]
    rows = [("measured from", machine) for machine in machines(results)]
    rows += [("commit, versions", program) for program in dict.fromkeys(map(_program, results.sessions))]
    names = {run.run_id: run_name(run) for run in results.runs}
    rows += dict.fromkeys(
        (f"deployment of {names.get(each.run_id, each.run_id)}", f"SHA-256 {each.deployment_sha256[:16]}")
        for each in results.sessions
        if each.deployment_sha256
    )
    prompts = [
        (f"prompts: {each.name}", f"{each.prompts} from {each.source}, SHA-256 {each.sha256[:16]}")
        for run in results.runs
        for each in run.plan.workloads
    ]
    rows += dict.fromkeys(prompts)
    if rows:
        parts.append(table(("", ""), rows, "ll"))
    if facts := server_facts(results.sessions):
        told = "\n".join(facts)
        head = "From the server's own account at the last start (all of it is in `sessions.jsonl`):"
        parts.append(f"{head}\n\n```text\n{told}\n```")
    return "\n\n".join(parts)


def run_name(run: RunRecord) -> str:
    """What was deployed for it, where a sweep says so; else its label."""
    return configuration_of(run, "server").name if run.settings else run.label


def machines(results: ResultSet) -> list[str]:
    """The machines that the results were measured from, each once."""
    return list(dict.fromkeys(map(_machine, results.sessions)))


def _machine(session: SessionRecord) -> str:
    host = session.host
    gpus = ", ".join(f"{gpu.get('name')} (driver {gpu.get('driver_version')})" for gpu in session.gpus)
    told = f"{host.get('cpu')}, {host.get('cores')} cores, {host.get('memory_gib')} GiB"
    return f"{told}, GPUs: {gpus or 'none'}"


def _program(session: SessionRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in session.versions.items() if version)
    return f"{session.commit or 'not from a checkout'}; {versions}"


def _command(words: Sequence[str]) -> str:
    return shlex.join(word for word in words if word != "--resume")
