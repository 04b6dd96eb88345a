"""``ddtree kit``: what was measured and on what, sealed, checked anywhere, and brought back to life."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ddtree.cli.output import ProgressLine, note, print_json, result_console
from ddtree.errors import UserError
from ddtree.extras import require_extra

if TYPE_CHECKING:
    from ddtree.kit.check import CheckResult
    from ddtree.kit.record import KitRecord
    from ddtree.kit.restore import Restored
    from ddtree.kit.step import Step

EXIT_NOT_SO = 1

kit_app = typer.Typer(no_args_is_help=True, help="Seal what was measured, check it anywhere, restore it elsewhere.")

Kit = Annotated[Path, typer.Argument(metavar="KIT", help="A folder, a .tar.zst or a .zip.", show_default=False)]
Folder = Annotated[Path, typer.Argument(metavar="KIT", help="A kit that is a folder.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Extra = Annotated[
    list[Path] | None,
    typer.Option(metavar="PATH", help="Scripts, sweep files, prompts: go to bench/. May be given several times."),
]
Results = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="Results of bench or sweep. May be given several times.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse where a secret is found, instead of masking it.")]


@kit_app.command("create")
def create_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Deployment files of live services.")],
    out: Annotated[
        Path,
        typer.Option(metavar="KIT", help="The kit: a folder, or a name with .tar.zst or .zip.", show_default=False),
    ],
    results: Results = None,
    extra: Extra = None,
    wheel: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="The engine's wheel as released. Default: pip's, there.")
    ] = None,
    with_drafter: Annotated[bool, typer.Option("--with-drafter", help="Put the drafter's weights in too.")] = False,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Do not let the hosts' pip ask its index for wheels and their hashes.")
    ] = False,
    even_if_failing: Annotated[
        bool, typer.Option("--even-if-failing", help="Seal a service that is not proven to do what it declares.")
    ] = False,
    strict: Strict = False,
    git: Annotated[bool, typer.Option("--git", help="Commit the kit; the message carries the verdict.")] = False,
    about: Annotated[str, typer.Option("--note", metavar="TEXT", help="Kept in the kit's guide.")] = "",
    probe_tokens: Annotated[int, typer.Option(min=8, metavar="N", help="As of ddtree verify.")] = 64,
    long_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="As of ddtree verify.")] = 4096,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="As of ddtree verify.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Capture live services and their results, verify, mask secrets, and seal it all.

    Exit 0: the kit is there. 2: it is not, and nothing is left of it.
    """
    require_extra("kit", "ddtree kit create")
    from ddtree.kit.capture import CaptureOptions, read_source
    from ddtree.kit.create import CreateOptions, create
    from ddtree.kit.git_commit import commit_kit, require_repository
    from ddtree.kit.pack import ending_of, pack, require_zstandard
    from ddtree.kit.wheel import wheel_of_file
    from ddtree.verify import Options

    ending = ending_of(out)
    folder = out if ending is None else out.with_name(out.name.removesuffix(ending))
    if ending and git:
        raise UserError("--git commits a folder", "give --out a name without an ending of an archive")
    if ending and out.exists():
        raise UserError(f"{out} is there already", "give another place, or move it away")
    if ending == ".tar.zst":
        require_zstandard()
    if git:
        require_repository(folder)
    options = CreateOptions(
        out=folder,
        sources=tuple(read_source(file) for file in files),
        results=tuple(results or ()),
        extras=tuple(extra or ()),
        note=about,
        even_if_failing=even_if_failing,
        is_strict=strict,
        capture=CaptureOptions(
            wheels=tuple(wheel_of_file(each) for each in wheel or ()),
            with_drafter=with_drafter,
            hashes=not no_index,
            verify=Options(baseline=False, probe_tokens=probe_tokens, long_tokens=long_tokens, concurrency=concurrency),
        ),
    )
    with ProgressLine() as progress:
        made = create(options, lambda stage: progress(stage, 0.0))
        if ending:
            progress("packing", 0.0)
            try:
                pack(folder, out)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    commit = commit_kit(folder, made) if git else None
    _tell_made(made, out, commit, as_json)


