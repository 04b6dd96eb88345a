"""The single-device engine: state on the device, the round, the scheduler, and the `Engine` that people call."""

import ddtree.openmp  # noqa: F401 - before torch
from ddtree.engine.completion import Completion, RoundStats, StreamEvent, TracedTree
from ddtree.engine.engine import Engine
from ddtree.engine.logprobs import TokenLogprob
from ddtree.engine.near_tie import LosslessReport, NearTie
from ddtree.engine.sampling_params import SamplingParams
from ddtree.engine.seating import Occupancy
from ddtree.engine.sequence import Sequence
from ddtree.engine.speculation import Speculation

__all__ = [
    "Completion",
    "Engine",
    "LosslessReport",
    "NearTie",
    "Occupancy",
    "RoundStats",
    "SamplingParams",
    "Sequence",
    "Speculation",
    "StreamEvent",
    "TokenLogprob",
    "TracedTree",
]
