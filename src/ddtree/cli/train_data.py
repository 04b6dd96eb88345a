"""``ddtree train data`` and ``ddtree train evaluate``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ddtree.cli.loading import import_engine
from ddtree.cli.options import Dtype, draft_temperature_option
from ddtree.cli.output import ProgressLine, note, print_json, result_console
from ddtree.demo import drafter_folder, target_folder
from ddtree.errors import UserError
from ddtree.plain_text import printable

if TYPE_CHECKING:
    from ddtree.train.acceptance import Acceptance, Evaluation, Plan
    from ddtree.train.data_facts import DataFacts
    from ddtree.train.generate import DataReport

_ModelOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Target: a Hugging Face folder. Without it, the demo's SmolLM2.")
]


class OnBadRow(StrEnum):
    """What to do with a row of prompts that is no use."""

    skip = "skip"
    refuse = "refuse"


class Loops(StrEnum):
    """What to do with answers that go round in circles."""

    cut = "cut"
    drop = "drop"
    keep = "keep"


_BadRowOption = Annotated[OnBadRow, typer.Option(help="What to do with a prompt that cannot be used.")]
_DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def data(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write, or to go on with.")],
    prompts: Annotated[
        list[str],
        typer.Option(
            metavar="FILE[:WEIGHT]",
            help='JSON Lines with "turns", "messages" or "prompt"; may be given several times. Weights are shares.',
        ),
    ],
    model: _ModelOption = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Answer tokens wanted.")] = 20_000_000,
    greedy_share: Annotated[float, typer.Option(help="Share of the answers that are greedy.")] = 0.7,
    self_prompt_share: Annotated[
        float,
        typer.Option(help="Share of the user's turns that the target completes from an opening of 0 to 24 words."),
    ] = 0.6,
    temperature_low: Annotated[float, typer.Option(help="What is sampled has a temperature from here ...")] = 0.7,
    temperature_high: Annotated[float, typer.Option(help="... to here.")] = 1.0,
    max_prompt: Annotated[int, typer.Option(metavar="N", help="Longest prompt in tokens.")] = 320,
    max_answer: Annotated[int, typer.Option(metavar="N", help="Longest answer in tokens.")] = 320,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the bare text: no chat template.")] = False,
    loops: Annotated[Loops, typer.Option(help="What to do with answers that go round in circles.")] = Loops.cut,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Evaluation prompts: nothing that shares 13 words in a row with one is kept."
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A sentence that prompts may share with evaluation prompts."),
    ] = None,
    on_bad_row: _BadRowOption = OnBadRow.refuse,
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Conversations at a time. Default: what fits the device.")
    ] = None,
    shard: Annotated[
        int, typer.Option(metavar="N", help="Conversations of a shard, which is what a crash can cost.")
    ] = 1024,
    stop_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop then; the same command goes on later.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, other conversations.")] = 0,
    device: _DeviceOption = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Arithmetic of the target.")] = Dtype.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Have the target write the text that its drafter will be trained on.

    It answers the prompts, and it completes openings of them into prompts of its own and answers those. What is there
    when the command is interrupted stays, and the same command goes on with it.
    """
    weighted = tuple(map(_with_weight, prompts))
    with ProgressLine() as progress:
        import_engine("train data", progress)
        from ddtree.train.data_request import DataRequest
        from ddtree.train.generate import generate_data

        request = DataRequest(
            model=model or target_folder(progress),
            prompts=weighted,
            out=out,
            answer_tokens=tokens,
            exclude=tuple(exclude or ()),
            allowed=tuple(allow or ()),
            greedy_share=greedy_share,
            self_prompt_share=self_prompt_share,
            temperature_low=temperature_low,
            temperature_high=temperature_high,
            max_prompt_tokens=max_prompt,
            max_answer_tokens=max_answer,
            chat=not no_chat,
            loops=loops.value,
            on_bad_row=on_bad_row.value,
            seed=seed,
            shard_draws=shard,
            seats=batch,
            stop_after_s=stop_after,
            device=device,
            dtype=dtype.value,
        )
        report = generate_data(request, progress)
    if as_json:
        print_json(_figures(report))
    else:
        _tell_data(report, out)


