"""DDTREE's command line flags, added to SGLang's own parser."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from ddtree.sglang.settings import CONFIG_VARIABLE, Asked, SettingsError

BUDGET_FLAG, CAP_FLAG = "--speculative-ddtree-budget", "--speculative-ddtree-topk-cap"


def add_flags(result: Any, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
    """After ``ServerArgs.add_cli_args``: our flags, each unless this SGLang has it already."""
    known = parser._option_string_actions
    if BUDGET_FLAG not in known:
        parser.add_argument(
            BUDGET_FLAG, type=int, default=None, dest="speculative_ddtree_budget",
            help="DDTREE: nodes of a draft tree without its root; the target verifies this plus one rows a step.",
        )  # fmt: skip
    if CAP_FLAG not in known:
        parser.add_argument(
            CAP_FLAG, type=int, default=None, dest="speculative_ddtree_topk_cap",
            help="DDTREE: candidates of one position at most; 1 makes the tree a chain.",
        )  # fmt: skip
    return result


def take_flags(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``ServerArgs.from_cli_args``: keep what our flags say for the processes that are spawned later."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, argparse.Namespace)]
    if found and str(getattr(found[0], "speculative_algorithm", "")).upper().startswith("DDTREE"):
        said = Asked.from_environment()
        budget, cap = (getattr(found[0], f"speculative_ddtree_{name}", None) for name in ("budget", "topk_cap"))
        _same("budget", budget, said.budget)
        _same("topk_cap", cap, said.topk_cap)
        joined = {
            "budget": said.budget if budget is None else budget,
            "topk_cap": said.topk_cap if cap is None else cap,
            "fold_tail": said.fold_tail,
        }
        os.environ[CONFIG_VARIABLE] = json.dumps(joined)
    elif found:
        for name in ("budget", "topk_cap"):
            if getattr(found[0], f"speculative_ddtree_{name}", None) is not None:
                flag = name.replace("_", "-")
                raise SettingsError(
                    f"--speculative-ddtree-{flag} needs --speculative-algorithm DDTREE: add it or leave out the flag"
                )
    return original(*args, **kwargs)


def _same(name: str, flag: int | None, variable: int | None) -> None:
    if flag is not None and variable is not None and flag != variable:
        raise SettingsError(f"{name} is {flag} by flag but {variable} in {CONFIG_VARIABLE}: give only one of them")
