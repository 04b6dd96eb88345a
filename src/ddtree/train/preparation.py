"""From settings to what a run works with: target, drafter, text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree.engine.device import choose_device, choose_dtype
from ddtree.errors import UserError
from ddtree.models.config_file import read_json_object
from ddtree.models.drafter_config import DrafterConfig, read_drafter_config
from ddtree.models.target import Target, load_target
from ddtree.models.target_config import TargetConfig, read_target_config
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.data_facts import DataFacts, TargetIdentity, file_sha256, identify_target
from ddtree.train.new_drafter import INITIAL_SCALE, choose_mask_token, drafter_config, initial_weights
from ddtree.train.packing import Corpus
from ddtree.train.quick_tau import check_tau_prompts
from ddtree.train.settings import TrainSettings
from ddtree.train.shards import Conversations, open_shards
from ddtree.train.trainable_drafter import TrainableDrafter


@dataclass(frozen=True)
class Prepared:
    """What a run works with.

    Attributes:
        start: what the drafter's weights began as, in words.
    """

    target: Target
    drafter: TrainableDrafter
    corpus: Corpus
    identity: TargetIdentity
    data: list[DataFacts]
    start: str


def prepare(settings: TrainSettings, device_name: str, tell: Callable[[str], None]) -> Prepared:
    """Read and check everything that the settings name; nothing is written.

    Raises:
        UserError: something is missing, damaged, out of range, or does not fit the rest.
    """
    config = read_target_config(settings.target)
    _check_sizes(settings, config)
    check_tau_prompts(settings)
    device = choose_device(device_name)
    dtype = choose_dtype(settings.dtype, device, config.dtype)
    identity = identify_target(settings.target)
    tell("reading the data")
    folders = [open_shards(folder) for folder in settings.data]
    for folder in folders:
        folder.require_target(identity)
    drafter_json = _drafter_json(settings, config)
    read_back = _read_back(drafter_json, settings, config)
    if settings.sliding_block == "causal" and not any(read_back.sliding_windows):
        raise UserError("--sliding-block causal, but no layer has a sliding window", "leave it out")
    drafter = TrainableDrafter(read_back, drafter_json)
    corpus = _corpus(settings, folders, drafter.config.mask_token_id)
    tell(
        f"{len(corpus.training)} conversations to train on, {len(corpus.held_out)} held out, {corpus.n_cut} cut to a "
        f"row, {corpus.n_skipped} left out"
    )
    tell("loading the target")
    target = load_target(settings.target, dtype, device)
    if settings.start_from is not None:
        drafter.read(settings.start_from)
        start = f"the drafter {settings.start_from.resolve().name} (SHA-256 {_weights_sha256(settings.start_from)})"
    else:
        shapes = ((name, value.shape) for name, value in drafter.state_dict().items())
        drafter.load(initial_weights(shapes, target.final_norm, settings.seed))
        start = f"normal(0, {INITIAL_SCALE}), final norm of the target, seed {settings.seed}"
    return Prepared(target, drafter.to(device), corpus, identity, [folder.facts for folder in folders], start)


def _check_sizes(settings: TrainSettings, config: TargetConfig) -> None:
    if settings.batch.row_tokens > config.max_positions:
        raise UserError(
            f"rows of {settings.batch.row_tokens} tokens are beyond the target's context of {config.max_positions}",
            "lower --row-tokens",
        )
    if settings.batch.anchors_per_row >= settings.batch.row_tokens:
        raise UserError(
            f"{settings.batch.anchors_per_row} anchors do not fit a row of {settings.batch.row_tokens} tokens",
            "lower --anchors",
        )
    kept = settings.objective.top_k
    if kept is not None and kept > config.vocab_size:
        raise UserError(f"top_k {kept} is beyond the vocabulary of {config.vocab_size}", "lower --top-k")


def _drafter_json(settings: TrainSettings, config: TargetConfig) -> dict[str, Any]:
    if settings.start_from is not None:
        started = {**read_json_object(settings.start_from / "config.json"), "dtype": "bfloat16"}
        if isinstance(own := started.get("dflash_config"), dict):
            own.pop("draft_temperature", None)  # found for the weights of the start
        return started
    shape = settings.drafter
    assert shape is not None
    mask = shape.mask_token_id
    if mask is None:
        mask = choose_mask_token(Tokenizer(settings.target, config.vocab_size), config)
    return drafter_config(shape, config, settings.target, mask)


def _read_back(drafter_json: dict[str, Any], settings: TrainSettings, config: TargetConfig) -> DrafterConfig:
    """The config as whoever loads the finished drafter will read it, with the same refusals."""
    if settings.start_from is not None:
        return read_drafter_config(settings.start_from, config, sliding_block=settings.sliding_block)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(drafter_json))
        try:
            return read_drafter_config(Path(folder), config, sliding_block=settings.sliding_block)
        except UserError as error:  # of a file that nobody knows of
            cause = error.cause.removeprefix(f"{Path(folder) / 'config.json'}: ")
            raise UserError(f"the new drafter's {cause}", "correct its flags") from None


def _corpus(settings: TrainSettings, folders: list[Conversations], mask_token_id: int) -> Corpus:
    return Corpus(
        folders, settings.batch.row_tokens, settings.too_long, settings.held_out.conversations, settings.seed,
        mask_token_id,
    )  # fmt: skip


def _weights_sha256(folder: Path) -> str:
    path = folder / "model.safetensors"
    return file_sha256(path) if path.is_file() else "unknown: several files"


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
