"""What a DDTREE server runs with: read from flags and environment, resolved once, handed to the ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ddtree.draft_temperature import WANTED, is_draft_temperature

CONFIG_VARIABLE = "DDTREE_SGLANG_CONFIG"
"""JSON object with the fields of `Asked`: the flags of those who start an Engine without a command line."""

RESOLVED_VARIABLE = "DDTREE_SGLANG_RESOLVED"
"""The same, resolved: the main process leaves it for the ranks that SGLang spawns."""

AUTO = "auto"
DEFAULT_BUDGET = 32
DEFAULT_TOPK_CAP = 64
SWITCHES = ("fold_tail", "own_tables", "probe", "check_ranks", "count_experts")
MAX_BUDGET, MAX_TOPK_CAP = 1024, 128
MAX_CONCURRENCY = 4096
DEFAULT_BLOCK_SIZE = 16


class SettingsError(ValueError):
    """A setting that cannot be; one line with cause and remedy. SGLang prints it and stops."""


@dataclass(frozen=True)
class Asked:
    """What the user asked for; None where nothing was said.

    Attributes:
        budget: nodes of a tree without the root; 0 turns speculation off, ``"auto"`` takes the fastest.
        topk_cap: candidates of one position.
        draft_temperature: at which the drafter's distributions are taken to build a greedy request's tree; the
            drafter's own where nothing was said.
        concurrency: requests at once that ``auto`` picks for; 1 where nothing was said.
        fold_tail: False keeps what follows a verify pass out of SGLang's verify graph; slower, easier to debug.
        own_tables: False lets FlashAttention's backend work out what a tree's rows see from the mask; slower.
        probe: False starts a width that was never seen to work here without trying it in a child process first.
        check_ranks: compare the trees of all tensor-parallel ranks every round, and die where they differ; slow.
        count_experts: log how many distinct experts a layer the first rows of a tree pick; for mixtures of experts.
    """

    budget: int | str | None = None
    topk_cap: int | None = None
    draft_temperature: float | None = None
    concurrency: int | None = None
    fold_tail: bool = True
    own_tables: bool = True
    probe: bool = True
    check_ranks: bool = False
    count_experts: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Asked:
        text = environment.get(CONFIG_VARIABLE)
        if not text:
            return cls()
        try:
            found = json.loads(text)
            if not isinstance(found, dict):
                raise TypeError("it begins with no brace")
            unknown = sorted(set(found) - {field.name for field in fields(cls)})
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"{CONFIG_VARIABLE} is not a JSON object ({error}): set it like {{'budget': 32}}"
            ) from None
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise SettingsError(f"{CONFIG_VARIABLE} has unknown keys {unknown}: known are {known}")
        switches = {name: found[name] for name in SWITCHES if name in found}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise SettingsError(f"{CONFIG_VARIABLE}: {name} is true or false")
        budget = found.get("budget")
        return cls(
            budget=AUTO if budget == AUTO else _whole_number("budget", budget, 0, MAX_BUDGET),
            topk_cap=_whole_number("topk_cap", found.get("topk_cap"), 1, MAX_TOPK_CAP),
            draft_temperature=checked_temperature(found.get("draft_temperature")),
            concurrency=_whole_number("concurrency", found.get("concurrency"), 1, MAX_CONCURRENCY),
            **switches,
        )


@dataclass(frozen=True)
class TreeSettings:
    """The resolved shape of a round.

    Attributes:
        budget: nodes of a tree without the root, at least 1.
        topk_cap: candidates of one position, at most the budget.
        block_size: tokens that the drafter sees at once, the root included.
        draft_temperature: as in `Asked`.
        fold_tail: whether what follows a verify pass is recorded in its graph.
        own_tables, check_ranks, count_experts: as in `Asked`.
    """

    budget: int
    topk_cap: int
    block_size: int
    draft_temperature: float = 1.0
    fold_tail: bool = True
    own_tables: bool = True
    check_ranks: bool = False
    count_experts: bool = False

    @property
    def width(self) -> int:
        """Rows that the target verifies for each sequence: the root and the nodes."""
        return self.budget + 1

    @property
    def is_chain(self) -> bool:
        """With one candidate a position the tree is a chain: no mask, SGLang's own causal verify pass."""
        return self.topk_cap == 1

    @property
    def depths(self) -> int:
        """Depth that a tree can reach."""
        return min(self.block_size - 1, self.budget)

    @property
    def slots(self) -> int:
        """K/V slots that a round writes behind the committed ones."""
        return max(self.width, self.block_size)

    @property
    def reserve_tokens(self) -> int:
        """K/V slots to hold beyond what the host knows as committed, which lags one round behind."""
        return self.depths + 1 + self.slots

    def one_line(self) -> str:
        return (
            f"budget={self.budget} topk_cap={self.topk_cap} block_size={self.block_size} width={self.width} "
            f"draft_temperature={self.draft_temperature:g}"
        )

    def told(self) -> dict[str, int | float]:
        """What ``/server_info`` says of the trees."""
        return {
            "speculative_ddtree_budget": self.budget,
            "speculative_ddtree_topk_cap": self.topk_cap,
            "speculative_ddtree_draft_temperature": self.draft_temperature,
        }

    def to_environment(self) -> None:
        """Leave it where spawned processes find it."""
        os.environ[RESOLVED_VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> TreeSettings:
        """What the main process left.

        Raises:
            SettingsError: it left nothing.
        """
        text = os.environ.get(RESOLVED_VARIABLE)
        if text is None:
            raise SettingsError(
                f"{RESOLVED_VARIABLE} is not set in this rank: start by sglang.launch_server or sglang.Engine"
            )
        return cls(**json.loads(text))


def resolve(
    asked: Asked, native_draft_tokens: int | None, block_size: int | None, own_temperature: Any = None
) -> TreeSettings | None:
    """Join what our flags and SGLang's own say; None where the budget is 0.

    Args:
        asked: from our flags; a budget of ``auto`` has been decided.
        native_draft_tokens: ``--speculative-num-draft-tokens``, which is the budget plus one.
        block_size: ``--speculative-dflash-block-size``, else the drafter's own.
        own_temperature: the drafter's own draft temperature as its config has it; None is 1.

    Raises:
        SettingsError: two flags say different things, or a value is out of range.
    """
    native_budget = None if native_draft_tokens is None else native_draft_tokens - 1
    budget = _agreed(
        "--speculative-ddtree-budget", asked.budget, "--speculative-num-draft-tokens minus 1", native_budget
    )
    cap = _whole_number("topk_cap", DEFAULT_TOPK_CAP if asked.topk_cap is None else asked.topk_cap, 1, MAX_TOPK_CAP)
    block = _whole_number("block size", DEFAULT_BLOCK_SIZE if block_size is None else block_size, 2, 32)
    assert cap is not None and block is not None
    default = block - 1 if cap == 1 else DEFAULT_BUDGET
    budget = _whole_number("budget", default if budget is None else budget, 0, MAX_BUDGET)
    assert budget is not None
    if cap == 1 and budget > block - 1:
        raise SettingsError(
            f"DDTREE budget is {budget}, but with topk_cap 1 a tree is a chain of at most {block - 1} nodes "
            f"(block size {block} minus 1): lower the budget or raise the cap"
        )
    if budget == 0:
        return None
    cap, temperature = min(cap, budget), asked.draft_temperature
    if cap == 1 and temperature is not None:
        raise SettingsError("DDTREE draft_temperature means nothing to a chain: leave it out or raise the topk_cap")
    if cap > 1 and temperature is None:
        temperature = checked_temperature(own_temperature, "dflash_config.draft_temperature of the drafter")
    return TreeSettings(
        budget, cap, block, 1.0 if temperature is None else temperature,
        asked.fold_tail, asked.own_tables, asked.check_ranks, asked.count_experts,
    )  # fmt: skip


def _agreed(our_flag: str, ours: int | str | None, their_flag: str, theirs: int | None) -> Any:
    if ours is not None and theirs is not None and ours != theirs:
        raise SettingsError(f"{our_flag} says {ours} but {their_flag} says {theirs}: give only one of them")
    return theirs if ours is None else ours


def checked_temperature(value: Any, name: str = "DDTREE draft_temperature") -> float | None:
    """A draft temperature as somebody wrote it; None where nobody did.

    Raises:
        SettingsError: it is no number, or out of range.
    """
    if value is None:
        return None
    if not is_draft_temperature(value):
        raise SettingsError(f"{name} is {value!r}: give {WANTED}")
    return float(value)


def _whole_number(name: str, value: Any, least: int, most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingsError(f"DDTREE {name} is {value!r}: give a whole number from {least} to {most}")
    return value
