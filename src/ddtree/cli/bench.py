"""``ddtree bench``: measure a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree.bench.endpoint import clean_url
from ddtree.bench.numbers import cell_numbers
from ddtree.bench.padding import read_pad_text
from ddtree.bench.plan import Load, Matrix, parse_variant
from ddtree.bench.result_folder import read_requests, read_units
from ddtree.bench.run import RunOptions, run_bench
from ddtree.bench.workload import read_workload
from ddtree.cli.bench_progress import BenchProgress, numbers_table
from ddtree.cli.options import whole_number
from ddtree.cli.output import note, result_console
from ddtree.errors import UserError


def bench(
    workload: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]FILE|hub:NAME",
            help="Prompts: a JSONL file with turns, or hub:gsm8k, math500, "
            "humaneval, mbpp, mt-bench. May be given several times.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results.")],
    base_url: Annotated[str, typer.Option(metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    context: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Context lengths in tokens, reached by real text in front; as-is: the prompts as they are.",
        ),
    ] = "as-is",
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests at the same time.")] = "1",
    temperature: Annotated[str, typer.Option(metavar="T,...", help="Temperatures.")] = "0",
    variant: Annotated[
        str,
        typer.Option(
            metavar="V,...",
            help="server, or on ddtree's own server ar, chain[:N], tree[:BUDGET[:TOPK]], set with each request.",
        ),
    ] = "server",
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions of each cell.")] = 3,
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Conversations of a repetition. Default: 4 a slot, at least 8."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use the first N prompts of each file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Longest answer.")] = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers go on to --max-tokens.")] = False,
    unique_prefix: Annotated[
        bool, typer.Option("--unique-prefix", help="Begin each prompt with words of its own: no prefix cache helps.")
    ] = False,
    pad_text: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Text file or folder that fills contexts. Default: the prompts.")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, metavar="N", help="Requests of each cell before, not kept.")] = 2,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order of cells, and of sampling.")] = 0,
    request_timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Longest answer, in seconds.")] = 600.0,
    stall_timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Longest pause within an answer.")] = 60.0,
    api: Annotated[str, typer.Option(metavar="chat|completions", help="Which of the two endpoints.")] = "chat",
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Where the server has several.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Its first line is shown as a key.")] = None,
    deployment: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Deployment file of the server, kept with the results.")
    ] = None,
    label: Annotated[str, typer.Option(metavar="TEXT", help="Name of this run. Default: the folder's.")] = "",
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Keep the answers' text in the rows.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")] = False,
) -> None:
    """Measure an OpenAI-compatible server over a matrix of contexts, concurrencies, temperatures and variants.

    Every request is kept as a row, every repetition is on disk before the next begins. Ctrl-C keeps what is done.
    """
    if api not in ("chat", "completions"):
        raise UserError(f"--api is {api!r}", "choose chat or completions")
    matrix = Matrix(
        workloads=tuple(read_workload(spec, limit=limit) for spec in workload),
        contexts=tuple(None if part == "as-is" else _count("--context", part) for part in _parts("--context", context)),
        concurrencies=tuple(_count("--concurrency", part) for part in _parts("--concurrency", concurrency)),
        temperatures=tuple(_temperature(part) for part in _parts("--temperature", temperature)),
        variants=tuple(parse_variant(part) for part in _parts("--variant", variant)),
    )
    load = Load(
        repetitions=repeats,
        requests=requests,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        seed=seed,
        warm_up_requests=warm_up,
        unique_prefix=unique_prefix,
        request_timeout_s=request_timeout,
        stall_timeout_s=stall_timeout,
        keep_text=keep_text,
        api=api,
    )
    options = RunOptions(
        url=clean_url(base_url),
        folder=out,
        matrix=matrix,
        load=load,
        api_key=read_key(api_key_file),
        model=model,
        label=label,
        pad_text=read_pad_text(pad_text) if pad_text else None,
        deployment=deployment,
        resume=resume,
    )
    try:
        with BenchProgress() as progress:
            run_bench(options, progress.watcher())
    except KeyboardInterrupt:
        note(f"what is done is in {out}; go on with --resume")
        raise
    result_console().print(numbers_table(cell_numbers(read_units(out), read_requests(out))))
    note(f"rows are in {out}; for plots and a recommendation: ddtree report {out}")


def read_key(file: Path | None) -> str | None:
    """The first line of a key file."""
    if file is None:
        return None
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the key file {file}", "give --api-key-file a text file") from error
    if not lines or not lines[0]:
        raise UserError(f"the key file {file} holds no key", "write it on the first line")
    return lines[0]


def _parts(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{flag} is {text!r}", "write values with commas between them")
    return parts


def _count(flag: str, text: str) -> int:
    number = whole_number(text)
    if not number:
        raise UserError(f"{flag} has {text!r}", "write whole numbers from 1")
    return number


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise UserError(f"--temperature has {text!r}", "write numbers from 0 to 100")
    return value
