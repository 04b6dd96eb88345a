"""What the status page shows, as JSON."""

from typing import Any

from ddtree.engine import Engine, TracedTree
from ddtree.server.service import Service

MOST_NODES = 64


def status(service: Service) -> dict[str, Any]:
    """How the server is doing; looking at it makes the engine record a tree now and then."""
    service.pulse.watch()
    engine, beat, readiness = service.thread.engine, service.pulse.look(), service.readiness
    has_tree = engine is not None and beat.tree is not None
    return {
        "model_name": service.settings.model_name,
        "ready": readiness.is_ready,
        "stage": readiness.stage,
        "progress": readiness.progress,
        "facts": _facts(engine) if engine else "",
        "tau": beat.tau,
        "tok_s": beat.tok_s,
        "running": beat.occupancy.running if beat.occupancy else 0,
        "waiting": beat.occupancy.waiting if beat.occupancy else 0,
        "cache_tokens": beat.occupancy.cache_tokens if beat.occupancy else 0,
        "cache_tokens_used": beat.occupancy.cache_tokens_used if beat.occupancy else 0,
        "prefix_tokens": beat.occupancy.prefix_tokens if beat.occupancy else 0,
        "slots": engine.max_batch if engine else 0,
        "queue_limit": service.settings.max_queue,
        "tree": _drawn(beat.tree, engine, service.settings.show_text) if has_tree and beat.tree and engine else None,
    }


def _facts(engine: Engine) -> str:
    """What runs, in one line."""
    told = engine.facts()
    draft = told["mode"] if told["mode"] == "ar" else f"{told['mode']}, budget {told['budget']}"
    return f"{told['device']}, {told['dtype']}, {draft}, context {told['max_model_len']}"


def _drawn(traced: TracedTree, engine: Engine, show_text: bool) -> dict[str, Any]:
    """The likeliest nodes, parents before children. Words are what clients wrote: only where the operator says so."""

    def text(token_id: int) -> str | None:
        return engine.tokenizer.token_text(token_id) if show_text else None

    tree, path = traced.tree, set(traced.path)
    shown: dict[int, int] = {-1: -1}  # node to its place in the list
    nodes: list[dict[str, Any]] = []
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        if parent in shown and (node in path or len(nodes) < MOST_NODES):
            shown[node] = len(nodes)
            nodes.append(
                {
                    "parent": shown[parent],
                    "depth": int(tree.depths[node]),
                    "log_score": round(float(tree.log_scores[node]), 3),
                    "accepted": node in path,
                    "text": text(int(tree.token_ids[node])),
                }
            )
    return {
        "root": text(traced.root_token),
        "bonus": text(traced.bonus_token),
        "accepted": len(path),
        "nodes": nodes,
        "hidden": len(tree) - len(nodes),
    }
