"""``ddtree train run``: train a drafter."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddtree.cli.options import Dtype, whole_number
from ddtree.cli.output import note, result_console
from ddtree.cli.train_progress import TrainProgress
from ddtree.demo import target_folder
from ddtree.errors import UserError
from ddtree.extras import require_extra


class Distribution(StrEnum):
    """Which part of the target's distribution counts."""

    full = "full"
    top_k = "top-k"
    argmax = "argmax"


class TooLong(StrEnum):
    """What becomes of a conversation beyond a row."""

    cut = "cut"
    skip = "skip"
    refuse = "refuse"


class OptimizerName(StrEnum):
    """Which optimizer takes the matrices."""

    muon = "muon"
    adamw = "adamw"


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Which drafter is trained."""

    start_from: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with this drafter, in its shape. Default: a new one.")
    ] = None
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of a new drafter. Default: 5.")] = None
    block_size: Annotated[
        int | None, typer.Option(min=2, max=64, help="Tokens of its block, root included. Default: 16.")
    ] = None
    heads: Annotated[int | None, typer.Option(min=1, help="Its attention heads. Default: the target's.")] = None
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Its key heads. Default: the target's.")] = None
    head_dim: Annotated[int | None, typer.Option(min=2, help="Size of a head. Default: the target's.")] = None
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="Middle of its feed-forward block. Default: the target's.")
    ] = None
    taps: Annotated[
        str | None, typer.Option(metavar="I,...", help="Target layers it reads, 0 the first. Default: evenly spread.")
    ] = None
    mask_token: Annotated[
        int | None, typer.Option(min=0, metavar="ID", help="Token of open slots. Default: one that chat never has.")
    ] = None
    sliding_window: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a query of its layers sees, itself included. Default: all.")
    ] = None
    causal: Annotated[bool, typer.Option("--causal", help="Its block sees only what stands before.")] = False
    draft_window: Annotated[
        int | None, typer.Option(min=1, help="Train for an engine with this draft window. Default: all context.")
    ] = None
    sliding_block: Annotated[
        str, typer.Option(metavar="bidirectional|causal", help="How sliding-window layers see the block.")
    ] = "bidirectional"


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """What the drafter is taught."""

    token_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the loss on the token written; the rest on distributions.")
    ] = 0.5
    distribution: Annotated[Distribution, typer.Option(help="Part of the target's distribution to match.")] = (
        Distribution.full
    )
    top_k: Annotated[int | None, typer.Option(min=1, metavar="K", help="With --distribution top-k.")] = None
    decay_tokens: Annotated[float, typer.Option(metavar="G", help="Depth k weighs exp(-(k - 1) / G).")] = 4.0
    reach_share: Annotated[
        float, typer.Option(min=0, max=1, help="How far depths are weighed by the chance to be reached.")
    ] = 0.0
    head_share: Annotated[
        float, typer.Option(max=1, help="Share of depths looked at in each step; the expected loss stays the same.")
    ] = 0.5


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Sizes of a step."""

    rows: Annotated[int, typer.Option(min=1, help="Packed rows of a micro-batch, of each process.")] = 16
    row_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 2048
    anchors: Annotated[int, typer.Option(min=1, help="Blocks drafted in a row.")] = 512
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches before the weights change.")] = 1
    too_long: Annotated[TooLong, typer.Option(help="Conversations beyond a row.")] = TooLong.cut


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How weights change."""

    optimizer: Annotated[OptimizerName, typer.Option(help="Of matrices; norms and biases always have AdamW.")] = (
        OptimizerName.muon
    )
    matrix_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of matrices. Default: 5e-3 (muon), 6e-4 (adamw).")
    ] = None
    vector_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of the rest. Default: 1e-3 (muon), 6e-4 (adamw).")
    ] = None
    weight_decay: Annotated[float, typer.Option(min=0, help="Of matrices.")] = 0.01
    warm_up: Annotated[float, typer.Option(min=0, max=1, help="Share of the run in which rates rise.")] = 0.04
    final_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of the peak left at the end.")] = 0.02
    clip_norm: Annotated[float, typer.Option(help="Longest gradient.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """Looks at how good the drafter is meanwhile."""

    held_out: Annotated[int, typer.Option(min=1, metavar="N", help="Conversations kept out of training.")] = 128
    held_out_every: Annotated[
        float | None, typer.Option(metavar="N", help="Seconds (or, with --steps, steps) between looks. Default: end.")
    ] = None
    tau_prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="JSONL prompts for tau through the real engine.")
    ] = None
    tau_count: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts of each file.")] = 8
    tau_every: Annotated[int, typer.Option(min=1, metavar="N", help="Looks between two measurements of tau.")] = 1


def run(
    data: Annotated[list[Path], typer.Option(metavar="DIR", help="From `ddtree train data`. Several add up.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run; the drafter goes to DIR/drafter.")],
    drafter: DrafterOptions,
    objective: ObjectiveOptions,
    batch: BatchOptions,
    optimizer: OptimizerOptions,
    held_out: HeldOutOptions,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Target: a Hugging Face folder. Without it, the demo's SmolLM2."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Length of the run in steps.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of the run in seconds of training.")] = None,
    stop_after: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="S", help="End, with a checkpoint, this long after the start; see --resume."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")] = False,
    checkpoint_every: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="Seconds between checkpoints.")
    ] = 60.0,
    look_every: Annotated[int, typer.Option(min=1, metavar="N", help="Steps between looks at clock and loss.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and anchors.")] = 0,
    name: Annotated[str | None, typer.Option(help="Of the drafter, for its card. Default: the folder's.")] = None,
    licence: Annotated[str | None, typer.Option(metavar="SPDX", help="Of the drafter, for its card.")] = None,
    base_model: Annotated[str | None, typer.Option(metavar="REPO", help="The target on the hub, for the card.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Of the arithmetic; master weights are float32.")] = Dtype.auto,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train a DFlash drafter on a target's own answers.

    The run's folder keeps settings, logs (CSV) and a checkpoint; a run that was stopped, by --stop-after, Ctrl-C or a
    crash, goes on with --resume. For several GPUs of one host: torchrun --nproc-per-node N -m ddtree train run ...
    """
    started_at = time.monotonic()
    require_extra("engine", "ddtree train run")
    from ddtree.train.run import RunOptions, train
    from ddtree.train.settings import checked_settings

    values: dict[str, object] = {
        "data": tuple(data),
        "start_from": drafter.start_from,
        "drafter": _new_drafter(drafter),
        "draft_window": drafter.draft_window,
        "sliding_block": drafter.sliding_block,
        "objective": {
            "token_share": objective.token_share,
            "distribution": objective.distribution.value.replace("-", "_"),
            "top_k": objective.top_k,
            "decay_tokens": objective.decay_tokens,
            "reach_share": objective.reach_share,
            "head_share": objective.head_share,
        },
        "batch": {
            "rows": batch.rows,
            "row_tokens": batch.row_tokens,
            "anchors_per_row": batch.anchors,
            "accumulation": batch.accumulation,
        },
        "optimization": _optimization(optimizer),
        "schedule": {"steps": steps, "seconds": seconds},
        "held_out": {
            "conversations": held_out.held_out,
            **_look(held_out.held_out_every, in_steps=steps is not None),
            "tau_prompts": tuple(held_out.tau_prompts or ()),
            "tau_count": held_out.tau_count,
            "tau_every": held_out.tau_every,
        },
        "too_long": batch.too_long.value,
        "seed": seed,
        "name": name,
        "licence": licence,
        "base_model": base_model,
        "device": device,
        "dtype": dtype.value,
    }
    options = RunOptions(
        folder=out,
        resume=resume,
        stop_after_s=stop_after,
        checkpoint_every_s=checkpoint_every,
        look_every=look_every,
        threads=threads,
        started_at=started_at,
    )
    is_first = os.environ.get("RANK", "0") == "0"
    with TrainProgress() as progress:
        values["target"] = model or target_folder(lambda stage, fraction: progress.say_stage(stage))
        outcome = train(checked_settings(values), options, progress.watcher())
    if not is_first:
        return
    what = "trained" if outcome.finished else "stopped; go on with --resume"
    note(f"{what}: step {outcome.step}, {outcome.train_s:.0f} s of training")
    result_console().print(str(outcome.drafter), markup=False, soft_wrap=True)
    if outcome.interrupted:
        raise KeyboardInterrupt


