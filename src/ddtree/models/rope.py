"""Rotary position embeddings of every `rope_type` that transformers knows for these families.

The frequencies themselves come from transformers' own table of functions, so a type can not drift from what the
checkpoint was trained with. What is ours is the rule by position: the types whose frequencies depend on the length of
the text (`dynamic`, `longrope`) are a function of a token's own position and of the prompt's length, as in decoding one
token a step, so that a node deep in a draft tree is rotated exactly as the same token would be without a tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ddtree.models.config_file import ConfigFile

LENGTH_DEPENDENT = ("dynamic", "longrope")
ORIGINAL = "original_max_position_embeddings"
KNOWN_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", ORIGINAL},
    "yarn": {"factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", ORIGINAL, "attention_factor", "short_factor", "long_factor"},
    "llama3": {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "proportional": {"factor", "partial_rotary_factor"},
}
_LARGEST = torch.finfo(torch.float32).max  # angles are computed in float32
REQUIRED_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeSettings:
    """`rope_parameters` of a config, in transformers' names; `parameters` is a plain dict because types differ."""

    rope_type: str
    theta: float
    head_dim: int
    max_positions: int
    parameters: dict[str, Any]

    @property
    def original_max_positions(self) -> int:
        return int(self.parameters.get("original_max_position_embeddings", self.max_positions))


def read_rope(file: ConfigFile, head_dim: int, max_positions: int, default_theta: float) -> RopeSettings:
    """Read `rope_parameters` or the older `rope_theta` and `rope_scaling`; where both stand they must agree."""
    new: dict[str, Any] = file.get("rope_parameters", dict, {})
    old: dict[str, Any] = dict(file.get("rope_scaling", dict, {}))
    theta = file.get("rope_theta", (float, int))
    outer_original = file.get("original_max_position_embeddings", int)
    if any(isinstance(value, dict) for value in new.values()):
        raise file.refuse("rope_parameters differ by layer, which is not supported", "take another model")
    if new and old and {**old, "type": None, "rope_theta": None} != {**new, "type": None, "rope_theta": None}:
        raise file.refuse("rope_scaling and rope_parameters disagree", "keep the one that is right")
    parameters = dict(new or old)
    inner_theta = parameters.pop("rope_theta", None)
    if theta is not None and inner_theta is not None and theta != inner_theta:
        raise file.refuse(f"rope_theta is {theta} and {inner_theta} at once", "keep the one that is right")
    rope_type = parameters.pop("rope_type", parameters.get("type", "default"))
    parameters.pop("type", None)
    if rope_type != "proportional" and parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise file.refuse("partial_rotary_factor other than 1 is not supported", "take another model")
    if not isinstance(rope_type, str) or rope_type not in KNOWN_KEYS:
        raise file.refuse(f"rope_type {rope_type!r} is not known", f"use one of {', '.join(KNOWN_KEYS)}")
    unread = sorted(set(parameters) - KNOWN_KEYS[rope_type])
    if unread:
        raise file.refuse(
            f"rope parameters {', '.join(unread)} do not belong to rope_type {rope_type!r}", "remove them"
        )
    for key in REQUIRED_KEYS.get(rope_type, ()):
        if parameters.get(key) is None:
            raise file.refuse(f"rope_type {rope_type!r} needs {key}", f"add rope_parameters.{key}")
    for key, value in {"rope_theta": theta, ORIGINAL: outer_original}.items():
        if value is not None and not _is_valid(key, value, head_dim):
            raise file.refuse(f"{key} is {value!r}", "take the value that the model was trained with")
    for key, value in {"rope_theta": inner_theta, **parameters}.items():
        if value is not None and not _is_valid(key, value, head_dim):
            raise file.refuse(f"rope_parameters.{key} is {value!r}", "take the value that the model was trained with")
    if rope_type in ("yarn", "longrope", "llama3"):
        if outer_original is not None:
            parameters["original_max_position_embeddings"] = outer_original
        parameters.setdefault("original_max_position_embeddings", max_positions)
    given = [value for value in (theta, inner_theta) if value is not None]
    return RopeSettings(rope_type, float(given[0] if given else default_theta), head_dim, max_positions, parameters)


def _is_valid(key: str, value: Any, head_dim: int) -> bool:
    if key == "truncate":
        return isinstance(value, bool)
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and len(value) == head_dim // 2 and all(_is_positive(v) for v in value)
    return _is_positive(value) and (key != "rope_theta" or value >= 1)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST


class RotaryEmbedding:
    """Angles for token positions.

    Args:
        settings: what the checkpoint asks for.
        device: where positions will live.
    """

    def __init__(self, settings: RopeSettings, device: torch.device) -> None:
        self.settings = settings
        self._config = SimpleNamespace(
            rope_parameters={"rope_type": settings.rope_type, "rope_theta": settings.theta, **settings.parameters},
            max_position_embeddings=settings.max_positions,
            head_dim=settings.head_dim,
            hidden_size=settings.head_dim,  # transformers divides these two, though head_dim is what counts
            num_attention_heads=1,
            standardize_rope_params=lambda: None,
        )
        self._device = device
        self._inv_freq, self._scale = self._frequencies(None)
        if settings.rope_type == "longrope":
            self._long_inv_freq, _ = self._frequencies(settings.original_max_positions + 1)

    def _frequencies(self, seq_len: int | torch.Tensor | None) -> tuple[torch.Tensor, float]:
        if self.settings.rope_type == "default":
            exponents = torch.arange(0, self.settings.head_dim, 2, dtype=torch.float) / self.settings.head_dim
            return (1.0 / (self.settings.theta**exponents)).to(self._device), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        compute = ROPE_INIT_FUNCTIONS[self.settings.rope_type]
        inv_freq, scale = compute(self._config, self._device, seq_len=seq_len)
        return inv_freq, float(scale)

    @property
    def scale(self) -> float:
        """Factor on cosines and sines."""
        return self._scale

    def length_kind(self, prompt_tokens: int) -> int:
        """0, or a number that differs where prompts of two lengths get different angles for the same positions."""
        is_short = prompt_tokens <= min(self.settings.original_max_positions, self.settings.max_positions)
        return 0 if is_short or self.settings.rope_type not in LENGTH_DEPENDENT else prompt_tokens

    def frequencies(self, positions: Callable[[], torch.Tensor], prompt_tokens: torch.Tensor) -> torch.Tensor:
        """Angle per position step.

        Args:
            positions: gives int64 ``[batch, rows]``; only called for the length-dependent types.
            prompt_tokens: int64 ``[batch]``, length of each sequence's prompt; only length-dependent types read it.

        Returns:
            float32 ``[head_dim / 2]``, or ``[batch, rows, head_dim / 2]`` for the length-dependent types.
        """
        if self.settings.rope_type not in LENGTH_DEPENDENT:
            return self._inv_freq
        lengths = torch.maximum(positions() + 1, prompt_tokens[:, None])[..., None]
        if self.settings.rope_type == "dynamic":
            if lengths.device.type != "cpu":
                return self._frequencies(lengths)[0]
            # On the CPU a power is rounded otherwise in a full vector than in what is left over: each length by itself.
            each, index = lengths[..., 0].unique(return_inverse=True)
            return torch.stack([self._frequencies(length[None])[0] for length in each])[index]
        return torch.where(lengths > self.settings.original_max_positions, self._long_inv_freq, self._inv_freq)
