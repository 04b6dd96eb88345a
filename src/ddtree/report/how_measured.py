"""How the results were measured, on what, and what gets them again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from ddtree.bench.record import SessionRecord
from ddtree.report.markdown import table
from ddtree.report.results import ResultSet


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
        lines.append(f"- Of prompt tokens, {min(cached):.0%} to {max(cached):.0%} came from the server's prefix cache.")
    return "## How it was measured\n\n" + "\n".join(lines)


def reproduce(results: ResultSet) -> str:
    """The commands, and what they ran on."""
    commands = list(dict.fromkeys(_command(session.command) for session in results.sessions))
    commands += [command for each in results.grades if (command := _command(each.record.command)) not in commands]
    parts = ["## How to get it again", "```console\n" + "\n".join(f"$ {command}" for command in commands) + "\n```"]
    rows = [("measured from", machine) for machine in machines(results)]
    rows += [("commit, versions", program) for program in dict.fromkeys(map(_program, results.sessions))]
    deployments = dict.fromkeys(each.deployment_sha256 for each in results.sessions if each.deployment_sha256)
    rows += [("deployment", digest) for digest in deployments]
    prompts = [
        (f"prompts: {each.name}", f"{each.prompts} from {each.source}, SHA-256 {each.sha256[:16]}")
        for run in results.runs
        for each in run.plan.workloads
    ]
    rows += dict.fromkeys(prompts)
    if rows:
        parts.append(table(("", ""), rows, "ll"))
    facts = _server_facts(results)
    if facts:
        parts.append(f"The server's own account, at the last start:\n\n```json\n{facts}\n```")
    return "\n\n".join(parts)


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


def _server_facts(results: ResultSet) -> str:
    for session in reversed(results.sessions):
        info = session.server_facts.get("/server_info") or session.server_facts.get("/get_server_info")
        if info:
            shown = {
                name: info[name] for name in ("versions", "commit", "requested", "effective") if name in info
            } or info
            text = json.dumps(shown, indent=1, sort_keys=True)
            return text if len(text) < 6000 else text[:6000] + "\n... (the rest is in sessions.jsonl)"
    return ""


def _command(words: Sequence[str]) -> str:
    return shlex.join(word for word in words if word != "--resume")
