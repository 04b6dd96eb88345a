"""`ddtree serve` with one fault in it: python faulty_server.py FAULT serve ...

Faults: `window` leaves --draft-window out when the engine is made, `graphs` makes it run without CUDA graphs; once a
file named by FAULT_FILE is there, `slow` waits in every step, and `hang` stops for good; `positions` verifies nodes one
position too far.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import ddtree.openmp  # noqa: F401 - before torch
from ddtree import Engine
from ddtree.cli.main import run
from ddtree.engine import round as engine_round


def main(fault: str, arguments: list[str]) -> int:
    load = Engine.load

    def faulty(*given: Any, **options: Any) -> Engine:
        if fault == "window":
            assert options["draft_window"] is not None
            options["draft_window"] = None
        if fault == "graphs":
            options["graphs"] = "off"
        engine = load(*given, **options)
        step = engine.step

        def slow() -> Any:
            time.sleep(0.15 if os.path.exists(os.environ["FAULT_FILE"]) else 0)
            return step()

        def hanging() -> Any:
            while os.path.exists(os.environ["FAULT_FILE"]):
                time.sleep(0.05)
            return step()

        if fault in ("slow", "hang"):
            engine.step = slow if fault == "slow" else hanging  # type: ignore[method-assign]
        return engine

    verify = engine_round.verify

    def misplaced(state: Any, batch: Any, target: Any, tree: Any, taps: Any) -> Any:
        moved = replace(tree, depths=tree.depths + (tree.depths > 0)) if tree.tokens.shape[1] > 1 else tree
        return verify(state, batch, target, moved, taps)

    if fault == "positions":
        engine_round.verify = misplaced
    Engine.load = faulty  # type: ignore[method-assign,assignment]
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
