"""Loading what an engine is made of: options checked first, then configuration, tokenizer, target and drafter."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ddtree.draft_temperature import WANTED, is_draft_temperature
from ddtree.engine.device import choose_device, choose_dtype
from ddtree.errors import UserError
from ddtree.kernels.exact_set import exact_set
from ddtree.kernels.fast_set import FAST, why_not_fast
from ddtree.kernels.kernel_set import TWINS
from ddtree.models.drafter import Drafter, load_drafter
from ddtree.models.drafter_config import SlidingBlock
from ddtree.models.target import Target, load_target
from ddtree.models.target_config import read_target_config
from ddtree.models.tokenizer import Tokenizer

Graphs = Literal["probe", "on", "off"]


@dataclass(frozen=True)
class LoadOptions:
    """What `Engine.load` was asked for; see there."""

    model: Path
    draft: Path | None
    device: str
    dtype: str
    block_size: int | None
    draft_window: int | None
    sliding_block: SlidingBlock
    max_model_len: int | None
    memory_fraction: float
    max_batch: int
    prefill_tokens: int
    graphs: Graphs
    threads: int | None
    exact: bool = False
    draft_temperature: float | None = None

    def check(self) -> None:
        """Refuse what is out of range or contradicts itself.

        Raises:
            UserError: names the option.
        """
        for name, low in (
            ("block_size", 2),
            ("draft_window", 1),
            ("max_model_len", 2),
            ("max_batch", 1),
            ("prefill_tokens", 1),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise UserError(f"{name} is {value!r}", f"choose a whole number of at least {low}")
        if not 0 < self.memory_fraction <= 1:
            raise UserError(f"memory_fraction is {self.memory_fraction!r}", "choose a number above 0, at most 1")
        for name, allowed in (("graphs", get_args(Graphs)), ("sliding_block", get_args(SlidingBlock))):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} is {getattr(self, name)!r}", f"choose {' or '.join(allowed)}")
        temperature = self.draft_temperature
        if temperature is not None and not is_draft_temperature(temperature):
            raise UserError(f"draft_temperature is {temperature!r}", f"choose {WANTED}")
        if self.draft is None and (self.block_size, self.draft_window, temperature) != (None, None, None):
            raise UserError(
                "block_size, draft_window and draft_temperature mean nothing without a drafter", "give a draft folder"
            )


@dataclass(frozen=True)
class LoadedParts:
    """What an engine is made of.

    Attributes:
        identity: which model and drafter these are, for `Engine.facts`.
    """

    target: Target
    drafter: Drafter | None
    tokenizer: Tokenizer
    max_model_len: int
    identity: dict[str, Any]


def load_parts(options: LoadOptions, tell: Callable[[str, float], None]) -> LoadedParts:
    """Load target and drafter.

    Raises:
        UserError: something is out of range, missing, damaged or does not fit.
    """
    options.check()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tell("reading the configuration", 0.0)
    config = read_target_config(options.model)
    length = options.max_model_len or config.max_positions
    if length > config.max_positions:
        raise UserError(
            f"max_model_len {length} is beyond the model's context", f"choose at most {config.max_positions}"
        )
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, config.dtype)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    tell("loading the model", 0.1)
    reason = why_not_fast(device)
    if options.exact and reason and device.type != "cpu":
        raise UserError(f"exact mode has no kernels for this device: {reason}", "choose device cpu, or leave exact out")
    kernels = TWINS if reason else FAST
    target = load_target(options.model, dtype, device, exact_set(kernels) if options.exact else kernels)
    drafter = None
    if options.draft is not None:
        tell("loading the drafter", 0.7)
        drafter = load_drafter(
            options.draft, target,
            block_size=options.block_size, sliding_block=options.sliding_block,
            draft_temperature=options.draft_temperature, kernels=kernels,
        )  # fmt: skip
    tell("reserving the cache", 0.9)
    identity = {
        "model": str(options.model),
        "model_config_sha256": _sha256(options.model / "config.json"),
        "draft": str(options.draft) if options.draft is not None else None,
        "draft_config_sha256": _sha256(options.draft / "config.json") if options.draft is not None else None,
    }
    return LoadedParts(target, drafter, tokenizer, length, identity)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
