"""Prometheus' text format, read for the few sums that the probes need."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Exposition:
    """The samples of one scrape; lines that are no samples are skipped, as scrapers do with comments."""

    def __init__(self, text: str) -> None:
        self._samples = list(_read(text))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def has(self, prefix: str) -> bool:
        """Whether any sample's name begins so."""
        return any(name.startswith(prefix) for name, _, _ in self._samples)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all label sets that fit; None where there is no such sample."""
        found = [
            value
            for sample, own, value in self._samples
            if sample == name and math.isfinite(value) and labels.items() <= own.items()
        ]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label's values."""
        sums: dict[str, float] = {}
        for sample, own, value in self._samples:
            if sample == name and label in own and math.isfinite(value):
                sums[own[label]] = sums.get(own[label], 0.0) + value
        return sums


def _read(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if found := _SAMPLE.match(line.strip()):
            name, labels, value = found.groups()
            try:
                yield name, dict(_LABEL.findall(labels or "")), float(value)
            except ValueError:
                continue
