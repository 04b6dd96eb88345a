"""This machine as a host."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence

from ddtree.deploy.host import HostError, Lock, LockedError, Privilege, in_url
from ddtree.deploy.shell_host import ShellHost


class _FileLock:
    """Held by an open file of this process: nothing between here and there can break."""

    def keep(self) -> None:
        """Nothing to do."""


class LocalHost(ShellHost):
    """The machine that ddtree runs on."""

    def __init__(self, privilege: Privilege) -> None:
        super().__init__("this machine", privilege)

    def _argv(self, command: Sequence[str]) -> list[str]:
        return list(command)

    @contextlib.contextmanager
    def lock(self, path: str, holder: str, *, privileged: bool = False) -> Iterator[Lock]:
        if privileged and self.privilege == "sudo":
            with super().lock(path, holder, privileged=True) as lock:
                yield lock
            return
        # Without another user there is no need for the flock command, which macOS lacks.
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostError(f"cannot lock {path} ({error.strerror})", "check its rights") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                by = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise LockedError(self.name, by) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{holder}\n".encode(), 0)
            yield _FileLock()
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def reach(self, address: str, port: int) -> Iterator[str]:
        yield f"http://{in_url(address)}:{port}"

    def close(self) -> None:
        """Nothing is kept open."""