def _new_drafter(options: DrafterOptions) -> dict[str, object] | None:
    """The shape of a new drafter, or None where an older one goes on; the two exclude each other."""
    shape = {
        "layers": options.layers,
        "block_size": options.block_size,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "intermediate_size": options.intermediate_size,
        "tap_layers": None if options.taps is None else _layer_numbers(options.taps),
        "mask_token_id": options.mask_token,
        "sliding_window": options.sliding_window,
        "is_causal": options.causal or None,
    }
    given: dict[str, object] = {key: value for key, value in shape.items() if value is not None}
    if options.start_from is None:
        return given
    if given:
        flag = {"tap_layers": "taps", "mask_token_id": "mask-token", "is_causal": "causal"}
        names = ", ".join("--" + flag.get(key, key.replace("_", "-")) for key in given)
        raise UserError(f"{names} with --start-from: that drafter has its shape", "leave one of them out")
    return None


def _layer_numbers(text: str) -> tuple[int, ...]:
    numbers = [whole_number(part.strip()) for part in text.split(",")]
    if None in numbers:
        raise UserError(f"--taps is {text!r}", "write layer numbers with commas between them")
    return tuple(number for number in numbers if number is not None)


def _optimization(options: OptimizerOptions) -> dict[str, object]:
    is_muon = options.optimizer is OptimizerName.muon
    rates = (5e-3, 1e-3) if is_muon else (6e-4, 6e-4)
    return {
        "optimizer": options.optimizer.value,
        "matrix_rate": options.matrix_rate if options.matrix_rate is not None else rates[0],
        "vector_rate": options.vector_rate if options.vector_rate is not None else rates[1],
        "weight_decay": options.weight_decay,
        "warm_up_share": options.warm_up,
        "final_share": options.final_rate,
        "clip_norm": options.clip_norm,
    }


def _look(every: float | None, *, in_steps: bool) -> dict[str, object]:
    if every is None:
        return {}
    if not in_steps:
        return {"every_s": every}
    if every != int(every):
        raise UserError(f"--held-out-every is {every:g}", "with --steps it counts steps: give a whole number")
    return {"every_steps": int(every)}
