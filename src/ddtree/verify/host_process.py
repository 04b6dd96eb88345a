"""The process behind an address of this machine: who listens there, since when, and with which command line."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_LISTEN = "0A"
_SECRET = re.compile(r"(?i)(^|[-_])((api)?keys?|token|secrets?|pass(word|wd|phrase)?)$")
"""Names of flags and variables that hold one; `--prefill-tokens` does not."""


@dataclass(frozen=True)
class HostProcess:
    """A process of this machine.

    Attributes:
        start_ticks: clock ticks between boot and its start; with the pid, no other process has the same.
        arguments: its command line, secrets replaced by `***`.
        unit: the systemd service that it belongs to; None where it is of none.
    """

    pid: int
    start_ticks: int
    arguments: tuple[str, ...]
    unit: str | None = None

    @property
    def is_ssh(self) -> bool:
        """Whether it only passes on to another machine."""
        return re.match(r"(\S*/)?ssh(:|$)", self.arguments[0] if self.arguments else "") is not None

    @property
    def identity(self) -> str:
        return f"pid {self.pid}, started {self.start_ticks / os.sysconf('SC_CLK_TCK'):.2f} s after boot"


def listening_process(url: str, proc: Path = Path("/proc")) -> HostProcess | None:
    """The process that listens at ``url``; None where it is elsewhere, hidden from this user, or not to be found."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not parts.hostname or not _is_here(parts.hostname):
            return None
    except ValueError:
        return None
    inodes = {f"socket:[{inode}]" for inode in _listeners(proc, port)}
    if not inodes:
        return None
    for folder in proc.iterdir():
        if folder.name.isdigit() and _holds(folder, inodes):
            return read_process(int(folder.name), proc)
    return None


def read_process(pid: int, proc: Path = Path("/proc")) -> HostProcess | None:
    """A process by its number; None where it is gone."""
    try:
        raw = (proc / str(pid) / "cmdline").read_bytes()
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    words = [word.decode("utf-8", "replace") for word in raw.split(b"\0")[:-1]]
    return HostProcess(pid, int(stat.rpartition(")")[2].split()[19]), without_secrets(words), _unit(proc / str(pid)))


def _unit(folder: Path) -> str | None:
    try:
        groups = (folder / "cgroup").read_text().split()
    except OSError:
        return None
    names = [part for group in groups for part in group.split("/") if part.endswith(".service")]
    return names[-1] if names else None


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        pass
    try:
        with socket.create_server((host, 0)):  # only an address of this machine can be listened on
            return True
    except OSError:
        return False


def _listeners(proc: Path, port: int) -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.append(fields[9])
    return found


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        links = list((folder / "fd").iterdir())
    except OSError:
        return False
    return any(_target(link) in inodes for link in links)


def _target(link: Path) -> str | None:
    """What a file descriptor is; None where it was closed meanwhile, as connections are all the time."""
    try:
        return os.readlink(link)
    except OSError:
        return None


def without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """A command line that can be shown."""
    told: list[str] = []
    hides = False  # what follows a flag that holds a secret, until the next flag: vLLM takes several keys
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--"):
            hides = not equals and _SECRET.search(name) is not None
        if equals and _SECRET.search(name):
            told.append(f"{name}=***")
        else:
            told.append("***" if hides and not word.startswith("--") else word)
    return tuple(told)
