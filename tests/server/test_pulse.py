"""What the last seconds and rounds were like."""

import pytest

from ddtree.engine import Occupancy
from ddtree.server import pulse as module
from ddtree.server.pulse import ROLLING_S, Pulse

FREE = Occupancy(running=0, waiting=0, cache_tokens_used=0, cache_tokens=0, prefix_tokens=0)


def test_the_rate_counts_the_last_seconds_only(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    pulse = Pulse()
    for tokens in (3, 5, 0, 7):
        pulse.step_begins()
        pulse.step_ends([tokens] if tokens else [], tokens, FREE)
        now += 4.0  # at 1000, 1004, 1008 and 1012; the look is at 1016
    assert pulse.look().tok_s == pytest.approx(7 / ROLLING_S)
    assert pulse.look().tau == pytest.approx(5.0)
    now += 100.0
    assert pulse.look().tok_s == 0


def test_a_step_under_way_is_timed(monkeypatch):
    now = 5.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    pulse = Pulse()
    assert pulse.in_step_s == 0
    pulse.step_begins()
    now = 7.5
    assert pulse.in_step_s == pulse.look().in_step_s == 2.5
