"""A histogram for Prometheus that takes many equal values at once."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Tally:
    """`prometheus_client.Histogram` for what comes by the thousand a round; one thread may add.

    Args:
        buckets: upper ends, rising; the last, infinite one is added.
    """

    def __init__(self, name: str, words: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._words, self._ends = name, words, [*buckets, float("inf")]
        self._counts, self._sum = [0] * len(self._ends), 0.0
        registry.register(self)

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` so many times."""
        self._counts[bisect_left(self._ends, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What a registry asks of its collectors."""
        ends = map(floatToGoString, self._ends)
        buckets = list(zip(ends, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._words, buckets=buckets, sum_value=self._sum)
