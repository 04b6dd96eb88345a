"""Each declared setting against the engine's own account of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree.verify.command_line import settings_of
from ddtree.verify.effective import SETTINGS
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.session import Session

_WEIGHTS = ("model", "drafter")


def probe_settings(session: Session) -> Iterator[Finding]:
    """Engine, name of the model, then setting by setting."""
    expectation, effective = session.expectation, session.effective
    version = f" {effective.version}" if effective.version else ""
    yield proven("settings", f"the engine is {effective.engine}", f"its pages are those of {effective.engine}{version}")
    on_host = settings_of(session.process.arguments) if session.process else {}
    declared = dict(expectation.settings)
    for name, value in effective.requested.items():  # what the process was started with counts as declared too
        declared.setdefault(name, value)
    if expectation.graphs is not None and "cuda_graphs" not in declared:
        declared["cuda_graphs"] = expectation.graphs
    for name, wanted in declared.items():
        yield _hold(session, name, wanted, on_host)


def _hold(session: Session, name: str, wanted: Any, on_host: dict[str, Any]) -> Finding:
    effective, origin = session.effective, _origin(session, name)
    label = SETTINGS[name]
    claim = f"{label} is {told(wanted)}"
    if name in effective.settings:
        found, source = effective.settings[name], effective.source
    elif name in on_host:
        found, source = on_host[name], "command line of the process that listens"
    else:
        return unknown(
            "settings",
            claim,
            f"declared by {origin}; {effective.engine} does not tell it",
            remedy="run verify on the server's machine, where its command line can be read",
            is_required=name not in ("dtype", "memory_fraction", "cuda_graphs"),
        )
    seen = f"{source}: {told(found)}"
    if same(name, wanted, found):
        return proven("settings", claim, seen)
    return violated(
        "settings",
        claim,
        f"declared by {origin}: {told(wanted)}",
        seen,
        remedy=f"start the server with {label} {told(wanted)}, or correct the declaration",
    )


def _origin(session: Session, name: str) -> str:
    if name in session.expectation.settings or name == "cuda_graphs":
        return session.expectation.origin
    return "the options that the process was started with"


def same(name: str, wanted: Any, found: Any) -> bool:
    """Whether two spellings of a setting mean the same."""
    if name in _WEIGHTS and isinstance(wanted, str) and isinstance(found, str):
        return _same_weights(wanted, found)
    if isinstance(wanted, bool) or isinstance(found, bool):
        return bool(wanted) == bool(found)
    if isinstance(wanted, float) or isinstance(found, float):
        return _number(wanted) is not None and _number(wanted) == _number(found)
    return str(wanted).lower() == str(found).lower()


def _number(value: Any) -> float | None:
    try:
        return round(float(value), 6)
    except (TypeError, ValueError):
        return None


def _same_weights(wanted: str, found: str) -> bool:
    """A path may be a link or end in a slash; a hub name stands in the path of its snapshot."""
    if wanted.rstrip("/") == found.rstrip("/"):
        return True
    if "/" in wanted and not wanted.startswith("/") and f"models--{wanted.replace('/', '--')}" in found.split("/"):
        return True
    try:
        return Path(wanted).is_dir() and Path(wanted).resolve() == Path(found).resolve()
    except (OSError, RuntimeError):
        return False


def told(value: Any) -> str:
    """A setting for people."""
    if value is None:
        return "not limited"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
