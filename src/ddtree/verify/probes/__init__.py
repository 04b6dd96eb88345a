"""The probes, in the order in which they run: cheap ones that explain later failures first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddtree.verify.finding import Finding
from ddtree.verify.probes.answers import probe_answers
from ddtree.verify.probes.concurrency import probe_concurrency
from ddtree.verify.probes.fingerprint import probe_fingerprint
from ddtree.verify.probes.graphs import probe_graphs
from ddtree.verify.probes.long_context import probe_long_context
from ddtree.verify.probes.lossless import probe_lossless
from ddtree.verify.probes.settings import probe_settings
from ddtree.verify.probes.speculation import probe_speculation
from ddtree.verify.probes.speed import probe_speed
from ddtree.verify.session import Session

Probe = Callable[[Session], Iterator[Finding]]

PROBES: dict[str, tuple[str, Probe]] = {
    "settings": ("declared settings are in effect", probe_settings),
    "answers": ("answers are made for their questions", probe_answers),
    "speculation": ("speculation is as declared", probe_speculation),
    "graphs": ("CUDA graphs are as declared", probe_graphs),
    "model": ("the model is the one that was verified before", probe_fingerprint),
    "lossless": ("speculation does not change what the model says", probe_lossless),
    "concurrency": ("requests at the same time are answered alike", probe_concurrency),
    "long context": ("long prompts are answered", probe_long_context),
    "speed": ("decoding is as fast as it was", probe_speed),
}
"""By name: the claim that stands where a probe could not finish, and the probe."""

__all__ = ["PROBES", "Probe"]
