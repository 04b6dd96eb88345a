"""The process behind a service, as its host's kernel knows it."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from ddtree.deploy.host import Host
from ddtree.deploy.supervisor import ProcessIdentity

# base64: arguments and variables may hold any byte, and are told apart by NUL.
_LOOK = """
cd "/proc/$1" || exit 1
printf '%s\\n' "$(readlink exe)" "$(readlink cwd)"
base64 <cmdline | tr -d '\\n'; echo
base64 <environ | tr -d '\\n'; echo
"""


@dataclass(frozen=True)
class LiveProcess:
    """What runs, secrets and all: for the masker first, and then for the kit."""

    identity: ProcessIdentity
    executable: str | None
    folder: str | None
    arguments: tuple[str, ...]
    environment: dict[str, str]


def look_at(host: Host, identity: ProcessIdentity) -> LiveProcess | str:
    """The process; or why nothing is known of it."""
    told = host.run(_LOOK, str(identity.pid), privileged=True)
    lines = told.stdout.splitlines()
    if told.exit_code or len(lines) < 4:
        return f"the host does not show its processes' command lines and environments ({told.trouble})"
    words = _parts(lines[2])
    pairs = [part.partition("=") for part in _parts(lines[3])]
    return LiveProcess(
        identity, lines[0] or None, lines[1] or None, tuple(words), {name: value for name, _, value in pairs if name}
    )


def _parts(coded: str) -> list[str]:
    raw = base64.b64decode(coded)
    return [part.decode("utf-8", "replace") for part in raw.split(b"\0")[:-1]]
