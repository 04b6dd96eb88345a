"""What a run wrote down as it went, as CSV: the loss of training, the loss of held-out text, and tau."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddtree.errors import UserError
from ddtree.train.durable import replacing
from ddtree.train.loss import STATISTICS
from ddtree.train.settings import Objective


@dataclass(frozen=True)
class DepthMeans:
    """Sums by depth as means.

    Attributes:
        token_loss, divergence: nats, depth 1 first.
        hits: share of places at which the drafter's likeliest token is the target's, depth 1 first.
        loss: the objective's mix of both over all depths, with its decay; the same whatever was looked at how often.
        tau: tokens of a round of a chain with the context as the target wrote it, bonus included.
    """

    token_loss: list[float]
    divergence: list[float]
    hits: list[float]
    loss: float
    tau: float


def depth_means(by_depth: torch.Tensor, decay: torch.Tensor, objective: Objective) -> DepthMeans:
    """Means of the sums that `BlockLoss` has.

    Args:
        by_depth: ``[5, depths]``.
        decay: ``[depths]``, on the CPU.
    """
    sums = dict(zip(STATISTICS, by_depth.double().cpu(), strict=True))
    looks = sums["looks"].clamp(min=1)
    token_loss, divergence = sums["token_loss"] / looks, sums["divergence"] / looks
    mixed = objective.token_share * token_loss + (1 - objective.token_share) * divergence
    is_seen = sums["looks"] > 0
    weight = decay.double() * is_seen
    return DepthMeans(
        token_loss=token_loss.tolist(),
        divergence=divergence.tolist(),
        hits=(sums["hits"] / looks).tolist(),
        loss=float((mixed * weight).sum() / weight.sum().clamp(min=1e-9)),
        tau=1 + float((sums["reached"] / looks).sum()),
    )


class CsvLog:
    """A CSV file that grows by a row at a time; a resumed run drops the rows after its checkpoint.

    Args:
        path: of the file.
        columns: its first is the step.
        last_step: rows beyond it go.
    """

    def __init__(self, path: Path, columns: list[str], last_step: int) -> None:
        self._path = path
        kept = [columns]
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            # A full disk leaves half a row at the end.
            whole = [row for row in csv.reader(line for line in lines[1:] if line.endswith("\n")) if row]
            kept += [row for row in whole if row[0].isdecimal() and int(row[0]) <= last_step]
        with replacing(path) as binary:
            binary.write(_text(kept).encode())

    def add(self, row: Sequence[object]) -> None:
        """Append a row.

        Raises:
            UserError: the disk is full, or cannot be written.
        """
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                file.write(_text([[_told(value) for value in row]]))
        except OSError as error:
            raise UserError(
                f"cannot write {self._path} ({error.strerror or error})", "free some space and go on with --resume"
            ) from error


def by_depth_columns(depths: int) -> list[str]:
    """Names of the columns that `by_depth_values` fills."""
    return [f"{name}_{k}" for name in ("token_loss", "divergence", "hits") for k in range(1, depths + 1)]


def by_depth_values(means: DepthMeans) -> list[float]:
    return [*means.token_loss, *means.divergence, *means.hits]


def _told(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _text(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
