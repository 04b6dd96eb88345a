"""A `ddtree` for deployments of tests: takes the flags of `ddtree serve` and serves a :class:`Behaviour` in its place.

A window of 13 stands for a setting that crashes the engine at its start, 14 for one that crashes it under load, 15 for
one with which it silently decodes plainly, and 16 for one with which no draft is accepted.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

import uvicorn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bench.fault_server import Behaviour, FaultServer


def value_of(flag: str) -> str | None:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else None


window = value_of("--draft-window")
if window == "13":
    print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
    sys.exit(1)
listener = socket.create_server(("127.0.0.1", int(value_of("--port") or 0)))


def crash_under_load(number: int) -> str | None:
    if window == "14" and number >= 6:
        print("segmentation fault in round 6", file=sys.stderr, flush=True)
        threading.Timer(0.05, lambda: os._exit(139)).start()
    return "fell_back" if window == "15" else None


behaviour = Behaviour(
    first_s=0.01,
    gap_s=0.005,
    chunks=4,
    tokens_per_chunk=1 if window == "16" else 3,
    is_native=True,
    fault_of=crash_under_load,
)
behaviour.model = "smollm2-135m-instruct"
config = uvicorn.Config(FaultServer(behaviour).app, log_level="warning", lifespan="off")
uvicorn.Server(config).run(sockets=[listener])
