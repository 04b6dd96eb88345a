"""``ddtree deploy``: a service from one file, onto its host and back off it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ddtree.cli.deploy_report import (
    Waiting,
    print_rendered,
    print_rendered_json,
    state_in_words,
    tell_applied,
    tell_failed,
)
from ddtree.cli.output import note, print_json, result_console
from ddtree.plain_text import printable

if TYPE_CHECKING:
    from ddtree.deploy.apply import Applied
    from ddtree.deploy.deployment import Deployment
    from ddtree.deploy.progress import Tell
    from ddtree.deploy.render import Rendered
    from ddtree.deploy.unit_check import UnitCheck

EXIT_NOT_SO = 1

deploy_app = typer.Typer(no_args_is_help=True, help="Put a service on a host from one file, and wait until it answers.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="Deployment file.", show_default=False)]
Timeout = Annotated[
    float | None, typer.Option(metavar="S", min=1, help="Longest wait for the first completion. Default: the file's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@deploy_app.command("render")
def render_command(
    file: File,
    unit: Annotated[bool, typer.Option("--unit", help="Print the systemd unit alone.")] = False,
    command: Annotated[bool, typer.Option("--command", help="Print the command line alone, quoted for sh.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what the file comes to: command line, systemd unit, and where secrets would go.

    The unit is read by systemd-analyze verify where this machine has it; exit 1 if that complains.
    """
    if unit + command + as_json > 1:
        raise typer.BadParameter("--unit, --command and --json exclude each other")
    from ddtree.deploy.deployment import load_deployment
    from ddtree.deploy.render import render

    deployment = load_deployment(file)
    rendered = render(deployment)
    if unit and rendered.unit is None:
        raise typer.BadParameter('--unit with service.supervisor = "process", which has none')
    check = _check(deployment, rendered)
    if as_json:
        print_rendered_json(rendered, check)
    elif unit:
        print(rendered.unit, end="")
    elif command:
        print(shlex.join(rendered.command))
    else:
        print_rendered(rendered)
    if check and check.unchecked:
        note(f"the unit was not checked: {check.unchecked}")
    elif check and check.complaints:
        for complaint in check.complaints:
            note(f"systemd: {complaint}")
        raise typer.Exit(EXIT_NOT_SO)
    elif check:
        note("systemd-analyze verify has no complaint")


@deploy_app.command("diff")
def diff_command(file: File) -> None:
    """Compare what is installed on the host with what the file comes to; exit 1 where they differ."""
    from ddtree.deploy.apply import open_site
    from ddtree.deploy.deployment import load_deployment
    from ddtree.deploy.difference import difference

    with open_site(load_deployment(file)) as site:
        found = difference(site)
    if found.is_absent:
        note("nothing is installed yet")
    for line in found.lines:
        print(printable(line))
    if found.lines:
        raise typer.Exit(EXIT_NOT_SO)
    note("no difference")


@deploy_app.command("apply")
def apply_command(
    file: File,
    reason: Annotated[str, typer.Option("--note", metavar="TEXT", help="Kept in the history.")] = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Upload, swap, start, and wait for a completion of the new process; on failure, go back to the last good release.

    Exit 0: it answers. 1: it did not, and the host was brought back. 2: nothing was changed.
    """
    from ddtree.deploy.apply import apply
    from ddtree.deploy.deployment import load_deployment

    deployment = load_deployment(file)
    _attempt(lambda tell: apply(deployment, note=reason, timeout_s=timeout, tell=tell), as_json)


@deploy_app.command("rollback")
def rollback_command(
    file: File,
    to: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of the release. See: history.")] = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier release, as it was rendered then. Exit codes as of apply."""
    from ddtree.deploy.apply import rollback
    from ddtree.deploy.deployment import load_deployment

    deployment = load_deployment(file)
    _attempt(lambda tell: rollback(deployment, to=to, timeout_s=timeout, tell=tell), as_json)


@deploy_app.command("status")
def status_command(file: File, as_json: AsJson = False) -> None:
    """Tell how the service is; exit 1 unless its process runs and holds the port."""
    from ddtree.deploy.apply import open_site
    from ddtree.deploy.deployment import load_deployment
    from ddtree.deploy.status import look

    with open_site(load_deployment(file)) as site:
        seen = look(site)
    if as_json:
        print_json(asdict(seen) | {"is_up": seen.is_up})
    else:
        for name, value in seen.lines():
            print(f"{name:<10} {printable(value)}")
    if not seen.is_up:
        raise typer.Exit(EXIT_NOT_SO)


@deploy_app.command("logs")
def logs_command(
    file: File,
    lines: Annotated[int, typer.Option("-n", "--lines", metavar="N", min=1, help="How many lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with lines as they come, until Ctrl-C.")
    ] = False,
) -> None:
    """Print the end of the service's log."""
    from ddtree.deploy.apply import open_site
    from ddtree.deploy.deployment import load_deployment

    with open_site(load_deployment(file)) as site:
        if not follow:
            print(site.supervisor.tail(lines), end="")
            return
        for line in site.supervisor.follow():
            print(line, flush=True)


@deploy_app.command("stop")
def stop_command(file: File) -> None:
    """Stop the service; it stays in place until it is applied again or the host boots."""
    from ddtree.deploy.apply import stop
    from ddtree.deploy.deployment import load_deployment

    state = stop(load_deployment(file))
    print(state.status if state.status != "failed" else f"stopped; before that: {state.detail}")


@deploy_app.command("history")
def history_command(file: File, as_json: AsJson = False) -> None:
    """List the releases on the host, oldest first."""
    from ddtree.deploy.apply import history
    from ddtree.deploy.deployment import load_deployment

    releases = history(load_deployment(file))
    if as_json:
        print_json({"releases": [asdict(one) for one in releases]})
        return
    if not releases:
        note("nothing was applied yet")
        return
    table = Table("", "when (UTC)", "state", "ready after", "by", "note", box=None, pad_edge=False)
    for one in releases:
        waited = "" if one.ready_s is None else f"{one.ready_s:.1f} s"
        table.add_row(
            str(one.number),
            one.begun[:19].replace("T", " "),
            state_in_words(one),
            waited,
            escape(printable(one.by)),
            escape(printable(one.note)),
        )
    result_console().print(table)


@deploy_app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a deployment file."""
    from ddtree.deploy.deployment import json_schema

    print(json.dumps(json_schema(), indent=2))


def _check(deployment: Deployment, rendered: Rendered) -> UnitCheck | None:
    from ddtree.deploy.local_host import LocalHost
    from ddtree.deploy.unit_check import check_unit

    if rendered.unit is None or rendered.unit_name is None:
        return None
    is_here = deployment.host.kind == "local"
    return check_unit(LocalHost("none"), rendered.unit_name, rendered.unit, is_its_host=is_here)


def _attempt(attempt: Callable[[Tell], Applied], as_json: bool) -> None:
    from ddtree.deploy.apply import ApplyError

    try:
        with Waiting() as tell:
            applied = attempt(tell)
    except ApplyError as error:
        tell_failed(error, as_json)
        raise typer.Exit(EXIT_NOT_SO) from None
    tell_applied(applied, as_json)
