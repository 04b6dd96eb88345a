"""The bulk histogram against prometheus_client's own."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ddtree.server.tally import Tally


def samples(registry):
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counts_as_a_histogram_that_is_told_value_by_value():
    ours, theirs, buckets = CollectorRegistry(), CollectorRegistry(), (0.5, 1, 2.5)
    tally, histogram = Tally("a", "Words.", buckets, ours), Histogram("a", "Words.", buckets=buckets, registry=theirs)
    assert samples(ours) == samples(theirs)
    for value, times in ((0.25, 3), (0.5, 2), (0.75, 1), (2.5, 4), (9, 5)):
        tally.add(value, times)
        for _ in range(times):
            histogram.observe(value)
    assert samples(ours) == samples(theirs)
