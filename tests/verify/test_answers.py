"""Answers that are alike by chance: another round of questions tells them from a store's."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from ddtree.verify.answer import Answer, Order
from ddtree.verify.effective import Counters
from ddtree.verify.finding import Status
from ddtree.verify.probes.answers import probe_answers

ROUND = 3  # questions


class Server:
    """A model of letters: in its first rounds one answer ends where both others go on; later ones differ."""

    def __init__(self, rounds_alike: int) -> None:
        self._alike, self.asked = ROUND * rounds_alike, 0

    def answer(self, order: Order) -> Answer:
        self.asked += 1
        number = re.search(r"code (\d+) is written$", str(order.prompt))
        ends_early = self.asked <= self._alike and self.asked % ROUND == 1
        letters = "" if ends_early or not number else number[1].translate(str.maketrans("0123456789", "abcdefghij"))
        text = "SSSS" + letters if number else "prose"
        return Answer(text, len(order.prompt), completion_tokens=order.max_tokens, seconds=0.1)

    def counters(self) -> Counters:
        return Counters()


def finding(server: Server):
    session = SimpleNamespace(
        adapter=server,
        effective=SimpleNamespace(settings={}, engine="one of few words"),
        moved_since=lambda before, tokens: Counters(),
    )
    return next(iter(probe_answers(session)))


@pytest.mark.parametrize(("rounds_alike", "asked"), [(0, 1), (1, 2), (3, 4)])
def test_questions_are_asked_again_until_answers_differ(rounds_alike: int, asked: int) -> None:
    server = Server(rounds_alike)
    told = finding(server)
    assert told.status is Status.proven, told
    assert server.asked == ROUND * asked + 3  # a chat and two long texts besides


def test_they_are_not_asked_for_ever() -> None:
    server = Server(100)
    told = finding(server)
    assert told.status is Status.unknown and not told.is_required, told
    assert server.asked - (ROUND * 4 + 3) in (0, 1)  # and a text of another kind, where all answers were alike
