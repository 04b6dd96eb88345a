"""The files of a training run."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError

import ddtree
from ddtree.errors import UserError
from ddtree.train.card import write_card
from ddtree.train.card_facts import CardFacts, RunFacts
from ddtree.train.data_facts import file_sha256
from ddtree.train.durable import replacing
from ddtree.train.parallel import Group
from ddtree.train.preparation import Prepared
from ddtree.train.run_log import CsvLog, by_depth_columns
from ddtree.train.settings import TrainSettings, changed_settings, plain_settings
from ddtree.train.shards import DATA_FILE, locked, read_facts
from ddtree.train.step_times import StepTimes
from ddtree.train.watching import Told

SETTINGS = "settings.json"
BASIS = "basis.json"
STATE = "state.json"
TIMES = "step_times.json"
# What may differ when a run goes on: it changes nothing that is learnt.
FREE = ("device", "held_out.every_s", "held_out.every_steps", "held_out.tau_count", "held_out.tau_every",
        "held_out.tau_prompts")  # fmt: skip


class RunState(BaseModel):
    """How far a run is; `state.json`.

    Attributes:
        anchors: blocks trained on, all steps and processes together.
        devices: processes of the last piece.
        held_out_loss, held_out_hits: at the last look of this piece, hits by depth.
    """

    step: int
    train_s: float
    anchors: int
    finished: bool
    devices: int
    device: str
    held_out_loss: float | None
    held_out_hits: list[float]


class Basis(BaseModel):
    """What micro-batches follow from beside the settings; with another basis every one would hold something else.

    Attributes:
        data_sha256: of each data folder's `data.json`.
    """

    data_sha256: dict[str, str]
    processes: int


class RunFolder:
    """A run's folder: settings, logs, times, state, checkpoint, and `drafter/`, which is written at the end and at
    every stop.
    """

    def __init__(self, path: Path, basis: Basis | None = None) -> None:
        self.path, self._basis = path, basis
        self.drafter = path / "drafter"

    @classmethod
    @contextmanager
    def open(cls, path: Path, settings: TrainSettings, resume: bool, group: Group) -> Iterator[RunFolder]:
        """The folder of a run, kept from other runs; only the first process writes.

        Raises:
            UserError: it holds another run, or this run and ``resume`` is not asked for; another process uses it.
        """
        if not group.leads:
            yield cls(path)
            return
        for folder in settings.data:
            read_facts(folder)
        data_sha256 = {str(folder): file_sha256(folder / DATA_FILE) for folder in settings.data}
        basis = Basis(data_sha256=data_sha256, processes=group.size)
        with locked(path):
            file = path / SETTINGS
            if file.exists():
                if not resume:
                    raise UserError(f"{path} holds a run already", "add --resume to go on, or give another folder")
                if changed := [name for name in changed_settings(_read(file), settings) if name not in FREE]:
                    raise UserError(
                        f"the run in {path} has other settings ({', '.join(changed)})",
                        "go on with the same ones, or start another run with --start-from",
                    )
                _require_same_basis(path / BASIS, basis)
            yield cls(path, basis)

    def finished_state(self) -> RunState | None:
        """The state of a run that is through; None where there is something to do.

        Raises:
            UserError: `state.json` is damaged.
        """
        file = self.path / STATE
        if not file.exists():
            return None
        try:
            state = RunState.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            raise UserError(f"{file} cannot be read", "remove it and go on with --resume") from None
        return state if state.finished else None

    def begin(self, settings: TrainSettings) -> None:
        """Write down whose folder it is; only once nothing of the settings can be refused any more."""
        if self._basis is None:
            return
        for name, content in ((SETTINGS, settings), (BASIS, self._basis)):
            with replacing(self.path / name) as file:
                file.write(content.model_dump_json(indent=1).encode())

    def open_logs(self, depths: int, last_step: int, last_look: int) -> None:
        """Open the logs; rows beyond ``last_step`` belong to steps that a killed process did in vain.

        Args:
            last_look: the same for the logs of looks at held-out text and at tau.
        """
        by_depth = by_depth_columns(depths)
        columns = [field.name for field in dataclasses.fields(Told)]
        self._steps = CsvLog(self.path / "log.csv", columns + by_depth, last_step)
        columns = ["step", "train_s", "loss", "tau"]
        self._held_out = CsvLog(self.path / "held_out.csv", columns + by_depth, last_look)
        self._tau = CsvLog(self.path / "tau.csv", ["step", "prompts", "tau"], last_look)

    def log_steps(self, values: Sequence[object]) -> None:
        self._steps.add(values)

    def log_held_out(self, values: Sequence[object]) -> None:
        self._held_out.add(values)

    def log_tau(self, step: int, tau: dict[str, float]) -> None:
        for name, value in tau.items():
            self._tau.add([step, name, value])

    def write_times(self, times: StepTimes) -> None:
        with replacing(self.path / TIMES) as file:
            file.write(times.model_dump_json(indent=1).encode())

    def finish(self, prepared: Prepared, settings: TrainSettings, state: RunState) -> None:
        """Write the drafter as it is, its card, and `state.json`."""
        prepared.drafter.save(self.drafter)
        facts = CardFacts(
            name=settings.name or self.path.resolve().name,
            target=prepared.identity,
            licence=settings.licence,
            base_model=settings.base_model,
            weights_sha256=file_sha256(self.drafter / "model.safetensors"),
            data=prepared.data,
            settings=plain_settings(settings),
            run=RunFacts(
                steps=state.step,
                anchors=state.anchors,
                seconds=state.train_s,
                device=state.device if state.devices == 1 else f"{state.devices} x {state.device}",
                start=prepared.start,
                versions=_versions(),
                held_out_loss=state.held_out_loss,
                held_out_hits=state.held_out_hits,
            ),
        )
        write_card(self.drafter, facts)
        with replacing(self.path / STATE) as file:
            file.write(state.model_dump_json(indent=1).encode())


def _versions() -> dict[str, str]:
    return {"ddtree": ddtree.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _require_same_basis(file: Path, now: Basis) -> None:
    try:
        before = Basis.model_validate_json(file.read_bytes())
    except FileNotFoundError:  # killed before it was written, and so before the first step
        return
    except (OSError, ValidationError):
        raise UserError(f"{file} cannot be read", "start anew in another folder") from None
    remedy = "start another run, with --start-from if you want to go on from these weights"
    if before.processes != now.processes:
        raise UserError(f"the run began with {before.processes} processes, not {now.processes}", remedy)
    for folder, sha256 in now.data_sha256.items():
        if before.data_sha256.get(folder) != sha256:
            raise UserError(f"the data in {folder} changed since the run began", remedy)


def _read(file: Path) -> TrainSettings:
    try:
        return TrainSettings.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        raise UserError(f"{file} cannot be read, or another version wrote it", "start anew in another folder") from None