def evaluate(
    prompts: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Prompts in JSON Lines; may be given several times.")
    ],
    model: _ModelOption = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="DIR", help="DFlash drafter. Without --model, the demo's if none is given.")
    ] = None,
    budgets: Annotated[
        str, typer.Option(metavar="LIST", help="Drafts to try: chain, and budgets of trees.")
    ] = "chain,8,16,32,64,128",
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer, in tokens.")] = 256,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N prompts of each file.")] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts answered at the same time.")] = 32,
    on_bad_row: _BadRowOption = OnBadRow.refuse,
    draft_temperature: Annotated[
        float | None,
        draft_temperature_option(
            "Build trees at this one instead of the drafter's own; --keep makes it the drafter's."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Write expected_tau.json beside the drafter, and its card anew.")
    ] = False,
    device: _DeviceOption = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Arithmetic of both models.")] = Dtype.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Measure a drafter's acceptance length (tau) by set of prompts and by draft.

    Answers are greedy, and come from the engine that serves them. Tau is the number of tokens that a round commits, the
    bonus token included. Which draft temperature is best is found by trying several, one run each.
    """
    plans = _read_plans(budgets)
    if model is not None and draft is None:
        raise UserError("--model is given, but no drafter", "add --draft DIR")
    if draft_temperature is not None and set(plans) == {"chain"}:
        raise UserError("--draft-temperature does not apply to a chain", "leave it out, or add trees to --budgets")
    if keep and draft is None:
        raise UserError(
            "--keep would change the installed demo", "add --draft DIR, such as a copy of the demo's drafter"
        )
    with ProgressLine() as progress:
        import_engine("train evaluate", progress)
        from ddtree.train.acceptance import (
            EvaluationRequest,
            evaluate_drafter,
            keep_draft_temperature,
            keep_expected_tau,
        )
        from ddtree.train.card import rewrite_card

        folder = draft or drafter_folder()
        request = EvaluationRequest(
            model=model or target_folder(progress),
            draft=folder,
            prompts=tuple(prompts),
            plans=plans,
            max_new_tokens=max_new_tokens,
            count=count,
            batch=batch,
            device=device,
            dtype=dtype.value,
            on_bad_row=on_bad_row.value,
            draft_temperature=draft_temperature,
        )
        evaluation = evaluate_drafter(request, progress)
    if as_json:
        tau = {"tau": [round(row.tau, 4) for row in evaluation.rows]}
        print_json(evaluation.model_dump(mode="json") | tau)
    else:
        _tell_evaluation(evaluation)
    for remark in evaluation.notes:
        note(f"note: {remark}")
    if keep:  # last, so that a folder that cannot be written costs no figures
        if draft_temperature is not None:
            keep_draft_temperature(folder, draft_temperature)
        keep_expected_tau(folder, evaluation)
        rewrite_card(folder)


def _with_weight(given: str) -> tuple[Path, float]:
    """``FILE`` or ``FILE:WEIGHT``; a file whose own name ends so is taken for what it is."""
    path, colon, weight = given.rpartition(":")
    if not colon or Path(given).is_file():
        return Path(given), 1.0
    try:
        return Path(path), float(weight)
    except ValueError:
        raise UserError(f"{given} is no file, and {weight!r} no weight", "write FILE or FILE:WEIGHT") from None


def _read_plans(budgets: str) -> tuple[Plan, ...]:
    plans: list[Plan] = []
    for word in budgets.replace(",", " ").split():
        if word != "chain" and not (word.isascii() and word.isdigit()):
            raise UserError(f"--budgets names {word!r}", "give chain and numbers, such as chain,8,64")
        plans.append("chain" if word == "chain" else int(word))
    if not plans:
        raise UserError("--budgets is empty", "give chain and numbers, such as chain,8,64")
    return tuple(plans)


def _figures(report: DataReport) -> dict[str, object]:
    facts = report.facts
    return {
        "is_finished": facts.is_finished,
        "conversations": facts.n_conversations,
        "greedy": facts.n_greedy,
        "tokens": facts.n_tokens,
        "answer_tokens": facts.n_answer_tokens,
        "by_source": facts.n_by_source,
        "cut": facts.n_cut,
        "left_out": facts.n_left_out,
        "bad_rows": facts.n_bad_rows,
        "evaluation_prompts": facts.n_evaluation_prompts,
        "new_answer_tokens": report.new_answer_tokens,
        "seconds": round(report.seconds, 3),
        "answer_tok_s": round(report.new_answer_tokens / report.seconds, 1) if report.seconds else None,
        "seats": report.seats,
    }


def _tell_data(report: DataReport, out: Path) -> None:
    facts = report.facts
    console = result_console()
    share = facts.n_greedy / facts.n_conversations if facts.n_conversations else 0.0
    console.print(
        f"{facts.n_conversations:,} conversations, {share:.0%} of them greedy, {facts.n_tokens:,} tokens, "
        f"{facts.n_answer_tokens:,} of answers",
        markup=False,
        soft_wrap=True,
    )
    for what, counts in (("from", facts.n_by_source), ("left out", _left_out(facts))):
        for name, count in counts.items():
            console.print(f"  {what} {printable(name)}: {count:,}", markup=False, soft_wrap=True)
    for bad in facts.bad_rows:
        note(f"skipped {printable(bad)}")
    if report.seconds:
        rate = report.new_answer_tokens / report.seconds
        note(f"[{report.seconds:.1f} s, {rate:,.0f} answer tok/s, {report.seats} at a time]")
    if not facts.is_finished:
        missing = facts.asked.answer_tokens - facts.n_answer_tokens
        note(f"{missing:,} answer tokens are missing in {out}; the same command goes on")
        if not report.new_answer_tokens:
            note("no shard was finished in that time: give it more, or give another folder and a smaller --shard")


def _left_out(facts: DataFacts) -> dict[str, int]:
    others = {"loop, cut there": facts.n_cut, "prompt that shares 13 words": facts.n_evaluation_prompts}
    return {name: n for name, n in (facts.n_left_out | others | {"bad row": facts.n_bad_rows}).items() if n}


def _tell_evaluation(evaluation: Evaluation) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("prompts")
    table.add_column("number", justify="right")
    sets: dict[str, list[Acceptance]] = {}
    for row in evaluation.rows:
        sets.setdefault(row.data_set, []).append(row)
    for plan in dict.fromkeys(row.plan for row in evaluation.rows):
        table.add_column(str(plan), justify="right")
    for name, rows in sets.items():
        table.add_row(name, str(rows[0].n_prompts), *(f"{row.tau:.2f}" for row in rows))
    result_console().print(table)
    how = f"draft temperature {evaluation.draft_temperature:g}, {evaluation.dtype} on {evaluation.device}"
    note(f"[tau, {how}; {evaluation.seconds:.1f} s]")
