"""A sweep file: which keys of a deployment take which values, and how each point is measured."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from ddtree.errors import UserError

UNSET = "unset"
"""As a value: the key is left out of the deployment."""
MOST_POINTS = 10_000

Value = bool | int | float | str | list[Any]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$")]


class Table(BaseModel):
    """Unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class BenchTable(Table):
    """How points are measured; as the flags of ``ddtree bench``. A sweep's own table overrides single keys."""

    workloads: list[str] | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    contexts: list[Annotated[int, Field(ge=16)] | Literal["as-is"]] | None = None
    concurrency: list[Annotated[int, Field(ge=1)]] | None = None
    temperatures: list[Annotated[float, Field(ge=0, le=100)]] | None = None
    repeats: Annotated[int, Field(ge=1)] | None = None
    requests: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    ignore_eos: bool | None = None
    unique_prefix: bool | None = None
    pad_text: str | None = None
    warm_up: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = None

    def over(self, base: BenchTable) -> BenchTable:
        """``base`` with what is given here in its place."""
        given = {name: value for name, value in self if value is not None}
        return base.model_copy(update=given)


class VerifyTable(Table):
    """How each deployed server is verified before it is measured; as the flags of ``ddtree verify``."""

    enabled: bool = True
    strict: bool = False
    probe_tokens: Annotated[int, Field(ge=8)] = 64
    long_tokens: Annotated[int, Field(ge=0)] = 0
    concurrency: Annotated[int, Field(ge=1)] = 2
    timeout_s: Annotated[float, Field(gt=0)] = 120.0


Number = int | Annotated[float, Field(allow_inf_nan=False)]


class Range(Table):
    """Numbers from ``low`` to ``high``; whole ones where both are whole."""

    low: Number
    high: Number
    step: Number | None = None
    log: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log goes with a low above 0, and with no step")
        if self.step is not None and self.step <= 0:
            raise ValueError("step is not above 0")
        if isinstance(self.step, float) and isinstance(self.low, int) and isinstance(self.high, int):
            raise ValueError("step is no whole number, but low and high are")
        return self


Choices = Annotated[
    Annotated[list[bool | int | float | str], Tag("list")] | Annotated[Range, Tag("range")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "range"),
]


class SearchTable(Table):
    """Points that are chosen one after the other, by what those before brought.

    Attributes:
        trials: points at most.
        objective: what is sought, as a geometric mean over the cells: the most of ``total_tok_s`` (whole units) or
            ``user_tok_s``, or the least of ``ttft_ms``.
    """

    trials: Annotated[int, Field(ge=1)]
    keys: dict[str, Choices]
    objective: Literal["total_tok_s", "user_tok_s", "ttft_ms"] = "total_tok_s"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _something(self) -> SearchTable:
        if not self.keys:
            raise ValueError("give keys to search over")
        for key, values in self.keys.items():
            if isinstance(values, list) and (len(values) < 2 or any(v in values[:i] for i, v in enumerate(values))):
                raise ValueError(f"{key} has less than two values, or one twice")
        return self


class SweepTable(Table):
    """One block of points, all measured alike: every combination of ``grid``, each of ``points``, or a ``search``."""

    name: Name
    grid: dict[str, list[Value]] | None = None
    points: list[dict[str, Value]] | None = None
    search: SearchTable | None = None
    bench: BenchTable = BenchTable()

    @model_validator(mode="after")
    def _one_kind(self) -> SweepTable:
        if sum(kind is not None for kind in (self.grid, self.points, self.search)) != 1:
            raise ValueError("give one of grid, points and search")
        for key, values in (self.grid or {}).items():
            if not values or any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"{key} is empty or has a value twice")
        if self.grid and (points := prod(map(len, self.grid.values()))) > MOST_POINTS:
            raise ValueError(f"{points:,} points are more than {MOST_POINTS:,}: give fewer values, or a search")
        return self

    def settings(self) -> Iterator[dict[str, Value]]:
        """The points' keys and values, in the order of the file; none of a search, whose points are not known yet."""
        if self.points is not None:
            yield from self.points
            return
        if self.grid is not None:
            for values in product(*self.grid.values()):
                yield dict(zip(self.grid, values, strict=True))


class SweepFile(Table):
    """The whole file. ``folder`` is where it lies: paths in it start from there."""

    deployment: str
    per_request: bool = True
    bench: BenchTable
    verify: VerifyTable = VerifyTable()
    sweep: list[SweepTable]

    @field_validator("sweep")
    @classmethod
    def _names(cls, sweeps: list[SweepTable]) -> list[SweepTable]:
        if not sweeps:
            raise ValueError("give at least one [[sweep]]")
        if len({each.name for each in sweeps}) < len(sweeps):
            raise ValueError("two sweeps have the same name")
        return sweeps

    @model_validator(mode="after")
    def _workloads(self) -> SweepFile:
        for each in self.sweep:
            if not each.bench.over(self.bench).workloads:
                raise ValueError(f"bench.workloads is missing for sweep {each.name}")
        return self


def read_sweep_file(path: Path) -> tuple[SweepFile, str]:
    """The file and its text.

    Raises:
        UserError: it cannot be read, or a key is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return SweepFile.model_validate(tomllib.loads(text)), text
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "name a sweep file, see docs/sweep.md") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", "name a sweep file, see docs/sweep.md") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not TOML ({error})", "see https://toml.io") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        told = fault["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {place}: {told}" if place else f"{path}: {told}", "see docs/sweep.md") from None
