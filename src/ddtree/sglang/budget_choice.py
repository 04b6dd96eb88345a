"""Which budget a server starts with: ``auto`` by measured speed, and any only where its graphs are known to capture.

Both ask child servers, once for each device, models and versions; the answers are kept (`ddtree.sglang.width_table`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ddtree.sglang.child_server import CHILD_VARIABLE, ChildServer
from ddtree.sglang.settings import Asked, SettingsError
from ddtree.sglang.width_measure import measure_server
from ddtree.sglang.width_table import CONCURRENCIES, KEY_FIELDS, WidthRow, WidthTable, candidates, table_path, width_key
from ddtree.user_cache import cache_folder

logger = logging.getLogger(__name__)

SHOWN: frozenset[tuple[str, tuple[int, int]]] = frozenset({("0.5.16", (9, 0))})
"""SGLang versions and compute capabilities on which capture was seen to work at every width up to 65."""

Try = Callable[[int, bool], WidthRow]
"""Given a budget and whether its speed is wanted, what a child server showed."""


def choose_budget(table: WidthTable, budgets: tuple[int, ...], concurrency: int, attempt: Try) -> int:
    """The fastest of ``budgets`` for ``concurrency``; what the table lacks is found out and kept.

    Raises:
        SettingsError: no server with any of them came up.
    """
    for budget in budgets:
        row = table.rows.get(budget)
        if row is None or (row.starts and not row.tok_s):
            table.rows[budget] = attempt(budget, True)
            _keep(table)
    best = WidthTable(table.key, {b: table.rows[b] for b in budgets}).best_budget(concurrency)
    if best is None:
        raise SettingsError(
            f"DDTREE budget auto: no server came up with any of {list(budgets)}, see {table_path({}).parent}; "
            "give --speculative-ddtree-budget yourself, or leave out DDTREE"
        )
    return best


def widest_that_starts(table: WidthTable, budget: int, budgets: tuple[int, ...], attempt: Try) -> int | None:
    """``budget`` where a server with it comes up, else the largest smaller one of ``budgets`` that does, else None."""
    for tried in (budget, *sorted((b for b in budgets if b < budget), reverse=True)):
        if tried not in table.rows:
            table.rows[tried] = attempt(tried, False)
            _keep(table)
        if table.rows[tried].starts:
            return tried
    return None


class BudgetChoice:
    """The choice for the server that SGLang is resolving.

    Args:
        server_args: SGLang's arguments, resolved but for speculation.
        target: the target's Hugging Face config.
        asked: our settings.
        command_line: flags of this process where it was started by them; None for an Engine in a program.
    """

    def __init__(self, server_args: Any, target: Any, asked: Asked, command_line: list[str] | None) -> None:
        import torch

        self._asked, self._command_line = asked, command_line
        self._capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        self._versions = {"torch": torch.__version__} | {name: _version(name) for name in ("sglang", "ddtree")}
        fields = {name: getattr(server_args, name, None) for name in KEY_FIELDS}
        shape = {name: getattr(asked, name) for name in ("topk_cap", "draft_temperature", "fold_tail", "own_tables")}
        self._table = WidthTable.load(width_key(fields, device, self._versions, shape))
        self._budgets = candidates(target)

    def auto(self) -> int:
        """The budget of ``auto``; says what it picked and from which speeds."""
        concurrency = self._asked.concurrency or 1
        budget = choose_budget(self._table, self._budgets, concurrency, self._attempt)
        speeds = {b: row.tok_s or "does not start" for b, row in sorted(self._table.rows.items())}
        logger.info(
            "DDTREE: budget auto is %d for a concurrency of %d (--speculative-ddtree-concurrency); "
            "tokens/s by budget and concurrency: %s",
            budget, concurrency, speeds,
        )  # fmt: skip
        return budget

    def checked(self, budget: int) -> int | None:
        """``budget``, or what stands in for it where capture dies with it; None where it dies with every width."""
        known = (self._versions["sglang"], self._capability) in SHOWN and budget <= 64
        if known or not self._asked.probe or os.environ.get(CHILD_VARIABLE) or self._command_line is None:
            return budget
        return widest_that_starts(self._table, budget, self._budgets, self._attempt)

    def _attempt(self, budget: int, timed: bool) -> WidthRow:
        if self._command_line is None or os.environ.get(CHILD_VARIABLE):
            raise SettingsError(
                "DDTREE budget auto has no measurements for this device, models and versions, and only a start by "
                "command line can take them: start sglang.launch_server once with these settings, or give a number"
            )
        logger.warning(
            "DDTREE: %s budget %d in a child server, once for this device, models and versions",
            "measuring" if timed else "probing the graph capture of", budget,
        )  # fmt: skip
        config = {k: v for k, v in asdict(self._asked).items() if k != "budget" and v is not None}
        log = cache_folder() / "sglang-widths" / f"budget-{budget}.log"
        with ChildServer(self._command_line, budget, config, log, dummy=not timed) as child:
            if not child.comes_up():
                logger.warning("DDTREE: budget %d does not start (%s): %s", budget, log, child.last_words())
                return WidthRow(starts=False)
            return WidthRow(starts=True, tok_s=measure_server(child.url, CONCURRENCIES) if timed else {})


def _keep(table: WidthTable) -> None:
    """Save what is known, unless nothing came up at all: then the fault lies elsewhere, and the next start tries."""
    if not any(row.starts for row in table.rows.values()):
        return
    try:
        table.save()
    except OSError as error:
        logger.warning("DDTREE: what was measured cannot be kept (%s): set DDTREE_CACHE to a folder to write to", error)


def command_line() -> list[str] | None:
    """Flags of this process where it is an SGLang server started by them."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = main.name if main is not None else os.path.basename(sys.argv[0])
    if name.split(".")[0] != "sglang":
        return None
    flags = sys.argv[1:]
    return flags[1:] if flags[:1] == ["serve"] else flags


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
