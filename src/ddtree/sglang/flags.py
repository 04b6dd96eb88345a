"""DDTREE's command line flags, added to SGLang's own parser."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ddtree.sglang.settings import AUTO, CONFIG_VARIABLE, Asked, SettingsError

BUDGET_FLAG, CAP_FLAG = "--speculative-ddtree-budget", "--speculative-ddtree-topk-cap"
TEMPERATURE_FLAG, CONCURRENCY_FLAG = "--speculative-ddtree-draft-temperature", "--speculative-ddtree-concurrency"
NAMES = ("budget", "topk_cap", "draft_temperature", "concurrency")


def add_flags(result: Any, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
    """After ``ServerArgs.add_cli_args``: our flags, each unless this SGLang has it already."""
    known = parser._option_string_actions
    if BUDGET_FLAG not in known:
        parser.add_argument(
            BUDGET_FLAG, type=budget_value, default=None, dest="speculative_ddtree_budget",
            help="DDTREE: nodes of a draft tree without its root; the target verifies this plus one rows a step. "
            "'auto' takes the fastest for the declared concurrency, measured once on this device; 0 turns it off.",
        )  # fmt: skip
    if CAP_FLAG not in known:
        parser.add_argument(
            CAP_FLAG, type=int, default=None, dest="speculative_ddtree_topk_cap",
            help="DDTREE: candidates of one position at most; 1 makes the tree a chain.",
        )  # fmt: skip
    if TEMPERATURE_FLAG not in known:
        parser.add_argument(
            TEMPERATURE_FLAG, type=float, default=None, dest="speculative_ddtree_draft_temperature",
            help="DDTREE: below 1 trees grow deeper, above 1 broader, 0.1 to 10; the drafter's own where left out.",
        )  # fmt: skip
    if CONCURRENCY_FLAG not in known:
        parser.add_argument(
            CONCURRENCY_FLAG, type=int, default=None, dest="speculative_ddtree_concurrency",
            help="DDTREE: requests at once that a budget of 'auto' is picked for; 1 where left out.",
        )  # fmt: skip
    return result


def budget_value(text: str) -> int | str:
    """The budget as a number, or ``auto``."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor 'auto'") from None


def take_flags(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``ServerArgs.from_cli_args``: keep what our flags say for the processes that are spawned later."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, argparse.Namespace)]
    if found and str(getattr(found[0], "speculative_algorithm", "")).upper().startswith("DDTREE"):
        said = Asked.from_environment()
        flags = {name: getattr(found[0], f"speculative_ddtree_{name}", None) for name in NAMES}
        for name, flag in flags.items():
            _same(name, flag, getattr(said, name))
        joined = asdict(said) | {name: flag for name, flag in flags.items() if flag is not None}
        os.environ[CONFIG_VARIABLE] = json.dumps(joined)
    elif found:
        for name in NAMES:
            if getattr(found[0], f"speculative_ddtree_{name}", None) is not None:
                flag = name.replace("_", "-")
                raise SettingsError(
                    f"--speculative-ddtree-{flag} needs --speculative-algorithm DDTREE: add it or leave out the flag"
                )
    return original(*args, **kwargs)


def _same(name: str, flag: float | str | None, variable: float | str | None) -> None:
    if flag is not None and variable is not None and flag != variable:
        raise SettingsError(f"{name} is {flag} by flag but {variable} in {CONFIG_VARIABLE}: give only one of them")
