"""``ddtree kit``: what was measured and on what, sealed, checked anywhere, and brought back to life."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ddtree.cli.kit_report import tell_check, tell_made
from ddtree.cli.kit_restore import EXIT_NOT_SO, AsJson, Kit, restore_command
from ddtree.cli.options import with_option_groups
from ddtree.cli.output import ProgressLine, note, print_json, result_console
from ddtree.errors import UserError
from ddtree.extras import require_extra

kit_app = typer.Typer(no_args_is_help=True, help="Seal what was measured, check it anywhere, restore it elsewhere.")

Folder = Annotated[Path, typer.Argument(metavar="KIT", help="A kit that is a folder.", show_default=False)]
Extra = Annotated[
    list[Path] | None,
    typer.Option(metavar="PATH", help="Scripts, sweep files, prompts: go to bench/. May be given several times."),
]
Results = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="Results of bench or sweep. May be given several times.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse where a secret is found, instead of masking it.")]


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
    from ddtree.kit.create_archive import create_archive
    from ddtree.kit.git_commit import commit_kit, require_repository
    from ddtree.kit.pack import ending_of
    from ddtree.kit.wheel import wheel_of_file
    from ddtree.verify import Options

    is_archive = ending_of(out) is not None
    if is_archive and git:
        raise UserError("--git commits a folder", "give --out a name without an ending of an archive")
    if git:
        require_repository(out)
    options = CreateOptions(
        out=out,
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
        made = (create_archive if is_archive else create)(options, lambda stage: progress(stage, 0.0))
    commit = commit_kit(out, made) if git else None
    tell_made(made, out, commit, as_json)


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
    tell_made(made, kit, None, as_json)


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
        tell_check(kit, found)
    if not found.is_whole:
        raise typer.Exit(EXIT_NOT_SO)


def show_command(kit: Kit, as_json: AsJson = False) -> None:
    """Tell what is in a kit; one that does not pass its check is not shown."""
    from ddtree.kit.guide import guide
    from ddtree.kit.open_kit import whole_kit

    with whole_kit(kit) as (payload, record):
        if as_json:
            print_json(record.model_dump(mode="json") | {"verdict": record.verdict})
        else:
            print(guide(record, payload), end="")


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


def unpack_command(
    archive: Annotated[Path, typer.Argument(metavar="FILE", help="A .tar.zst or .zip.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The kit's folder; must not be there.", show_default=False)],
) -> None:
    """Make a folder of a packed kit; what no kit holds is refused, and nothing is written outside of it."""
    from ddtree.kit.unpack import unpack

    unpack(archive, out)
    note(f"unpacked to {out}; now: ddtree kit check {out}")


_VERBS: dict[str, Callable[..., None]] = {
    "create": create_command,
    "add": add_command,
    "check": check_command,
    "show": show_command,
    "diff": diff_command,
    "sign": sign_command,
    "pack": pack_command,
    "unpack": unpack_command,
    "restore": restore_command,
}
for _name, _verb in _VERBS.items():
    kit_app.command(_name)(with_option_groups(_verb))
