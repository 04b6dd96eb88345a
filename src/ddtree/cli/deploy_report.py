"""What ``ddtree deploy`` shows: progress, what was rendered, and how an apply went."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ddtree.cli.output import print_json
from ddtree.plain_text import printable

if TYPE_CHECKING:
    from ddtree.deploy.apply import Applied, ApplyError
    from ddtree.deploy.progress import Progress
    from ddtree.deploy.release import Release
    from ddtree.deploy.render import Rendered
    from ddtree.deploy.unit_check import UnitCheck

PLAIN_INTERVAL_S = 10.0


def print_rendered(rendered: Rendered) -> None:
    print(f"# Command\n{shlex.join(rendered.command)}\n")
    if rendered.unit is None:
        variables = [f"{name}={shlex.quote(value)}" for name, value in rendered.environment.items()]
        print("# Environment", *variables, "", sep="\n")
    for secrets in rendered.secret_files:
        print(f"# {secrets.path}, mode 0600: {', '.join(secrets.sources)}\n")
    if rendered.unit:
        print(f"# {rendered.unit_name}\n{rendered.unit}", end="")


def print_rendered_json(rendered: Rendered, check: UnitCheck | None) -> None:
    secret_files = [{"path": one.path, "mode": "0600", "names": list(one.sources)} for one in rendered.secret_files]
    print_json(
        {
            "command": list(rendered.command),
            "environment": dict(rendered.environment),
            "unit_name": rendered.unit_name,
            "unit": rendered.unit,
            "secret_files": secret_files,
            "digest": rendered.digest,
            "unit_check": asdict(check) if check else None,
        }
    )


def state_in_words(release: Release) -> str:
    return "broken off, or under way" if release.state == "applying" else release.state


class Waiting:
    """Progress of an apply on stderr: a line that changes on a terminal, a line a stage elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self._live = console.status("", spinner_style="dim") if console.is_terminal else None
        self._stage, self._printed_at = "", 0.0

    def __enter__(self) -> Waiting:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        parts = [progress.stage + (f" {progress.share:.0%}" if progress.share else "")]
        if progress.elapsed_s is not None:
            parts.append(f"{progress.elapsed_s:.0f} s")
        if progress.gpu_used_mib is not None and progress.gpu_total_mib is not None:
            parts.append(f"GPU {progress.gpu_used_mib / 1024:.1f} of {progress.gpu_total_mib / 1024:.0f} GiB")
        if progress.log_line:
            parts.append(progress.log_line)
        line = ", ".join(parts)
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif progress.stage != self._stage or time.monotonic() - self._printed_at > PLAIN_INTERVAL_S:
            print(line, file=sys.stderr, flush=True)
            self._printed_at = time.monotonic()
        self._stage = progress.stage


def tell_applied(applied: Applied, as_json: bool) -> None:
    """It answers."""
    release = applied.release
    if as_json:
        print_json({"state": "good", "release": asdict(release)})
    else:
        print(f"release {release.number} answers after {release.ready_s:.1f} s, process {applied.ready.identity.pid}")


def tell_failed(error: ApplyError, as_json: bool) -> None:
    """It does not, and was taken back."""
    if as_json:
        print_json(
            {
                "state": "failed",
                "reason": error.reason,
                "release": asdict(error.release),
                "back_to": error.back_to.number if error.back_to else None,
                "back_trouble": error.back_trouble,
                "tail": error.tail,
            }
        )
        return
    print(error.tail, end="", file=sys.stderr)
    print(f"release {error.release.number} failed: {error.reason}", file=sys.stderr)
    print(_way_back(error), file=sys.stderr)


def _way_back(error: ApplyError) -> str:
    if error.back_trouble:
        return f"going back failed too: {printable(error.back_trouble)}"
    if error.back_to is None:
        return "there is no earlier good release: the service was taken out"
    if error.left_stopped:
        return f"release {error.back_to.number} is in place again, stopped as it was"
    return f"release {error.back_to.number} runs again, and has answered"
