"""Conversations by the million: the target's own answers to given prompts and to turns that it completes itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddtree.engine.device import choose_device, choose_dtype, free_memory_bytes
from ddtree.errors import UserError
from ddtree.kernels.fast_set import FAST, why_not_fast
from ddtree.kernels.kernel_set import TWINS
from ddtree.models.target import Target, load_target
from ddtree.models.target_config import TargetConfig, read_target_config
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.batch_generator import BatchGenerator
from ddtree.train.data_facts import DataAsked, DataFacts, EvaluationFile, file_sha256, identify_target
from ddtree.train.data_request import DataRequest
from ddtree.train.draw_plan import DrawPlan
from ddtree.train.generation_limits import Limits, seat_bytes
from ddtree.train.overlap import EvaluationText
from ddtree.train.prompt_files import BadRow, read_prompt_file
from ddtree.train.prompt_pool import PromptPool, read_pool
from ddtree.train.shard_maker import ShardMaker
from ddtree.train.shards import ShardWriter, locked
from ddtree.train.turn_form import TurnForm, read_turn_form

GPU_SEATS, CPU_SEATS = 2048, 16
_MEMORY_SHARE = 0.7
_RUN_STEPS = 64
"""Steps between two looks of the host, which meanwhile judges and stores what the run before finished."""
_NAMED_BAD_ROWS = 100
_HOPELESS_SHARDS = 8

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class DataReport:
    """What a run did. ``seconds`` is the time of generation alone, ``new_answer_tokens`` what it stored meanwhile."""

    facts: DataFacts
    new_answer_tokens: int
    seconds: float
    seats: int


@dataclass(frozen=True)
class _Prepared:
    """All that follows from a request before weights are loaded."""

    config: TargetConfig
    device: torch.device
    dtype: torch.dtype
    tokenizer: Tokenizer
    evaluation: EvaluationText
    endings: list[list[int]]
    plan: DrawPlan
    facts: DataFacts


def generate_data(request: DataRequest, tell: Progress) -> DataReport:
    """Make a folder of conversations, or go on with one, until it is complete or the time is over.

    Raises:
        UserError: something asked for is out of range or does not fit, a file is damaged, or the disk is full; shards
            stored before stay, and the same request goes on with them.
    """
    stop_at = time.perf_counter() + (math.inf if request.stop_after_s is None else request.stop_after_s)
    request.check()
    tell("reading prompts", 0.0)
    prepared = _prepare(request)
    with locked(request.out):
        writer = ShardWriter(request.out, prepared.facts)
        if writer.facts.is_finished:
            return DataReport(writer.facts, 0, 0.0, 0)
        tell("loading the target", 0.0)
        generator = _load_generator(request, prepared)
        enders = frozenset(prepared.config.eos_token_ids)
        maker = ShardMaker(writer, prepared.tokenizer, prepared.evaluation, enders)
        before, began = maker.n_answer_tokens, time.perf_counter()
        prepared.plan.skip(maker.n_stored_draws)
        _fill(maker, prepared.plan, generator, stop_at, tell)
        if maker.is_enough:
            writer.finish()
        seconds = time.perf_counter() - began
        return DataReport(writer.facts, maker.n_answer_tokens - before, seconds, generator.seats)


def _prepare(request: DataRequest) -> _Prepared:
    config = read_target_config(request.model)
    _check_context(request, config)
    device = choose_device(request.device)
    dtype = choose_dtype(request.dtype, device, config.dtype)
    tokenizer = Tokenizer(request.model, config.vocab_size)
    evaluation, excluded = _read_evaluation(request)
    pool = read_pool(
        request.prompts,
        tokenizer,
        evaluation,
        chat=request.chat,
        prompt_tokens=request.max_prompt_tokens,
        on_bad_row=request.on_bad_row,
    )
    form = read_turn_form(tokenizer, chat=request.chat) if request.self_prompt_share else None
    endings = _endings(form, pool, request)
    asked = _asked(request, pool, excluded, dtype)
    plan = DrawPlan(asked, pool, form, [len(ending) for ending in endings])
    facts = DataFacts(
        target=identify_target(request.model),
        asked=asked,
        sources=plan.sources,
        bad_rows=[str(bad) for bad in pool.bad_rows[:_NAMED_BAD_ROWS]],
        n_bad_rows=len(pool.bad_rows),
        n_evaluation_prompts=pool.n_evaluation,
    )
    return _Prepared(config, device, dtype, tokenizer, evaluation, endings, plan, facts)


def _load_generator(request: DataRequest, prepared: _Prepared) -> BatchGenerator:
    kernels = TWINS if why_not_fast(prepared.device) else FAST
    target = load_target(request.model, prepared.dtype, prepared.device, kernels)
    limits = Limits(
        prompt_tokens=request.max_prompt_tokens,
        answer_tokens=request.max_answer_tokens,
        turn_enders=frozenset({*prepared.config.eos_token_ids, *prepared.tokenizer.special_tokens}),
        answer_enders=frozenset(prepared.config.eos_token_ids),
    )
    endings = [ending for ending in prepared.endings if ending]  # all of them, or none without a chat template
    return BatchGenerator(target, limits, endings, _seats(request, target, limits))


def _fill(maker: ShardMaker, plan: DrawPlan, generator: BatchGenerator, stop_at: float, tell: Progress) -> None:
    """Generate until there is enough, or until the time is over."""
    n_planned = maker.n_stored_draws
    while not maker.is_enough and time.perf_counter() < stop_at:
        _require_progress(maker)
        n_next = min(generator.room, generator.seats, _draws_to_expect(maker) - n_planned)
        if n_next > 0:
            generator.give(plan.take(n_next))
            n_planned += n_next
        generator.run(_RUN_STEPS)
        maker.add(generator.collect(keep_running=1))
        tell("generating", min(maker.n_answer_tokens / maker.asked.answer_tokens, 1.0))


def _require_progress(maker: ShardMaker) -> None:
    if maker.n_stored_draws >= _HOPELESS_SHARDS * maker.asked.shard_draws and not maker.n_answer_tokens:
        reasons = ", ".join(f"{name}: {count}" for name, count in maker.facts.n_left_out.items())
        raise UserError(
            f"nothing that the target wrote could be kept ({reasons})",
            "look at the prompts and at what is excluded, then give another folder",
        )


def _draws_to_expect(maker: ShardMaker) -> int:
    """Draws that will do, in whole shards, judged by those that are stored; without any, no end is in sight."""
    asked, stored = maker.asked, maker.n_stored_draws
    missing = asked.answer_tokens - maker.n_answer_tokens
    a_draw = maker.n_answer_tokens / stored if stored and maker.n_answer_tokens else 1.0
    shards = -(-int(missing / a_draw) // asked.shard_draws)
    return stored + (max(shards, 0) + 1) * asked.shard_draws


def _check_context(request: DataRequest, config: TargetConfig) -> None:
    tokens = request.max_prompt_tokens + request.max_answer_tokens
    if tokens > config.max_positions:
        raise UserError(
            f"prompts of {request.max_prompt_tokens} and answers of {request.max_answer_tokens} tokens are beyond the "
            f"target's context of {config.max_positions}",
            "lower --max-prompt or --max-answer",
        )


def _read_evaluation(request: DataRequest) -> tuple[EvaluationText, list[EvaluationFile]]:
    texts, files = [], []
    for file in request.exclude:
        rows = list(read_prompt_file(file))
        if bad := next((row for row in rows if isinstance(row, BadRow)), None):
            raise UserError(str(bad), "correct or remove the row: what cannot be read cannot be kept out")
        texts += [row.text for row in rows if not isinstance(row, BadRow)]
        files.append(EvaluationFile(name=file.name, sha256=file_sha256(file), n_rows=len(rows)))
    return EvaluationText(texts, request.allowed), files


def _endings(form: TurnForm | None, pool: PromptPool, request: DataRequest) -> list[list[int]]:
    """For each source, the tokens after a turn that the target completes; none without a chat template."""
    if form is None or not form.is_chat:
        return [[] for _ in pool.sources]
    endings = [form.end(source.ending) for source in pool.sources]
    longest = max(map(len, endings)) + max(len(form.begin([source.beginning])[0]) for source in pool.sources)
    if longest >= request.max_prompt_tokens:
        raise UserError(
            f"{longest} tokens stand around a turn before it says anything, prompts may have "
            f"{request.max_prompt_tokens}",
            "raise --max-prompt",
        )
    return endings


def _asked(request: DataRequest, pool: PromptPool, excluded: list[EvaluationFile], dtype: torch.dtype) -> DataAsked:
    same = {name: getattr(request, name) for name in DataAsked.model_fields.keys() & vars(request).keys()}
    return DataAsked(
        **same
        | {
            "prompts": [source.facts for source in pool.sources],
            "excluded": excluded,
            "allowed": list(request.allowed),
            "dtype": str(dtype).removeprefix("torch."),
        }
    )


def _seats(request: DataRequest, target: Target, limits: Limits) -> int:
    a_seat = seat_bytes(target, limits)
    affordable = int(free_memory_bytes(target.device) * _MEMORY_SHARE) // a_seat
    wanted = request.seats or min(GPU_SEATS if target.device.type == "cuda" else CPU_SEATS, max(affordable, 1))
    if wanted > affordable:
        raise UserError(
            f"{wanted} conversations at a time need {wanted * a_seat / 2**30:.1f} GiB, "
            f"{affordable * a_seat / 2**30:.1f} GiB may be used",
            "lower --batch, --max-prompt or --max-answer",
        )
    return wanted
