"""What the check of a kit found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddtree.kit.record import KitRecord
from ddtree.kit.signature import Signature


@dataclass
class CheckResult:
    """What was found.

    Attributes:
        faults: one line each; empty where the kit is whole.
        signatures: of the kit; those that are not good are faults too.
        unchecked: what could not be looked at, and why.
    """

    faults: list[str] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    files: int = 0
    total_bytes: int = 0
    kit: KitRecord | None = None

    @property
    def is_whole(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return {
            "whole": self.is_whole,
            "files": self.files,
            "total_bytes": self.total_bytes,
            "name": self.kit.name if self.kit else None,
            "verdict": self.kit.verdict if self.kit else None,
            "faults": self.faults,
            "unchecked": self.unchecked,
            "signatures": [vars(each) for each in self.signatures],
        }
