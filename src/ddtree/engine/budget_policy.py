"""`budget="auto"`: which draft the next round takes.

Each round tells, from the drafter's own scores, how many tokens it was expected to commit at every smaller budget, and
how many of them the target took; that corrects the scores, by depth and by rank in the tree. The next round takes the
budget with the most expected tokens per millisecond, over all sequences of the batch; plain decoding is one of the
choices. The choice lags a round behind, so that nothing waits for it, and holds for some rounds, since choosing and
learning take the host some 50 microseconds.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ddtree.engine.speculation import DEFAULT_TOP_K_CAP, LARGEST_AUTO_BUDGET, DraftShape
from ddtree.kernels.forecast import Forecast

CANDIDATES = (0, 3, 7, 15, 31, 63, LARGEST_AUTO_BUDGET)
"""Budgets that `auto` chooses from; 0 is plain decoding that keeps the drafter's context up to date. With the root each
makes a power of two of rows, which fills the tiles that matrix products are cut into: one row more costs a tile."""

CUTS = CANDIDATES[1:]
"""Budgets that a round's forecast covers."""

HOLD = 4
"""Rounds for which a choice holds, but for one that only takes a look; only the first of them is learned from."""

SWITCH_GAIN = 1.01
"""Another budget must promise this much more before it is taken."""

FIRST_PROBE, LAST_PROBE = 4, 64
"""In spells of plain decoding a draft looks now and then whether drafting would pay again: after 4 choices, then after
twice as many each time, at most after 64, which costs about half a percent."""

LOOK_UP, LOOK_UP_COST = 12, 0.005
"""What a larger tree would promise nobody sees from a smaller one, so now and then a round takes the next larger
budget: every 12th choice at most, and so seldom that of 200 tokens one is expected to be lost."""

FORGET_COST = 0.9
"""Weight of what is known of a cost, against the newest round that was timed."""

SPIKE = 1.25
"""A round counts as at most so many times as long as rounds of its budget were: one that took far longer waited for a
busy host, and believed in full it would keep a good budget unused for a hundred rounds."""

FORGET_DEPTHS, FORGET_BANDS = 0.99, 0.998
"""Weight of what is known of the drafter's reliability, against the newest round: two budgets often differ by one token
in twenty rounds, so telling which is better takes many."""

FORGET_OUTLOOK = 0.6
"""Weight of what a sequence's earlier trees promised, against the newest tree: text changes faster than machines."""

OWN_SHARE = 0.5
"""How far a sequence's outlook counts where it differs from what is usual: half of that is chance and does not last."""

FIRST_LOOKS, FIRST_BUDGET, FIRST_COST = 3, 63, 2.0
"""The first rounds that are learned from take a large budget, of those that cost at most twice the cheapest draft: a
small tree tells nothing of larger ones, and a start with small ones, which 64 requests at once would make, would hardly
ever look beyond them. So does the first round after a budget was timed."""

FORGET_USUAL = 0.98
"""Weight of what sequences usually promise, against the newest round, all its sequences together."""


def auto_shape(budget: int, top_k_cap: int = DEFAULT_TOP_K_CAP) -> DraftShape:
    """The shape of a candidate budget."""
    if budget == 0:
        return DraftShape("ar", 0, 0, follows=True)
    return DraftShape("tree", budget, min(budget, top_k_cap), forecasts=True)


@dataclass
class Outlook:
    """What is expected of one sequence.

    Attributes:
        masses: float64 ``[cuts, depths]``, as in `Forecast`; None before anything was seen.
    """

    masses: np.ndarray | None = None


class Trust:
    """How much of what the drafter promises the target holds, told apart by classes of nodes that follow one another.

    Args:
        classes: how many classes there are.
        prior: a class is trusted like the one before it, the first one fully, as if so many promised nodes had shown
            it.
        forget: weight of what is known against the newest round.
    """

    def __init__(self, classes: int, prior: float, forget: float) -> None:
        self._promised, self._held = np.zeros(classes), np.zeros(classes)
        self._prior, self._forget = prior, forget

    def factors(self) -> np.ndarray:
        """Accepted nodes of each class for each one promised, from 0.1 to 4."""
        factors, factor = [], 1.0
        for promised, held in zip(self._promised.tolist(), self._held.tolist(), strict=True):
            factor = (held + self._prior * factor) / (promised + self._prior)
            factors.append(factor)
        return np.clip(factors, 0.1, 4.0)

    def learn(self, promised: np.ndarray, held: np.ndarray) -> None:
        """Take in a round's nodes of the first classes."""
        n = len(promised)
        self._promised[:n] = self._forget * self._promised[:n] + promised
        self._held[:n] = self._forget * self._held[:n] + held


