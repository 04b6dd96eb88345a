"""A machine that is deployed to: what it can be asked for, whichever way it is reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from ddtree.errors import UserError

Privilege = Literal["root", "sudo", "none"]


class HostError(UserError):
    """A host cannot be reached, or does not do what it was asked for."""


class LockedError(HostError):
    """Somebody else holds the lock."""

    def __init__(self, host_name: str, holder: str) -> None:
        super().__init__(
            f"{host_name} is being changed by {holder or 'somebody'}", "wait until that has ended, then try again"
        )


class Lock(Protocol):
    """A lock that is held."""

    def keep(self) -> None:
        """Make sure that it still is; where the connection broke meanwhile, take it again.

        Raises:
            LockedError: somebody else was faster.
            HostError: the host is not reached.
        """


@dataclass(frozen=True)
class Completed:
    """What a script on a host came to."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def trouble(self) -> str:
        """The last line it complained with."""
        lines = (self.stderr or self.stdout).strip().splitlines()
        return lines[-1].strip() if lines else f"exit code {self.exit_code}"


class Host(Protocol):
    """A machine, and the right to change it.

    Scripts are POSIX sh. Arguments arrive as ``$1``, ``$2``, ... whatever characters they hold.
    """

    @property
    def name(self) -> str:
        """As people know it."""

    @property
    def privilege(self) -> Privilege:
        """How ``privileged`` scripts come by their rights; with none they run as everything else does."""

    def run(
        self, script: str, *arguments: str, stdin: bytes = b"", privileged: bool = False, timeout_s: float = 60.0
    ) -> Completed:
        """Run ``script``; its exit code is the caller's to judge.

        Raises:
            HostError: the host is not reached, the rights are not to be had, or time ran out.
        """

    def stream(self, script: str, *arguments: str, privileged: bool = False) -> Iterator[str]:
        """The lines that ``script`` prints, as they come; it is ended with the iterator."""

    def read(self, path: str, *, privileged: bool = False) -> bytes | None:
        """Content of a file; None where there is none."""

    def write(self, path: str, content: bytes, *, mode: int = 0o644, privileged: bool = False) -> None:
        """Put a file in place at once, or not at all: never half of it, never with another mode in between."""

    def lock(self, path: str, holder: str, *, privileged: bool = False) -> AbstractContextManager[Lock]:
        """Hold a lock that ends with this process or its connection, however it ends.

        Raises:
            LockedError: somebody else holds it: the error names the holder.
        """

    def reach(self, address: str, port: int) -> AbstractContextManager[str]:
        """A base URL under which this machine reaches ``address``:``port`` as the host sees it."""

    def close(self) -> None:
        """End what was kept open."""


def in_url(address: str) -> str:
    """An address as URLs and forwards want it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
