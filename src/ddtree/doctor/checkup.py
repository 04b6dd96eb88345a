"""A recording and what is needed, judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree.doctor.condition import Condition, Grade
from ddtree.doctor.gpu_facts import read_gpus
from ddtree.doctor.judge_build import judge_build
from ddtree.doctor.judge_gpu import judge_gpus
from ddtree.doctor.judge_host import judge_host
from ddtree.doctor.judge_topology import judge_topology
from ddtree.doctor.needs import Needs
from ddtree.doctor.recording import Recording


@dataclass(frozen=True)
class Checkup:
    """All conditions, in the order of reading."""

    conditions: tuple[Condition, ...]

    @property
    def has_faults(self) -> bool:
        return any(each.grade is Grade.fault for each in self.conditions)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return {"healthy": not self.has_faults, "conditions": [vars(each) for each in self.conditions]}


def examine(recording: Recording, needs: Needs) -> Checkup:
    """Judges words that were recorded; asks no machine anything."""
    gpus = read_gpus(recording)
    return Checkup(
        (
            *judge_gpus(recording, gpus, needs),
            *judge_build(recording, gpus),
            *judge_topology(recording, gpus, needs),
            *judge_host(recording, needs),
        )
    )
