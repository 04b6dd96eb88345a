"""Are CUDA graphs really replayed? Counters of replays first, then the engine's log; a flag alone proves nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.session import Session, lines_since

_DECODE_LINE = re.compile(r"Decode batch.*cuda graph: (True|False)")


def probe_graphs(session: Session) -> Iterator[Finding]:
    """Judges what the speculation probe moved."""
    wanted = session.expectation.graphs
    if session.effective.device == "cpu":
        if wanted:
            yield violated(
                "graphs",
                "CUDA graphs are replayed",
                "the engine runs on the CPU",
                remedy="start it on a GPU, or do not declare graphs",
            )
        return
    claim = "decoding runs without CUDA graphs" if wanted is False else "CUDA graphs are replayed"
    replays, evidence = _replays(session)
    if replays is None:
        yield unknown(
            "graphs",
            claim,
            *evidence,
            remedy="give the engine's log with --log FILE; SGLang also tells it with --enable-metrics",
            is_required=wanted is not None,
        )
    elif wanted is None:
        # Nobody declared anything: what runs is told, and held against nothing.
        yield proven("graphs", "how decoding is launched is known", *evidence)
    elif replays == wanted:
        yield proven("graphs", claim, *evidence)
    else:
        remedy = (
            "remove --disable-cuda-graph or --enforce-eager, and look in the log for a capture that failed"
            if wanted
            else "start the server without graphs, or declare them"
        )
        yield violated("graphs", claim, *evidence, remedy=remedy)


def _replays(session: Session) -> tuple[bool | None, list[str]]:
    """Whether decode passes were replays, with the evidence; None where nothing tells."""
    moved = session.moved
    flag = session.effective.settings.get("cuda_graphs")
    evidence = [] if flag is None else [f"{session.effective.source}: graphs {'on' if flag else 'off'}"]
    if moved is not None and moved.graph_replays is not None:
        eager = moved.eager_passes or 0
        evidence.append(f"{moved.graph_replays:g} replays and {eager:g} eager passes during the speculation probe")
        if moved.graph_replays > 0 or eager > 0:
            return moved.graph_replays > eager, evidence
    log = session.options.log() if session.options.log else ""
    lines = _DECODE_LINE.findall(lines_since(session.log_before, log))  # older ones may be of another process
    if lines:
        with_graph = lines.count("True")
        evidence.append(f"{len(lines)} decode lines of the log since the speculation probe: {with_graph} with a graph")
        return with_graph > len(lines) / 2, evidence
    if flag is False:
        return False, evidence  # an engine that says that it is off can be believed
    return None, [*evidence, "no counter and no log line tells of replays"]
