"""Each declared setting against the engine's own account of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree.errors import UserError
from ddtree.verify.command_line import settings_of
from ddtree.verify.effective import SETTINGS
from ddtree.verify.expectation import Expectation
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.host_process import HostProcess, without_secrets
from ddtree.verify.revision import Seen, commit_of
from ddtree.verify.session import Session

_WEIGHTS = ("model", "drafter")
_REVISIONS = {"model_revision": "model", "drafter_revision": "drafter"}
_DIGITS = 6
"""Of fractions: an engine may keep them in float32."""


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
    if session.process is not None and expectation.unit is not None and session.process.unit == expectation.unit:
        yield hold_command(session.process, expectation)


def _hold(session: Session, name: str, wanted: Any, on_host: dict[str, Any]) -> Finding:
    effective, origin = session.effective, _origin(session, name)
    label = SETTINGS[name]
    claim = f"{label} is {told(wanted)}"
    if name in effective.settings:
        found, source = effective.settings[name], effective.source
    elif name in on_host:
        found, source = on_host[name], "command line of the process that listens"
    elif name in _REVISIONS:
        return _hold_revision(session, name, wanted, on_host)
    else:
        return unknown(
            "settings",
            claim,
            f"declared by {origin}; {effective.engine} does not tell it",
            remedy="run verify on the server's machine, where its command line can be read",
            is_required=name != "cuda_graphs",  # whether they are replayed is found out by a probe of its own
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


def hold_command(process: HostProcess, expectation: Expectation) -> Finding:
    """Of a service that `ddtree deploy` put in place: whatever stands in the file reached the process."""
    wanted, found = without_secrets(expectation.command), process.arguments
    claim = f"{expectation.unit} runs the command that {expectation.origin} renders to"
    if found[-len(wanted) :] == wanted:
        return proven("settings", claim, f"command line of process {process.pid}")
    missing, others = ([w for w in one if w not in two] for one, two in ((wanted, found), (found[1:], wanted)))
    return violated(
        "settings",
        claim,
        f"not on the command line of process {process.pid}: {' '.join(missing) or 'nothing'}",
        f"on it beside: {' '.join(others) or 'nothing'}",
        remedy="see: ddtree deploy diff; then apply the file, or correct it",
    )


def _hold_revision(session: Session, name: str, wanted: str, on_host: dict[str, Any]) -> Finding:
    """Held against the folder that the engine says it reads."""
    weights, claim = _REVISIONS[name], f"{SETTINGS[name]} is {wanted}"
    folder = session.effective.settings.get(weights) or on_host.get(weights)
    if not isinstance(folder, str):
        seen = Seen(None, f"{session.effective.engine} does not tell where its {weights} comes from")
    else:
        try:
            seen = commit_of(folder.rstrip("/"), session.options.read)
        except UserError as error:
            seen = Seen(None, error.cause)
    if seen.commit is None:
        return unknown(
            "settings",
            claim,
            seen.source,
            remedy="fetch the weights with ddtree fetch, whose lock file tells the commit, or verify on that machine",
        )
    if seen.commit == wanted and not seen.is_altered:
        return proven("settings", claim, seen.source)
    return violated(
        "settings",
        claim,
        f"{seen.source}: {seen.commit}",
        remedy=f"fetch {weights} anew at this commit, check it with ddtree fetch --check, and start the server again",
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
        return round(float(value), _DIGITS)
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
    if isinstance(value, float):
        return str(round(value, _DIGITS))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
