"""``ddtree kit restore``: a sealed service brought back to life."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree.cli.kit_report import tell_restored, tell_steps
from ddtree.cli.output import ProgressLine
from ddtree.errors import UserError

EXIT_NOT_SO = 1
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Kit = Annotated[Path, typer.Argument(metavar="KIT", help="A folder, a .tar.zst or a .zip.", show_default=False)]


def restore_command(
    kit: Kit,
    plan: Annotated[bool, typer.Option("--plan", help="Show every step, and change nothing.")] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Key of the deployment file that is another one here, with a TOML value: host.kind='\"ssh\"'.",
        ),
    ] = None,
    deployment: Annotated[str | None, typer.Option(metavar="NAME", help="Which, where the kit has several.")] = None,
    wheels: Annotated[Path | None, typer.Option(metavar="DIR", help="Wheels of packages that no index has.")] = None,
    keep_environment: Annotated[
        bool, typer.Option("--keep-environment", help="Accept an engine's environment that is not as sealed.")
    ] = False,
    ignore_faults: Annotated[
        bool, typer.Option("--ignore-faults", help="Go on although doctor finds that a start would fail.")
    ] = False,
    no_canary: Annotated[bool, typer.Option("--no-canary", help="Measure nothing at the end.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", min=1, help="Longest wait for the first completion. Default: the file's."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the canary's results here.")] = None,
    probe_tokens: Annotated[int, typer.Option(min=8, metavar="N", help="As of ddtree verify.")] = 64,
    long_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="As of ddtree verify.")] = 4096,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="As of ddtree verify.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Bring a kit's service to life on this machine or another, and state how it compares with what was sealed.

    Broken off, it is simply run again. Exit 0: as sealed. 1: it runs, and is not; or did not come up, and was taken
    back. 2: a step is refused.
    """
    from ddtree.cli.deploy_report import tell_failed
    from ddtree.deploy.apply import ApplyError
    from ddtree.kit.open_kit import whole_kit
    from ddtree.kit.restore import RestoreOptions, plan_restore, restore
    from ddtree.verify import Options

    if wheels is not None and not wheels.is_dir():
        raise UserError(f"there is no folder {wheels}", "give --wheels a folder with .whl files")
    options = RestoreOptions(
        place=deployment,
        changes=dict(_change(text) for text in change or ()),
        wheels=tuple(sorted(wheels.glob("*.whl"))) if wheels else (),
        keep_environment=keep_environment,
        ignore_faults=ignore_faults,
        with_canary=not no_canary,
        timeout_s=timeout,
        out=out,
        verify=Options(baseline=False, probe_tokens=probe_tokens, long_tokens=long_tokens, concurrency=concurrency),
    )
    with whole_kit(kit) as (payload, record):
        if plan:
            steps = plan_restore(payload, record, options)
            tell_steps(steps, as_json)
            if any(step.state == "refused" for step in steps):
                raise typer.Exit(EXIT_NOT_SO)
            return
        try:
            with ProgressLine() as progress:
                done = restore(payload, record, options, lambda stage: progress(stage, 0.0))
        except ApplyError as error:
            tell_failed(error, as_json)
            raise typer.Exit(EXIT_NOT_SO) from None
    tell_restored(done, as_json)
    if not done.is_as_sealed:
        raise typer.Exit(EXIT_NOT_SO)


def _change(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` with a TOML value; a word without quotes is text."""
    import tomllib

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set is {text[:80]!r}", "write KEY=VALUE, such as service.port=8001")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        if value and not set(value) & set("\"'[]{}\n"):
            return key.strip(), value
        raise UserError(f"--set {key}: {value[:80]!r} is no TOML value", "quote text, as in KEY='\"text\"'") from None
