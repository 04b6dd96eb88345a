"""What distinguishes one measured setting from another, for tables and axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree.bench.record import RunRecord

_MODES = {"none": "ar", "dflash": "chain", "ddtree": "tree"}
_SPECULATION = ("speculation.algorithm", "speculation.budget", "speculation.topk_cap")


@dataclass(frozen=True)
class Configuration:
    """A setting of the server, whether it was deployed or asked for with each request.

    Attributes:
        mode: ``ar``, ``chain``, ``tree``, or ``server`` where nothing is known of it.
        budget: nodes of a tree or length of a chain; None: not set.
        others: further keys of the deployment that distinguish it, with their values as text.
    """

    mode: str
    budget: int | str | None = None
    top_k_cap: int | None = None
    others: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Short and unique among configurations, such as ``tree 32, top-k 4, draft_window 512``."""
        parts = [self.mode if self.budget is None else f"{self.mode} {self.budget}"]
        if self.top_k_cap is not None:
            parts.append(f"top-k {self.top_k_cap}")
        return ", ".join([*parts, *(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in self.others)])

    @property
    def family(self) -> str:
        """The name without its budget: what a line over budgets joins."""
        return Configuration(self.mode, None, self.top_k_cap, self.others).name

    @property
    def others_without_drafts(self) -> tuple[tuple[str, str], ...]:
        """Those that plain decoding has as well."""
        return _without_drafts(self.others)

    @property
    def order(self) -> tuple[Any, ...]:
        modes = ("server", "ar", "chain", "tree")
        budget = self.budget if isinstance(self.budget, int) else 10**6 if self.budget == "auto" else 0
        place = modes.index(self.mode) if self.mode in modes else len(modes)
        return place, self.others, budget, self.top_k_cap or 0


def configuration_of(run: RunRecord, variant: str) -> Configuration:
    """Of a row's variant within its run."""
    settings = dict(run.settings)
    others = tuple((key, _told(value)) for key, value in sorted(settings.items()) if key not in _SPECULATION)
    mode, *rest = variant.split(":")
    if mode == "ar" or settings.get("speculation.algorithm") == "none":
        others = _without_drafts(others)
    if mode == "server":
        algorithm = settings.get("speculation.algorithm")
        mode = _MODES.get(str(algorithm), "server" if algorithm is None else str(algorithm))
        return Configuration(mode, settings.get("speculation.budget"), settings.get("speculation.topk_cap"), others)
    budget: int | str | None = None
    if rest and rest[0] != "default":
        budget = int(rest[0]) if rest[0].isdigit() else rest[0]
    return Configuration(mode, budget, int(rest[1]) if len(rest) > 1 else None, others)


def _without_drafts(settings: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in settings if not key.startswith("speculation."))


def _told(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
