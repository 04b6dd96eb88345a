"""How a request's rounds draft."""

from dataclasses import dataclass
from typing import Literal, get_args

from ddtree.errors import UserError

Mode = Literal["ar", "chain", "tree"]
MAX_BUDGET = 1024
LARGEST_AUTO_BUDGET = 127
DEFAULT_TOP_K_CAP = 64


@dataclass(frozen=True)
class Speculation:
    """Mode and size of the draft.

    Attributes:
        mode: `ar` drafts nothing; `chain` drafts one path; `tree` drafts a DDTree.
        budget: nodes of the tree without the root, 1 to 1024, or length of the chain. `auto` lets every round take the
            budget that promises most, plain decoding included. None means `auto` for a tree and the whole block for a
            chain.
        top_k_cap: candidates per position of a tree; None means min(budget, 64).

    Raises:
        UserError: a value is out of range, or means nothing in this mode.
    """

    mode: Mode = "tree"
    budget: int | Literal["auto"] | None = None
    top_k_cap: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UserError(f"mode is {self.mode!r}", "choose ar, chain or tree")
        for name, value in (("budget", self.budget), ("top_k_cap", self.top_k_cap)):
            if value is None or (name == "budget" and value == "auto" and self.mode == "tree"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BUDGET:
                auto = "auto or " if name == "budget" and self.mode == "tree" else ""
                raise UserError(f"{name} is {value!r}", f"choose {auto}a whole number from 1 to {MAX_BUDGET}")
        if self.mode == "ar" and self.budget is not None:
            raise UserError(f"budget {self.budget} means nothing in mode ar", "leave it out, or choose mode tree")
        if self.mode != "tree" and self.top_k_cap is not None:
            raise UserError(
                f"top_k_cap {self.top_k_cap} means nothing in mode {self.mode}", "leave it out, or choose mode tree"
            )

    def resolve(self, block_size: int | None) -> "DraftShape":
        """Settle defaults for a drafter's block size (None where there is no drafter)."""
        if self.mode == "ar":
            return DraftShape("ar", 0, 0)
        if block_size is None:
            raise UserError(f"mode {self.mode} needs a drafter", "give a draft folder, or choose mode ar")
        if self.mode == "chain":
            budget = block_size - 1 if self.budget is None else int(self.budget)
            if budget > block_size - 1:
                raise UserError(
                    f"a chain of {budget} is longer than the block allows",
                    f"choose a budget of at most {block_size - 1}",
                )
            return DraftShape("chain", budget, 1)
        if self.budget is None or self.budget == "auto":
            return DraftShape("tree", LARGEST_AUTO_BUDGET, self.top_k_cap or DEFAULT_TOP_K_CAP, is_auto=True)
        budget = int(self.budget)
        return DraftShape("tree", budget, self.top_k_cap or min(budget, DEFAULT_TOP_K_CAP))


@dataclass(frozen=True)
class DraftShape:
    """Settled sizes of a round.

    Attributes:
        budget: nodes without the root.
        top_k: candidates per depth.
        follows: a round without a draft still keeps the drafter's context up to date.
        forecasts: the round tells what smaller budgets would have brought.
        is_auto: no shape of a round, but the wish that the budget policy chooses one; ``budget`` is its largest.
    """

    mode: Mode
    budget: int
    top_k: int
    follows: bool = False
    forecasts: bool = False
    is_auto: bool = False

    @property
    def rows(self) -> int:
        """Rows that the target verifies: the root and the nodes."""
        return self.budget + 1
