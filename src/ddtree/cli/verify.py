"""``ddtree verify``: evidence that a server does what was declared."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ddtree.cli.output import ProgressLine, note, print_json, result_console
from ddtree.cli.verify_target import Declared, Target, resolve
from ddtree.errors import UserError
from ddtree.verify import Options, Verdict, Verification
from ddtree.verify.finding import unknown
from ddtree.verify.log_tail import tail_of_file, tail_of_unit
from ddtree.verify.report import summary, table
from ddtree.verify.timer import render_timer


def verify(
    target: Annotated[str, typer.Argument(metavar="URL|FILE", help="http://HOST:PORT, or a deployment file (.toml).")],
    declared: Declared,
    url: Annotated[
        str | None, typer.Option(help="Where a deployment's service answers, if not at its host and port.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with a key of the server, one line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all evidence of what is proven.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Whatever cannot be checked counts, also what nobody declared.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, metavar="S", help="Longest wait for one short answer.")] = 120.0,
    probe_tokens: Annotated[int, typer.Option(min=8, metavar="N", help="Tokens of each probing answer.")] = 64,
    long_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Longest prompt that is tried; 0 leaves it out.")
    ] = 4096,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Requests at once; 1 leaves it out.")] = 4,
    speed_tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Slower than this share of the baseline is a violation.")
    ] = 0.6,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Compare with the first proven run, and keep it.")
    ] = True,
    new_baseline: Annotated[
        bool, typer.Option("--new-baseline", help="Take this run as the baseline, if it is proven.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The engine's log, where it tells more than its pages.")
    ] = None,
    watch: Annotated[
        float | None, typer.Option(min=1, metavar="S", help="Verify again S seconds after each run, until Ctrl-C.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus gauges on this port (with --watch).")
    ] = None,
    metrics_address: Annotated[str, typer.Option(help="Address of the gauges.")] = "127.0.0.1",
    textfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write gauges for node_exporter's textfile collector.")
    ] = None,
    render_timer_units: Annotated[
        bool, typer.Option("--render-timer", help="Print a systemd service and timer for this command, and stop.")
    ] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="Time between two runs of the timer.")] = "10min",
) -> None:
    """Prove that a server does what was declared; a ping cannot.

    Exit code 0: proven. 1: violated. 3: could not be checked. 2: bad input.
    """
    if metrics_port is not None and watch is None:
        raise UserError("--metrics-port serves nothing after the run", "add --watch S, or use --textfile FILE")
    if new_baseline and not baseline:
        raise UserError("--new-baseline and --no-baseline contradict each other", "leave one of them out")
    found = resolve(target, url, declared)
    if render_timer_units:
        _print_timer(target, found, api_key_file, textfile, every)
        return
    key = found.key(api_key_file)
    if found.exposes(key):
        note(f"the key goes to {found.url} unencrypted: use https, or name a deployment file with an ssh host")
    read_log = partial(tail_of_unit, found.unit) if found.unit is not None else None
    if log is not None:
        tail_of_file(log)  # refused now, not in the middle
        read_log = partial(tail_of_file, log)
    options = Options(
        answer_timeout_s=timeout,
        info_timeout_s=min(15.0, timeout),
        probe_tokens=probe_tokens,
        long_tokens=long_tokens,
        concurrency=concurrency,
        speed_tolerance=speed_tolerance,
        baseline=baseline,
        log=read_log,
    )

    def once(is_first: bool) -> Verdict:
        with ProgressLine() as progress, found.way() as way:
            return Verification(
                way.url,
                found.expectation,
                replace(options, read=way.read),
                key=key,
                is_strict=strict,
                new_baseline=new_baseline and is_first,
                name=found.url if found.tunnel else None,
                tell=progress,
            ).run()

    def attempt(is_first: bool) -> Verdict:
        from ddtree.deploy.host import HostError

        try:
            return once(is_first)
        except HostError as error:
            reach = unknown("reach", "the server can be asked", error.cause, remedy=error.remedy)
            return Verdict(found.url, None, (reach,), 0.0, strict)

    if watch is not None:
        _watch(attempt, watch, as_json, metrics_address, metrics_port, textfile)
        return
    verdict = attempt(True)
    _print(verdict, as_json, verbose)
    if textfile is not None:
        _gauges_file(verdict, textfile)
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


def _print(verdict: Verdict, as_json: bool, verbose: bool) -> None:
    if as_json:
        print_json(verdict.to_json())
        return
    console = result_console()
    console.print(table(verdict, is_verbose=verbose))
    console.print(summary(verdict), markup=False, soft_wrap=True)


def _gauges_file(verdict: Verdict, textfile: Path) -> None:
    from ddtree.verify.gauges import Gauges

    gauges = Gauges()
    gauges.set(verdict)
    gauges.write(textfile)


def _watch(
    once: Callable[[bool], Verdict],
    interval_s: float,
    as_json: bool,
    address: str,
    port: int | None,
    textfile: Path | None,
) -> None:
    from ddtree.verify.gauges import Gauges

    gauges = Gauges()
    if port is not None:
        note(f"gauges at http://{address}:{gauges.serve(address, port)}/metrics")
    is_first = True
    while True:
        verdict = once(is_first)
        is_first = False
        gauges.set(verdict)
        if textfile is not None:
            gauges.write(textfile)
        if as_json:
            print_json(verdict.to_json())
        else:
            console = result_console()
            console.print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {summary(verdict)}", markup=False, soft_wrap=True)
            if verdict.exit_code:
                console.print(table(verdict, is_verbose=False))
        time.sleep(interval_s)


def _print_timer(target: str, found: Target, key_file: Path | None, textfile: Path | None, every: str) -> None:
    """The same command as it stands, but for the flags of the timer itself, with paths from the root.

    Raises:
        UserError: the timer's user would have no way to the server, or to its key.
    """
    if found.tunnel:
        raise UserError(
            "the server is on another machine, and the timer's user has no SSH keys",
            "render the timer on that machine, or give --url",
        )
    if key_file is None and found.secret is not None:
        if found.secret.file is None:
            raise UserError(
                f"the key is in the variable {found.secret.env}, which a timer does not have",
                "write it to a file, and give --api-key-file FILE",
            )
        key_file = Path(found.secret.file)
    skipped = {"--every", "--api-key-file", "--log", "--textfile"}
    arguments = iter(sys.argv[1:])
    words: list[str] = []
    for word in arguments:
        flag = word.split("=", 1)[0]
        if flag == "--render-timer":
            continue
        if flag in skipped:
            value = word.split("=", 1)[1] if "=" in word else next(arguments, "")
            if flag in ("--log", "--textfile"):
                words += [flag, os.path.abspath(value)]
            continue
        words.append(os.path.abspath(word) if word == target and Path(word).is_file() else word)
    name = Path(target).stem if Path(target).is_file() else urlsplit(target).netloc or target
    program = [sys.executable, "-m", "ddtree"]
    units = render_timer(
        name,
        [*program, *words],
        every=every,
        key_file=os.path.abspath(key_file) if key_file else None,
        writes=[os.path.dirname(os.path.abspath(textfile))] if textfile else [],
    )
    for ending, text in (("service", units.service), ("timer", units.timer)):
        print(f"# /etc/systemd/system/{units.name}.{ending}\n{text}")
