"""What keeps a service running on its host, and what it can tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from ddtree.deploy.listeners import Listener
from ddtree.deploy.render import Rendered


@dataclass(frozen=True)
class ProcessIdentity:
    """One process and no other: numbers are given again, this is not.

    Attributes:
        pid: of the main process.
        started: when, in the kernel's own count since this boot.
        invocation: a name for this start, which the process finds in its INVOCATION_ID.
    """

    pid: int
    started: str
    invocation: str


@dataclass(frozen=True)
class ServiceState:
    """How a service is.

    Attributes:
        status: absent: there is none of that name.
        identity: of the process that runs, if one does.
        detail: in the supervisor's words, such as why it ended.
        restarts: how often it was started again by itself.
    """

    status: Literal["absent", "stopped", "starting", "running", "failed"]
    identity: ProcessIdentity | None = None
    detail: str = ""
    restarts: int = 0


class Supervisor(Protocol):
    """Installs, starts, stops and watches one service on one host."""

    @property
    def state_folder(self) -> str:
        """On the host: where releases and the lock of this service are kept."""

    @property
    def secrets_folder(self) -> str:
        """On the host: what holds this service's secret files."""

    def secret_path(self, path: str) -> str:
        """On the host: where a secret file that was rendered with ``path`` goes."""

    def refuse_foreign(self) -> None:
        """Raise where a service of that name is somebody else's."""

    def install(self, rendered: Rendered) -> None:
        """Put what was rendered in place, secrets left out; the running process is left alone."""

    def remove(self) -> None:
        """Take it out again; it must be stopped."""

    def start(self) -> ProcessIdentity:
        """Start it, anew if it runs.

        Raises:
            HostError: it could not even be started.
        """

    def stop(self) -> None:
        """Stop it, with time to end in order."""

    def state(self) -> ServiceState:
        """How it is now."""

    def listeners(self, port: int) -> tuple[Listener, ...]:
        """Who listens on ``port`` of the host."""

    def installed(self) -> str | None:
        """What is in place now, as :func:`told` tells it; None where nothing is."""

    def told(self, rendered: Rendered) -> str:
        """What :meth:`install` would put in place, as text to compare."""

    def tail(self, lines: int, identity: ProcessIdentity | None = None) -> str:
        """The end of its log; of one process alone, where the log knows that. Control characters are written out."""

    def follow(self) -> Iterator[str]:
        """Its log as it grows, line by line. Control characters are written out."""
