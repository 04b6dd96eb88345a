"""The acceptance length that a drafter's own folder promises, and how much of it a server is held to."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from ddtree.verify.command_line import settings_of
from ddtree.verify.session import Session

EXPECTED_FILE = "expected_tau.json"
"""As `ddtree train evaluate --keep` writes it."""

_SHARE = 0.5
"""Of the least promise, since the probe's six prompts are not the sets of the evaluation: on them the demo's first
drafter reaches 0.96 to 0.99 of its least promise, which is that of chat, and 0.6 of its greatest, that of maths."""

_HIGHEST_FLOOR = 2.0
"""A drafter that was measured with maths alone may promise three times what it reaches in chat."""

_MOST_BYTES = 1 << 30
"""Larger weights are not hashed: a look must not keep a server's disk busy."""

_LEAST_PROBE_TOKENS = 32
_LEAST_WINDOW = 512


_Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Kept(BaseModel):
    drafter_sha256: str
    draft_temperature: _Temperature = 1.0
    tau: dict[str, dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]]


class _Draft(BaseModel):
    draft_temperature: _Temperature | None = None


class _Drafter(BaseModel):
    """What its `config.json` says of its drafts."""

    block_size: int | None = None
    dflash_config: _Draft = _Draft()


@dataclass(frozen=True)
class Promise:
    """Attributes:
    told: what the folder says, for people; empty where it says nothing.
    floor: committed tokens per round that may be asked of a server; None where the file gives no ground for one.
    """

    told: tuple[str, ...] = ()
    floor: float | None = None


def promise_of(session: Session) -> Promise:
    """What stands beside the drafter that the server reads; nothing where its files are on another machine."""
    folder = _folder(session)
    if folder is None:
        return Promise()
    try:
        kept = _Kept.model_validate_json((folder / EXPECTED_FILE).read_bytes())
        weights = folder / "model.safetensors"
        if weights.stat().st_size > _MOST_BYTES:
            return Promise((f"{EXPECTED_FILE} is not used: weights of more than 1 GiB are not hashed here",))
        with weights.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        own = _Drafter.model_validate_json((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return Promise()
    except OSError as error:
        return Promise((f"{EXPECTED_FILE} beside the drafter is not used ({error.strerror})",))
    except ValidationError:
        return Promise((f"{EXPECTED_FILE} beside the drafter is not used: it, or config.json, is damaged",))
    if found != kept.drafter_sha256:
        other = f"it is of weights {kept.drafter_sha256[:12]}, the folder holds {found[:12]}"
        return Promise((f"{EXPECTED_FILE} beside the drafter is not used: {other}",))
    return _read(session, kept, own)


def _folder(session: Session) -> Path | None:
    """That of the drafter, where this machine is the server's."""
    if not session.is_here:
        return None
    on_host = settings_of(session.process.arguments) if session.process else {}
    found = session.effective.settings.get("drafter") or on_host.get("drafter")
    found = found or session.expectation.settings.get("drafter")
    folder = Path(found) if isinstance(found, str) else None
    return folder if folder is not None and folder.is_absolute() else None  # else it is a name on the hub


def _read(session: Session, kept: _Kept, own: _Drafter) -> Promise:
    settings = {**session.effective.settings, **session.expectation.settings}
    label, by_set = _measured(kept.tau, settings.get("algorithm"), settings.get("budget"))
    if not by_set:
        every = [each for row in kept.tau.values() for each in row.values()]
        span = f": {min(every):.2f} to {max(every):.2f} with other drafts than this one" if every else " is not known"
        return Promise((f"expected tau of this drafter{span}",))
    told = f"expected tau of this drafter, {label}: " + ", ".join(
        f"{each:.2f} ({name})" for name, each in by_set.items()
    )
    if why := _otherwise(session, settings, kept, own):
        return Promise((told, f"that is no floor here: {why}"))
    return Promise((told,), min(_HIGHEST_FLOOR, _SHARE * min(by_set.values())))


def _measured(tau: dict[str, dict[str, float]], algorithm: object, budget: object) -> tuple[str, dict[str, float]]:
    """By set of prompts: of a chain, or of the largest tree that was measured and is not larger than the one here."""
    if algorithm == "dflash":
        return "as a chain", {name: row["chain"] for name, row in tau.items() if "chain" in row}
    if algorithm != "ddtree" or not isinstance(budget, int):
        return "", {}
    sizes = {int(plan) for row in tau.values() for plan in row if plan.isascii() and plan.isdigit()}
    nearest = max((size for size in sizes if size <= budget), default=None)
    found = {name: row[str(nearest)] for name, row in tau.items() if str(nearest) in row}
    return f"a tree of {nearest}", found


def _otherwise(session: Session, settings: dict[str, object], kept: _Kept, own: _Drafter) -> str:
    """Why drafts here may rightly be shorter than those that were measured; empty where nothing is known to be."""
    block, window = settings.get("block_size"), settings.get("draft_window")
    if block is not None and block != own.block_size:
        return f"it was measured with blocks of {own.block_size} tokens"
    if isinstance(window, int) and window < _LEAST_WINDOW:
        return f"it was measured without a draft window, and {window} tokens are few"
    temperature = settings.get("draft_temperature")
    if settings.get("algorithm") == "ddtree" and isinstance(temperature, int | float):  # a chain has none
        makers = own.dflash_config.draft_temperature or 1.0  # whose choice drafts no worse than what was measured
        fine = (kept.draft_temperature, makers)
        if not any(math.isclose(temperature, each, abs_tol=1e-6) for each in fine):
            return f"it was measured at the draft temperature {kept.draft_temperature}"
    if session.options.probe_tokens < _LEAST_PROBE_TOKENS:
        return f"answers of {session.options.probe_tokens} tokens are short"
    return ""
