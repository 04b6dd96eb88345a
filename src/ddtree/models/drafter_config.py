"""What a DFlash drafter looks like (the `DFlashDraftModel` format of z-lab, arXiv 2602.06036)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ddtree.draft_temperature import WANTED, is_draft_temperature
from ddtree.errors import UserError
from ddtree.models.config_file import ConfigFile
from ddtree.models.rope import RopeSettings, read_rope
from ddtree.models.target_config import LayerShape, TargetConfig, read_layer_shape, read_sliding_windows

SlidingBlock = Literal["bidirectional", "causal"]
DFLASH_KEYS = {"target_layer_ids", "mask_token_id", "block_size", "num_target_layers", "draft_temperature"}


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter.

    Attributes:
        block_size: tokens of a block, the root included; depths 1 .. block_size - 1 are drafted.
        mask_token_id: stands in every slot of the block but the first.
        tap_layers: target layers whose output the drafter reads; ``i`` is Hugging Face's ``hidden_states[i + 1]``.
        is_causal: rows of the block see only rows before them, in every layer.
        sliding_windows: per layer, positions a query sees, itself included, or None.
        sliding_block: whether layers with a sliding window see the block both ways (z-lab's torch code, the default) or
            causally (SGLang).
        draft_temperature: at which the drafter's distributions are taken to build a greedy request's tree; a key of
            `dflash_config` that is ddtree's own.
        ignored_keys: keys that cannot affect inference and were not used.
    """

    vocab_size: int
    n_layers: int
    layer: LayerShape
    rope: RopeSettings
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    is_causal: bool
    sliding_windows: tuple[int | None, ...]
    sliding_block: SlidingBlock
    max_positions: int
    draft_temperature: float
    ignored_keys: tuple[str, ...]


