"""Where a run is, on disk: enough to go on as if it had never stopped.

Random numbers are a function of the seed and the number of the micro-batch, and so is what a micro-batch holds; the
number of steps is all the state that they have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ddtree.errors import UserError
from ddtree.train.durable import replacing

CHECKPOINT = "checkpoint.pt"
VERSION = 1
_REMEDY = "start the run anew in another folder"


@dataclass(frozen=True)
class Checkpoint:
    """State after a step.

    Attributes:
        step: steps done.
        train_s: seconds of training so far, in all processes' lives.
        drafter: float32 weights by name.
        optimizer: see `Optimizer.state`.
    """

    step: int
    train_s: float
    drafter: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint of a run; whenever the process dies, the old one or the new one is there, whole.

    Raises:
        UserError: the disk is full, or cannot be written; the old checkpoint is as it was.
    """
    fields = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
    with replacing(folder / CHECKPOINT) as file:
        watched: Any = _Watched(file)
        try:
            torch.save({"version": VERSION, **fields}, watched)
        except RuntimeError as error:
            raise watched.error or error from None


def read_checkpoint(folder: Path, device: torch.device) -> Checkpoint | None:
    """The checkpoint of a run; None where none was written yet.

    Raises:
        UserError: it is damaged, or another version wrote it.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        fields = torch.load(path, map_location=device, weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__})", _REMEDY) from None
    if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
        raise UserError(f"{path} was written by another version", _REMEDY)
    if not _is_whole(fields):
        raise UserError(f"{path} is damaged", _REMEDY)
    return Checkpoint(**fields)


@contextlib.contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """For the block that takes over the checkpoint's tensors.

    Raises:
        UserError: they are not those of this run.
    """
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        cause = str(error).splitlines()[-1].strip()
        raise UserError(f"{folder / CHECKPOINT} does not fit this run ({cause})", _REMEDY) from None


def _is_whole(fields: dict[str, Any]) -> bool:
    if fields.keys() != {field.name for field in dataclasses.fields(Checkpoint)}:
        return False
    step, train_s = fields["step"], fields["train_s"]
    numbers = isinstance(step, int) and step >= 0 and isinstance(train_s, float) and 0 <= train_s < math.inf
    return numbers and isinstance(fields["drafter"], dict) and isinstance(fields["optimizer"], dict)


class _Watched:
    """A file that remembers the disk's own error, of which torch.save makes one that says nothing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, part: Any) -> int:
        try:
            return self._file.write(part)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()
