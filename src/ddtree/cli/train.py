"""``ddtree train``: make training text, train a DFlash drafter, measure it."""

from __future__ import annotations

import typer

from ddtree.cli.options import with_option_groups
from ddtree.cli.train_data import data, evaluate
from ddtree.cli.train_run import run

train_app = typer.Typer(no_args_is_help=True, help="Train a DFlash drafter for a target of your own.")
for verb in (data, run, evaluate):
    train_app.command()(with_option_groups(verb))
