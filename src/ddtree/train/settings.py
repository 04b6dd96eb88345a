"""Everything that a training run can be told, checked once and kept in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ddtree.errors import UserError

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class _Group(BaseModel):
    """Unknown keys are refused; nothing changes after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NewDrafter(_Group):
    """The shape of a drafter that starts from nothing; None takes the target's, or what z-lab's drafters have.

    Attributes:
        tap_layers: target layers that the drafter reads, 0 the first.
        mask_token_id: stands in the block's open slots; text must not contain it.
        sliding_window: positions that a query of every layer sees, itself included; None for all.
        is_causal: rows of the block see only rows before them.
    """

    layers: Positive = 5
    block_size: Annotated[int, Field(ge=2, le=64)] = 16
    heads: Positive | None = None
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate_size: Positive | None = None
    tap_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    sliding_window: Positive | None = None
    is_causal: bool = False


class Objective(_Group):
    """What the drafter is taught (arXiv 2602.06036, section 4, where it is cross-entropy alone).

    Attributes:
        token_share: share of the loss that is cross-entropy with the token that the target wrote; the rest is the
            divergence from the target's distribution at that place.
        distribution: which part of the target's distribution: all of it, its ``top_k`` likeliest tokens, or the
            likeliest alone.
        decay_tokens: depth k weighs ``exp(-(k - 1) / decay_tokens)``.
        reach_share: how far a depth's weight is multiplied by the probability, as the drafter sees it, that a round
            gets so far; 0 leaves the decay alone.
        head_share: share of the block's depths at which the loss is computed, deeper ones more seldom and weighing
            more, so that the expected loss stays the same.
    """

    token_share: Share = 0.5
    distribution: Literal["full", "top_k", "argmax"] = "full"
    top_k: Positive | None = None
    decay_tokens: Annotated[float, Field(gt=0)] = 4.0
    reach_share: Share = 0.0
    head_share: Annotated[float, Field(gt=0, le=1)] = 0.5

    @model_validator(mode="after")
    def _fits(self) -> Objective:
        if (self.distribution == "top_k") != (self.top_k is not None):
            raise ValueError("top_k goes with distribution top_k, and only with it")
        if self.token_share == 1 and self.distribution != "full":
            raise ValueError("distribution has no effect where token_share is 1")
        return self

    @property
    def needs_distribution(self) -> bool:
        return self.token_share < 1

    @property
    def kept_tokens(self) -> int | None:
        """How many of the target's likeliest tokens count; None for all."""
        return {"full": None, "top_k": self.top_k, "argmax": 1}[self.distribution]


class Batch(_Group):
    """One micro-batch of one process, and how many of them make a step.

    Attributes:
        rows: packed rows of conversations.
        row_tokens: of one row.
        anchors_per_row: blocks drafted in one row.
        accumulation: micro-batches of a process before a step.
    """

    rows: Positive = 16
    row_tokens: Annotated[int, Field(ge=8)] = 2048
    anchors_per_row: Positive = 512
    accumulation: Positive = 1


class Optimization(_Group):
    """How weights change: Muon for matrices and AdamW for norms and biases, or AdamW for all.

    Attributes:
        matrix_rate, vector_rate: peak learning rates.
        warm_up_share: share of the run in which the rate rises to its peak.
        final_share: of the peak, what a cosine leaves at the end.
        clip_norm: longest gradient.
    """

    optimizer: Literal["muon", "adamw"] = "muon"
    matrix_rate: Annotated[float, Field(gt=0)] = 5e-3
    vector_rate: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warm_up_share: Share = 0.04
    final_share: Share = 0.02
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class Schedule(_Group):
    """How long the run is, in steps or in seconds of training. Only one in steps can be repeated bit for bit."""

    steps: Positive | None = None
    seconds: Seconds | None = None

    @model_validator(mode="after")
    def _one(self) -> Schedule:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("give steps or seconds, not both")
        return self


class HeldOut(_Group):
    """What tells how good the drafter is meanwhile.

    Attributes:
        conversations: kept out of training for the loss by depth.
        every_s: seconds of training between two looks at their loss; None with a schedule in steps.
        every_steps: the same in steps.
        tau_prompts: JSONL files whose prompts the real engine answers with the drafter as it is.
        tau_count: prompts of each file.
        tau_every: looks at the held-out loss between two at tau.
    """

    conversations: Positive = 128
    every_s: Seconds | None = None
    every_steps: Positive | None = None
    tau_prompts: tuple[Path, ...] = ()
    tau_count: Positive = 8
    tau_every: Positive = 1

    @model_validator(mode="after")
    def _has_effect(self) -> HeldOut:
        plain = type(self).model_fields
        if not self.tau_prompts:
            for name in ("tau_count", "tau_every"):
                if getattr(self, name) != plain[name].default:
                    raise ValueError(f"{name} has no effect without tau_prompts")
        return self


class TrainSettings(_Group):
    """A whole run.

    Attributes:
        target: Hugging Face folder of the target.
        data: folders that `ddtree train data` wrote.
        start_from: drafter to go on with; its config is kept. None starts a new one.
        drafter: shape of a new drafter.
        draft_window: blocks see only so many of the last context tokens, as the engine's option of this name.
        sliding_block: how layers with a sliding window see the block.
        too_long: what to do with conversations beyond a row or the target's context.
        name, licence, base_model: for the model card: of the drafter, as SPDX identifier, and the target's name on
            the Hugging Face hub.
        dtype: of the arithmetic; master weights are float32.
    """

    target: Path
    data: Annotated[tuple[Path, ...], Field(min_length=1)]
    start_from: Path | None = None
    drafter: NewDrafter | None = None
    draft_window: Positive | None = None
    sliding_block: Literal["bidirectional", "causal"] = "bidirectional"
    objective: Objective = Objective()
    batch: Batch = Batch()
    optimization: Optimization = Optimization()
    schedule: Schedule
    held_out: HeldOut = HeldOut()
    too_long: Literal["cut", "skip", "refuse"] = "cut"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    name: str | None = None
    licence: str | None = None
    base_model: str | None = None
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    @model_validator(mode="after")
    def _one_start(self) -> TrainSettings:
        if (self.start_from is None) == (self.drafter is None):
            raise ValueError("give start_from or drafter, not both: an older drafter keeps its shape")
        return self

    @model_validator(mode="after")
    def _no_folder_twice(self) -> TrainSettings:
        if len({folder.resolve() for folder in self.data}) < len(self.data):
            raise ValueError("a data folder is given twice: text held out of one would be learnt from the other")
        return self


def checked_settings(values: dict[str, object]) -> TrainSettings:
    """Settings from plain values.

    Raises:
        UserError: names what is wrong.
    """
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        place = "".join(f"{part}." for part in fault["loc"])[:-1]
        cause = fault["msg"].removeprefix("Value error, ")
        raise UserError(f"{place}: {cause}" if place else cause, "correct it") from None


def changed_settings(before: TrainSettings, now: TrainSettings) -> list[str]:
    """Names of what differs, as ``group.field``."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def plain_settings(settings: TrainSettings) -> dict[str, str | int | float | bool | None]:
    """Every setting that says how the drafter came to be, by its name; files and folders by theirs, without paths."""
    plain: dict[str, str | int | float | bool | None] = {}
    for key, value in _flat(settings.model_dump()).items():
        if key in ("name", "licence", "base_model"):
            continue
        if isinstance(value, tuple):
            value = ", ".join(part.name if isinstance(part, Path) else str(part) for part in value)
        elif isinstance(value, Path):
            value = value.resolve().name
        plain[key] = value  # type: ignore[assignment]
    return plain


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