class BudgetPolicy:
    """Chooses budgets for one engine.

    Args:
        depths: depths that a block drafts.

    Attributes:
        cost_ms: per batch bucket and budget, the time of a round; filled at start and corrected by rounds:
            by each on a CPU, where rounds overlap by those that are learned from, as timing takes time there.
    """

    def __init__(self, depths: int) -> None:
        self._depths = np.arange(depths)
        self._depth_trust = Trust(depths, 5.0, FORGET_DEPTHS)
        self._band_trust = Trust(len(CUTS), 20.0, FORGET_BANDS)  # a band: the nodes that a cut adds to the one before
        self._usual: np.ndarray | None = None  # masses of a sequence that nothing is known of yet
        self._learned = 0  # rounds that they come from
        self._unseen = np.zeros(len(CUTS))  # of these, since one told of each cut
        self.cost_ms: dict[tuple[int, int], float] = {}
        self._known: dict[int, int] = {}  # timed budgets of each bucket, when it was last chosen for
        self._current: dict[int, int] = {}
        self._held: dict[int, int] = {}  # rounds for which the current one still holds
        self._since_draft, self._probe_after = 0, FIRST_PROBE
        self._since_look = 0

    def next_round(self, bucket: int, outlooks: Seq[Outlook]) -> tuple[int, bool]:
        """The budget of the next round of a batch in ``bucket``, and whether `learn` wants to hear of the round."""
        if self._held.get(bucket, 0):
            self._held[bucket] -= 1
            return self._current[bucket], False
        budget = self.choose(bucket, outlooks)
        self._held[bucket] = HOLD - 1 if budget == self._current.get(bucket) else 0
        return budget, True

    def choose(self, bucket: int, outlooks: Seq[Outlook]) -> int:
        """Which budget promises most now; or a look at another one."""
        known = [b for b in CANDIDATES if (bucket, b) in self.cost_ms]
        if not known:
            return CANDIDATES[3]
        if self._learned < FIRST_LOOKS or len(known) > self._known.get(bucket, 0):
            self._known[bucket] = len(known)
            cost = {b: self.cost_ms[bucket, b] for b in known if b}
            return max((b for b in cost if b <= FIRST_BUDGET and cost[b] <= FIRST_COST * min(cost.values())), default=0)
        expected = self.expected_tokens(outlooks).tolist()
        rates = {b: expected[CANDIDATES.index(b)] / self.cost_ms[bucket, b] for b in known}
        best = max(known, key=lambda b: rates[b])
        current = self._current.get(bucket)
        if current in rates and rates[best] < SWITCH_GAIN * rates[current]:
            best = current
        self._current[bucket] = best
        if best == 0:
            self._since_draft += 1
            if self._since_draft >= self._probe_after:
                self._since_draft, self._probe_after = 0, min(2 * self._probe_after, LAST_PROBE)
                return min((b for b in known if b), default=0)
            return 0
        self._since_draft, self._probe_after = 0, FIRST_PROBE
        self._since_look += 1
        above = min((b for b in known if b > best), default=best)
        if self._since_look >= max(LOOK_UP, (1 - rates[above] / rates[best]) / LOOK_UP_COST):
            self._since_look = 0
            return above
        return best

    def expected_tokens(self, outlooks: Seq[Outlook]) -> np.ndarray:
        """Tokens that a round of each candidate budget is expected to commit to all of some sequences together."""
        usual = self._usual
        if usual is None:  # nothing seen yet: drafting is worth a try
            return len(outlooks) * np.array([1.0, *(1.0 + budget**0.5 / 2 for budget in CUTS)])
        own = [outlook.masses for outlook in outlooks if outlook.masses is not None]
        masses = len(outlooks) * usual + OWN_SHARE * (np.sum(own, axis=0) - len(own) * usual)
        bands = self._band_trust.factors() * _differences(masses @ self._depth_trust.factors())
        return len(outlooks) + np.append(0.0, np.cumsum(bands))

    def learn(self, outlooks: Seq[Outlook], budget: int, forecast: Forecast) -> None:
        """Take in a round: what each sequence's tree promised and held at each cut."""
        last = max(i for i, cut in enumerate(CUTS) if cut <= budget)
        promised, held = forecast.masses, forecast.held
        if not ((promised >= 0) & (promised <= np.array(CUTS)[:, None])).all():
            self._learned += 1  # a look all the same
            return  # no probabilities: of a drafter that is out of its mind, and would be believed for ever
        usual = self._usual if self._usual is not None else promised.mean(0)
        old = np.array([usual if outlook.masses is None else outlook.masses for outlook in outlooks])
        news = np.array([1.0 if outlook.masses is None else 1 - FORGET_OUTLOOK for outlook in outlooks])
        moves = news[:, None, None] * (promised - old)
        moves[:, last + 1 :] = moves[:, last, None]  # larger trees than this one move along with it
        new = np.maximum(old + moves, 0.0)
        for outlook, masses in zip(outlooks, new, strict=True):
            outlook.masses = masses
        self._learned += 1
        self._unseen += 1
        # What was not seen for long is mostly forgotten, where so many sequences tell of it that it is no chance.
        shares = np.maximum(1 / self._learned, 1 - FORGET_USUAL ** np.minimum(self._unseen, len(outlooks)))
        step = shares[:, None] * (new.mean(0) - usual)
        step[last + 1 :] = step[last]
        self._usual, self._unseen[: last + 1] = usual + step, 0
        self._depth_trust.learn(promised[:, last].sum(0), (held[:, last, None] > self._depths).sum(0))
        corrected = promised[:, : last + 1].sum(0) @ self._depth_trust.factors()
        self._band_trust.learn(_differences(corrected), _differences(held[:, : last + 1].sum(0)))

    def time(self, bucket: int, budget: int, round_ms: float) -> None:
        """Take in how long a round took."""
        known = self.cost_ms.get((bucket, budget))
        if known is not None:
            round_ms = FORGET_COST * known + (1 - FORGET_COST) * min(round_ms, SPIKE * known)
        self.cost_ms[bucket, budget] = round_ms


def _differences(totals: np.ndarray) -> np.ndarray:
    """What each total adds to the one before."""
    return totals - np.append(0, totals[:-1])
