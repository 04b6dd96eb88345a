"""A systemd timer that verifies a server again and again, as text; whoever wants it puts it into place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.errors import UserError

_SPAN = re.compile(r"\d+(s|min|h|d)?")


@dataclass(frozen=True)
class TimerUnits:
    """Attributes:
    name: of both units, without ending.
    service, timer: their texts.
    """

    name: str
    service: str
    timer: str


def render_timer(
    name: str, command: Sequence[str], *, every: str, key_file: str | None, writes: Sequence[str] = ()
) -> TimerUnits:
    """Both units.

    Args:
        name: tells apart what is verified, such as the service's name or the host and port.
        command: absolute program and arguments of one verification, without the key.
        every: time between two runs, as systemd writes it: `10min`, `1h`.
        key_file: file of the API key on that machine; it reaches the process as a credential.
        writes: folders that it may write beside its own state.

    Raises:
        UserError: a value that systemd would not read as it is meant.
    """
    if not _SPAN.fullmatch(every):
        raise UserError(f"--every is {every!r}", "write a time such as 10min or 1h")
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "server"
    unit = f"ddtree-verify-{slug}"
    words = list(command) + (["--api-key-file", "%d/api-key"] if key_file else [])
    credential = f"LoadCredential=api-key:{_value(key_file)}\n" if key_file else ""
    paths = f"ReadWritePaths={' '.join(_value(path) for path in writes)}\n" if writes else ""
    service = f"""[Unit]
Description=Verify {_value(name)}
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
ExecStart={" ".join(_word(word) for word in words)}
Environment=DDTREE_CACHE=%S/{unit}
StateDirectory={unit}
{credential}{paths}DynamicUser=yes
TimeoutStartSec=3600
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
LockPersonality=yes
CapabilityBoundingSet=
SystemCallArchitectures=native
"""
    timer = f"""[Unit]
Description=Verify {_value(name)} every {every}

[Timer]
OnActiveSec=1min
OnUnitInactiveSec={every}
AccuracySec=10s

[Install]
WantedBy=timers.target
"""
    return TimerUnits(unit, service, timer)


def _value(text: str) -> str:
    """A literal value of a unit file."""
    if any(ord(c) < 32 for c in text):
        raise UserError(f"{text!r} has control characters", "leave them out")
    return text.replace("%", "%%")


def _word(word: str) -> str:
    """One argument of ExecStart; `%d` alone keeps its meaning."""
    escaped = word if word.startswith("%d/") else _value(word)
    escaped = escaped.replace("\\", "\\\\").replace("$", "$$").replace('"', '\\"')
    return f'"{escaped}"' if escaped != shlex.quote(escaped) or not escaped else escaped
