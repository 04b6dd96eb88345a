"""The ``ddtree`` command itself: its verbs, and how errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import ddtree
from ddtree.cli.bench import bench
from ddtree.cli.chat import chat
from ddtree.cli.demo import demo
from ddtree.cli.deploy import deploy_app
from ddtree.cli.doctor import doctor
from ddtree.cli.fetch import fetch
from ddtree.cli.generate import generate
from ddtree.cli.grade import grade
from ddtree.cli.kit import kit_app
from ddtree.cli.options import with_option_groups
from ddtree.cli.report import report
from ddtree.cli.serve import serve
from ddtree.cli.sweep import sweep
from ddtree.cli.train import train_app
from ddtree.cli.verify import verify
from ddtree.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (demo, generate, chat, serve, bench, verify, grade, report, sweep, fetch, doctor):
    app.command()(with_option_groups(verb))
app.add_typer(deploy_app, name="deploy")
app.add_typer(kit_app, name="kit")
app.add_typer(train_app, name="train")

# typer brings its own copy of click since 0.20-odd, and used click itself before: this names the class in both.
_UsageError: Any = typer.BadParameter.__base__


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ddtree {ddtree.__version__}")
        raise typer.Exit


@app.callback()
def _ddtree(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lossless, several times faster decoding of large language models with draft trees."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line ``arguments``; returns the exit code.

    0: done. 1: the demo found a fault in the output. 2: bad input or environment, told in one line on stderr.
    130: interrupted by Ctrl-C. 141: the reader of stdout went away.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows '?', not a traceback
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("ddtree", list(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as request:
        return request.exit_code
    except UserError as error:
        return _complain(f"ddtree: {error}")
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return EXIT_USER_ERROR  # typer has printed the help
        path = error.ctx.command_path if error.ctx else "ddtree"
        return _complain(f"{path}: {' '.join(error.format_message().split()).rstrip('.')}: see '{path} --help'")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's own flush at exit is quiet
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _complain(line: str) -> int:
    sys.stdout.flush()
    print(line, file=sys.stderr)
    return EXIT_USER_ERROR
