"""``ddtree fetch``: weights by pinned revision, verified."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn

from ddtree.cli.moving_line import MovingLine
from ddtree.cli.output import print_json, result_console
from ddtree.errors import UserError
from ddtree.extras import require_extra
from ddtree.fetch import LOCK_NAME, Fetch, HubSource, ListSource, Transfer, check_folder, parse_hub, read_list

EXIT_DIFFERENT = 1


class Via(StrEnum):
    """What fetches."""

    auto = "auto"
    hub = "hub"
    aria2c = "aria2c"
    plain = "plain"


def fetch(
    source: Annotated[
        str | None, typer.Argument(metavar="[OWNER/NAME@REVISION]", help="Repository of the Hugging Face hub.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Folder to fill.")] = None,
    urls: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of a repository: lines of ADDRESS SHA256 [PATH].")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Fetch nothing: compare a folder with its lock file.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only such files; may be given several times.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="No such files; may be given several times.")
    ] = None,
    via: Annotated[Via, typer.Option(help="auto: the hub's library; for lists aria2c, if installed.")] = Via.auto,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Files at once.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fetch a model or drafter, verify every byte, and write down what came.

    A run that breaks off is gone on with by the same command. Exit code of --check: 0 as in the lock, 1 different.
    """
    if check is not None:
        if source or urls or to or include or exclude:
            raise UserError("--check fetches nothing", "leave the other options out")
        _check(check, jobs, as_json)
        return
    if (source is None) == (urls is None):
        raise UserError(
            "there is no source" if source is None else "there are two sources", "give a repository, or --urls FILE"
        )
    if to is None:
        raise UserError("there is no folder to fill", "add --to DIR")
    if source is not None:
        wanted: HubSource | ListSource = parse_hub(source)
        require_extra("fetch", "ddtree fetch from the hub")
    else:
        assert urls is not None
        wanted = read_list(urls)
    with TransferLine() as line:
        began = time.monotonic()
        lock = Fetch(
            wanted, to, via=via.value, jobs=jobs, include=include or (), exclude=exclude or (), tell=line
        ).run()
        seconds = time.monotonic() - began
    if as_json:
        print_json(lock.model_dump(mode="json", exclude_none=True) | {"lock_file": str(to / LOCK_NAME)})
        return
    revision = f" at {lock.source.revision}" if lock.source.revision else ""
    result_console().print(
        f"{len(lock.files)} files, {_size(lock.total_bytes)}, of {lock.source.name}{revision} are in {to}, verified, "
        f"after {seconds:.0f} s; {to / LOCK_NAME} has their hashes",
        markup=False,
        soft_wrap=True,
    )


def _check(folder: Path, jobs: int, as_json: bool) -> None:
    with TransferLine() as line:
        result = check_folder(folder, jobs=jobs, tell=line)
    if as_json:
        print_json(result.to_json())
    else:
        console = result_console()
        for path, fault in result.faults.items():
            console.print(f"{path} {fault}", markup=False, soft_wrap=True)
        if result.others:
            console.print(f"not in the lock: {', '.join(result.others)}", markup=False, soft_wrap=True)
        n = len(result.lock.files)
        words = f"all {n} files are as in the lock" if result.is_whole else f"{len(result.faults)} of {n} files differ"
        console.print(f"{words} ({_size(result.lock.total_bytes)})", markup=False)
    if not result.is_whole:
        raise typer.Exit(EXIT_DIFFERENT)


class TransferLine(MovingLine):
    """Bytes, speed and time left."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TextColumn("{task.fields[pace]}"),
        )
        self.begin("looking", pace="")

    def __call__(self, now: Transfer) -> None:
        pace = (
            f"{_size(now.bytes_per_s)}/s, {_time(now.left_s)} left"
            if now.bytes_per_s and now.left_s is not None
            else ""
        )
        if self.bar:
            self.move(description=now.stage, completed=now.done_bytes, total=now.total_bytes or None, pace=pace)
        elif self.is_due(now.stage):
            words = f"{now.stage}: {_size(now.done_bytes)} of {_size(now.total_bytes)}"
            self.print(f"{words}, {pace}" if pace else words)
        self.stage = now.stage


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 5400 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