def default_tap_layers(n_target_layers: int, n_draft_layers: int) -> tuple[int, ...]:
    """Where a checkpoint names no taps: evenly from layer 1 to the fourth from last, as z-lab's drafters have it."""
    if n_draft_layers == 1:
        return (n_target_layers // 2,)
    first, last = 1, n_target_layers - 3
    return tuple(round(first + i * (last - first) / (n_draft_layers - 1)) for i in range(n_draft_layers))


def read_drafter_config(
    folder: Path,
    target: TargetConfig,
    *,
    block_size: int | None = None,
    sliding_block: SlidingBlock = "bidirectional",
    draft_temperature: float | None = None,
) -> DrafterConfig:
    """Read a drafter's `config.json` and check that it was made for ``target``.

    Args:
        block_size: draft in blocks of this size instead of the checkpoint's.
        draft_temperature: build trees at this one instead of the checkpoint's.

    Raises:
        UserError: not a DFlash drafter, a drafter of another target, or a key that would be ignored.
    """
    file = ConfigFile(folder, "drafter")
    file.refuse_quantised()
    architectures = file.get("architectures", list, [])
    if "DFlashDraftModel" not in architectures:
        raise file.refuse(
            f"architectures {architectures} is not DFlashDraftModel", "take a DFlash drafter (z-lab format)"
        )
    if (family := file.get("model_type", str, "qwen3")) != "qwen3":
        raise file.refuse(f"model_type {family!r} is not supported", "take a drafter with Qwen3-style layers")
    dflash = file.get("dflash_config", dict, {})
    if unread := sorted(set(dflash) - DFLASH_KEYS):
        raise file.refuse(
            f"dflash_config.{', dflash_config.'.join(unread)} would be ignored", "use an engine that reads it"
        )
    n_layers = file.positive("num_hidden_layers")
    layer = read_layer_shape(file, "qwen3")
    n_target_layers = _in_either_place(file, dflash, "num_target_layers", int)
    if n_target_layers is None:
        n_target_layers = target.n_layers
    taps = _in_either_place(file, dflash, "target_layer_ids", list)
    taps = default_tap_layers(target.n_layers, n_layers) if taps is None else tuple(taps)
    own_block = _in_either_place(file, dflash, "block_size", int)
    max_positions = file.positive("max_position_embeddings", target.max_positions)
    file.get("tie_word_embeddings", bool)  # the head is the target's either way
    config = DrafterConfig(
        vocab_size=file.positive("vocab_size"),
        n_layers=n_layers,
        layer=layer,
        rope=read_rope(file, layer.head_dim, max_positions, 10000.0),
        block_size=own_block if block_size is None else block_size,
        mask_token_id=dflash.get("mask_token_id", -1),
        tap_layers=taps,
        is_causal=file.get("is_causal", bool, False),
        sliding_windows=read_sliding_windows(file, n_layers),
        sliding_block=sliding_block,
        max_positions=max_positions,
        draft_temperature=_own_draft_temperature(file, dflash) if draft_temperature is None else draft_temperature,
        ignored_keys=(),
    )
    if own_block is None and block_size is None:
        raise file.refuse("block_size is missing", "give --block-size")
    _check_fit(file, config, target, n_target_layers)
    return replace(config, ignored_keys=file.close())


def _own_draft_temperature(file: ConfigFile, dflash: dict[str, Any]) -> float:
    """What the drafter's `dflash_config` says of it, or 1.

    Raises:
        UserError: it is no number, or out of range.
    """
    value = dflash.get("draft_temperature")
    if value is None:
        return 1.0
    if not is_draft_temperature(value):
        raise file.refuse(f"dflash_config.draft_temperature is {value!r}", f"write {WANTED}")
    return float(value)


def _in_either_place(file: ConfigFile, dflash: dict[str, Any], key: str, kind: type) -> Any:
    """A key of `dflash_config` or of the config itself; where both stand they must agree."""
    outer, inner = file.get(key, kind), dflash.get(key)
    if inner is not None and (isinstance(inner, bool) or not isinstance(inner, kind)):
        raise file.refuse(f"dflash_config.{key} is {inner!r}, not {kind.__name__}", f"correct dflash_config.{key}")
    if inner is not None and outer is not None and inner != outer:
        raise file.refuse(f"{key} is {outer} and {inner} at once", "keep the one that is right")
    return outer if inner is None else inner


def _check_fit(file: ConfigFile, config: DrafterConfig, target: TargetConfig, n_target_layers: int) -> None:
    def other_target(cause: str) -> UserError:
        return file.refuse(f"{cause}: this drafter was made for another target", "take the drafter of this target")

    if config.vocab_size != target.vocab_size:
        raise other_target(f"vocab_size {config.vocab_size}, the target has {target.vocab_size}")
    if config.layer.hidden_size != target.layer.hidden_size:
        raise other_target(f"hidden_size {config.layer.hidden_size}, the target has {target.layer.hidden_size}")
    if n_target_layers != target.n_layers:
        raise other_target(f"num_target_layers {n_target_layers}, the target has {target.n_layers}")
    mask = config.mask_token_id
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise file.refuse(f"dflash_config.mask_token_id {mask} is no token of the target", "name the mask token's id")
    if not config.tap_layers or any(isinstance(i, bool) or not isinstance(i, int) for i in config.tap_layers):
        raise file.refuse(f"target_layer_ids {list(config.tap_layers)} must be layer numbers", "correct them")
    if any(not 0 <= i < target.n_layers for i in config.tap_layers):
        raise other_target(
            f"target_layer_ids {list(config.tap_layers)}, the target has layers 0 .. {target.n_layers - 1}"
        )
    if len(set(config.tap_layers)) < len(config.tap_layers):
        raise file.refuse(f"target_layer_ids {list(config.tap_layers)} name a layer twice", "name each layer once")
    if target.n_layers - 1 in config.tap_layers:
        raise file.refuse(
            f"target_layer_ids name the last layer {target.n_layers - 1}, "
            "whose output Hugging Face gives only after the final norm",
            "take a drafter that taps earlier layers",
        )
    if not isinstance(config.block_size, int) or not 2 <= config.block_size <= 64:
        raise file.refuse(f"block_size {config.block_size} is out of range", "choose 2 to 64")