@kit_app.command("add")
def add_command(
    kit: Folder,
    results: Results = None,
    extra: Extra = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Add results to a kit and seal it anew; the manifest that it had, and signatures over it, stay inside."""
    require_extra("kit", "ddtree kit add")
    from ddtree.kit.create import add

    if not results and not extra:
        raise UserError("there is nothing to add", "give --results DIR or --extra PATH")
    with ProgressLine() as progress:
        made = add(kit, results or (), extra or (), is_strict=strict, tell=lambda stage: progress(stage, 0.0))
    _tell_made(made, kit, None, as_json)


@kit_app.command("check")
def check_command(
    kit: Kit,
    fast: Annotated[
        bool, typer.Option("--fast", help="Do not read files above 1 MiB; cuts are seen all the same.")
    ] = False,
    signers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="OpenSSH's allowed_signers: somebody in it must have signed the kit."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name everything that is missing, extra, altered, renamed, of another form, or wrongly signed.

    Exit 0: the kit is whole. 1: it is not.
    """
    from ddtree.kit.check import check_folder
    from ddtree.kit.open_kit import as_folder

    if signers is not None and not signers.is_file():
        raise UserError(f"there is no file {signers}", "give --signers a list of allowed signers, see ssh-keygen(1)")
    with ProgressLine() as progress, as_folder(kit) as folder:
        found = check_folder(
            folder,
            is_fast=fast,
            allowed_signers=signers,
            tell=lambda done, total: progress("reading", done / max(1, total)),
        )
    if as_json:
        print_json(found.to_json())
    else:
        _tell_check(kit, found)
    if not found.is_whole:
        raise typer.Exit(EXIT_NOT_SO)


@kit_app.command("show")
def show_command(kit: Kit, as_json: AsJson = False) -> None:
    """Tell what is in a kit; one that does not pass its check is not shown."""
    from ddtree.kit.guide import guide
    from ddtree.kit.open_kit import whole_kit

    with whole_kit(kit) as (payload, record):
        if as_json:
            print_json(record.model_dump(mode="json") | {"verdict": record.verdict})
        else:
            print(guide(record, payload), end="")


@kit_app.command("diff")
def diff_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A kit.", show_default=False)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another one.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Tell what changed in configuration, environment, patches, machine and results; exit 1 where something did."""
    from ddtree.kit.compare import compare_kits, to_json
    from ddtree.kit.open_kit import whole_kit

    with whole_kit(old) as before, whole_kit(new) as after:
        found = compare_kits(before, after)
    if as_json:
        print_json(to_json(found))
    for subject, lines in found.items() if not as_json else ():
        print(subject)
        print(*(f"  {line}" for line in lines), sep="\n")
    if found:
        raise typer.Exit(EXIT_NOT_SO)
    note("no difference")


@kit_app.command("sign")
def sign_command(
    kit: Folder,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private SSH key, or the public half of one in the agent.")],
    as_json: AsJson = False,
) -> None:
    """Sign the kit's manifest with an SSH key (ssh-keygen -Y); several may sign."""
    from ddtree.kit.sign_kit import sign_kit

    fingerprint = sign_kit(kit, key)
    if as_json:
        print_json({"fingerprint": fingerprint})
    else:
        result_console().print(f"signed by {fingerprint}", markup=False)


@kit_app.command("pack")
def pack_command(
    kit: Folder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A name with .tar.zst or .zip.", show_default=False)],
) -> None:
    """Make one file of a kit; the same kit always gives the same bytes."""
    from ddtree.kit.open_kit import whole_kit
    from ddtree.kit.pack import pack

    if not kit.is_dir():
        raise UserError(f"{kit} is no folder", "name a kit that is a folder")
    with whole_kit(kit):
        pack(kit, out)
    note(f"{out}: {out.stat().st_size} bytes")


@kit_app.command("unpack")
def unpack_command(
    archive: Annotated[Path, typer.Argument(metavar="FILE", help="A .tar.zst or .zip.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The kit's folder; must not be there.", show_default=False)],
) -> None:
    """Make a folder of a packed kit; what no kit holds is refused, and nothing is written outside of it."""
    from ddtree.kit.unpack import unpack

    unpack(archive, out)
    note(f"unpacked to {out}; now: ddtree kit check {out}")


@kit_app.command("restore")
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
            _tell_steps(steps, as_json)
            if any(step.state == "refused" for step in steps):
                raise typer.Exit(EXIT_NOT_SO)
            return
        try:
            with ProgressLine() as progress:
                done = restore(payload, record, options, lambda stage: progress(stage, 0.0))
        except ApplyError as error:
            tell_failed(error, as_json)
            raise typer.Exit(EXIT_NOT_SO) from None
    _tell_restored(done, as_json)
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


def _tell_made(made: KitRecord, place: Path, commit: str | None, as_json: bool) -> None:
    if as_json:
        print_json(made.model_dump(mode="json") | {"verdict": made.verdict, "place": str(place), "commit": commit})
        return
    console = result_console()
    n = len(made.experiments)
    told = f"{place}: verdict {made.verdict}, {n} measured configuration{'s' if n != 1 else ''}"
    if made.masked:
        told += f", {sum(each.times for each in made.masked)} secrets masked"
    console.print(told, markup=False, soft_wrap=True)
    for one in made.places:
        for line in one.notes:
            note(f"{one.name}: {line}")
    for each in made.masked:
        note(f"masked in {each.file}: {each.kind}" + (f", {each.times} times" if each.times > 1 else ""))
    if made.even_if_failing:
        note("sealed although not every service is proven: the kit says so")
    if commit:
        note(f"committed as {commit[:12]}")


def _tell_check(kit: Path, found: CheckResult) -> None:
    console = result_console()
    for fault in found.faults:
        console.print(fault, markup=False, soft_wrap=True)
    for each in found.signatures:
        who = each.signer or ("not known who" if not each.trouble else each.trouble)
        console.print(f"signed by {each.fingerprint} ({who})", markup=False, soft_wrap=True)
    for line in found.unchecked:
        print(f"not checked: {line}", file=sys.stderr)
    verdict = f"; verdict when it was sealed: {found.kit.verdict}" if found.kit else ""
    words = f"whole{verdict}" if found.is_whole else f"NOT whole: {len(found.faults)} faults"
    size = f"{found.total_bytes / 1e6:.2f} MB"
    console.print(f"{kit} is {words} ({found.files} files, {size})", markup=False, soft_wrap=True)


_MARKS = {"done": "[green]done[/]", "to do": "to do", "refused": "[red]REFUSED[/]", "unknown": "[yellow]note[/]"}


def _tell_steps(steps: tuple[Step, ...], as_json: bool) -> None:
    if as_json:
        print_json({"steps": [vars(step) for step in steps]})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold", vertical="top")
    for step in steps:
        table.add_row(step.name, _MARKS[step.state], escape(step.told))
    result_console().print(table)


def _tell_restored(done: Restored, as_json: bool) -> None:
    if as_json:
        print_json(done.to_json())
        return
    console = result_console()
    console.print(f"verdict: {done.verdict.status.value} (sealed: {done.sealed_verdict})", markup=False)
    for each in done.verdict.findings:
        if each.status.value == "violated":
            console.print(f"violated: {each.claim}: {'; '.join(each.evidence)}", markup=False, soft_wrap=True)
    told = done.comparison.told() if done.comparison else f"nothing measured: {done.no_canary}"
    console.print(f"canary: {told}", markup=False, soft_wrap=True)
    words = "the service is as it was sealed" if done.is_as_sealed else "the service is NOT as it was sealed"
    console.print(f"{words} ({time.strftime('%Y-%m-%d %H:%M:%S')})", markup=False)
