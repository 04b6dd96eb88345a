"""`budget="auto"`: which draft the next round takes.

Each round tells, from the drafter's own scores, how many tokens it was expected to commit at every smaller budget; what
the target then accepts corrects those scores depth by depth. The next round takes the budget with the most expected
tokens per millisecond, over all sequences of the batch; plain decoding is one of the choices. The choice lags a round
behind, so that nothing waits for it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ddtree.engine.speculation import DEFAULT_TOP_K_CAP, LARGEST_AUTO_BUDGET, DraftShape

CANDIDATES = (0, 4, 8, 16, 32, 64, LARGEST_AUTO_BUDGET)
"""Budgets that `auto` chooses from; 0 is plain decoding that keeps the drafter's context up to date."""

CUTS = CANDIDATES[1:]
"""Budgets that a round's forecast covers."""

SWITCH_GAIN = 1.01
"""Another budget must promise this much more before it is taken."""

FIRST_PROBE, LAST_PROBE = 4, 64
"""In spells of plain decoding a draft looks now and then whether drafting would pay again: after 4 rounds, then after
twice as many each time, at most after 64, which costs about a percent."""

FORGET = 0.9
"""Weight of what is known of costs and of the drafter's reliability, against the newest round."""

FORGET_OUTLOOK = 0.7
"""Weight of what a sequence's earlier trees promised, against the newest tree: text changes faster than machines."""

GROWTH_BEYOND = 0.8
"""Beyond the largest tree seen, a doubling of the budget is taken to bring this share of what the last doubling did."""


def auto_shape(budget: int, top_k_cap: int = DEFAULT_TOP_K_CAP) -> DraftShape:
    """The shape of a candidate budget."""
    if budget == 0:
        return DraftShape("ar", 0, 0, follows=True)
    return DraftShape("tree", budget, min(budget, top_k_cap), forecasts=True)


@dataclass
class Outlook:
    """What is expected of one sequence.

    Attributes:
        masses: per cut, per depth, the drafter's probability that a node of that depth is accepted.
        budget: size of the largest tree that was seen.
    """

    masses: list[list[float]] = field(default_factory=list)
    budget: int = 0


class BudgetPolicy:
    """Chooses budgets for one engine.

    Args:
        depths: depths that a block drafts.

    Attributes:
        cost_ms: per batch bucket and budget, the time of a round; filled at start and corrected by the rounds.
    """

    def __init__(self, depths: int) -> None:
        self._accepted = [1.0] * depths
        self._predicted = [1.0] * depths
        self.cost_ms: dict[tuple[int, int], float] = {}
        self._current: dict[int, int] = {}
        self._since_draft, self._probe_after = 0, FIRST_PROBE

    def choose(self, bucket: int, outlooks: Seq[Outlook]) -> int:
        """The budget of the next round of a batch in ``bucket``."""
        known = [b for b in CANDIDATES if (bucket, b) in self.cost_ms]
        if not known:
            return CANDIDATES[3]
        rates = {
            b: sum(self.expected_tokens(outlook, b) for outlook in outlooks) / self.cost_ms[bucket, b] for b in known
        }
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
        else:
            self._since_draft, self._probe_after = 0, FIRST_PROBE
        return best

    def expected_tokens(self, outlook: Outlook, budget: int) -> float:
        """Tokens that a round of this budget is expected to commit, the bonus token included."""
        if budget == 0:
            return 1.0
        if not outlook.masses:
            return 1.0 + budget**0.5 / 2  # nothing seen yet: drafting is worth a try
        seen = [cut for cut in CUTS if cut <= outlook.budget]
        totals = [1.0 + self._corrected(outlook.masses[i]) for i in range(len(seen))]
        if budget <= outlook.budget:
            return totals[seen.index(budget)]
        total, gain = totals[-1], totals[-1] - (totals[-2] if len(totals) > 1 else 1.0)
        for cut in CUTS[len(seen) :]:
            gain *= GROWTH_BEYOND
            total += gain
            if cut == budget:
                break
        return total

    def _corrected(self, masses: Seq[float]) -> float:
        """Expected accepted nodes, each depth corrected by how often the target agreed there so far."""
        trust = (min(max(a / p, 0.5), 2.0) for a, p in zip(self._accepted, self._predicted, strict=True))
        return sum(mass * factor for mass, factor in zip(masses, trust, strict=True))

    def learn(self, outlook: Outlook, budget: int, forecast: Seq[Seq[float]], accepted: int) -> None:
        """Take in a round: what its tree promised at each cut and depth, and how deep the target went."""
        last = max(i for i, cut in enumerate(CUTS) if cut <= budget)
        known = outlook.masses or [list(masses) for masses in forecast]
        moved = [(1 - FORGET_OUTLOOK) * (new - old) for new, old in zip(forecast[last], known[last], strict=True)]
        for i, old in enumerate(known):
            if i < last:
                moves = [(1 - FORGET_OUTLOOK) * (f - k) for f, k in zip(forecast[i], old, strict=True)]
            else:  # larger trees than this one move along with it
                moves = moved
            known[i] = [max(k + m, 0.0) for k, m in zip(old, moves, strict=True)]
        outlook.masses, outlook.budget = known, max(outlook.budget, budget)
        for depth, mass in enumerate(forecast[last]):
            self._accepted[depth] = FORGET * self._accepted[depth] + (1 - FORGET) * (accepted > depth)
            self._predicted[depth] = max(FORGET * self._predicted[depth] + (1 - FORGET) * mass, 1e-3)

    def time(self, bucket: int, budget: int, round_ms: float) -> None:
        """Take in how long a round took."""
        known = self.cost_ms.get((bucket, budget))
        self.cost_ms[bucket, budget] = round_ms if known is None else FORGET * known + (1 - FORGET) * round_ms
