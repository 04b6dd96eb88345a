"""Another machine as a host, by the OpenSSH client.

The client rather than a library: it brings people's own configuration (names, jump hosts, agents, hardware keys), its
treatment of host keys is what everybody trusts, and it is on every machine that one would deploy from. One connection
is opened and shared by all that follows.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddtree.deploy.host import HostError, Privilege, in_url
from ddtree.deploy.sections import Host as HostSection
from ddtree.deploy.shell_host import ShellHost

CONNECT_TIMEOUT_S = 15
_WAY_FAILED = 255


class SshHost(ShellHost):
    """A machine that an SSH server runs on."""

    def __init__(self, section: HostSection, privilege: Privilege) -> None:
        assert section.address is not None
        super().__init__(section.address, privilege)
        if shutil.which("ssh") is None:
            raise HostError("no ssh command on this machine", "install the OpenSSH client")
        self._folder = tempfile.mkdtemp(prefix="ddtree-ssh-")  # short: sockets have paths of at most 104 bytes
        self._socket = str(Path(self._folder) / "c")
        self._target = f"{section.user}@{section.address}" if section.user else section.address
        self._options = [
            *("-o", "BatchMode=yes"),
            *("-o", "StrictHostKeyChecking=yes"),
            *("-o", "UpdateHostKeys=no"),
            *("-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"),
            *("-o", "ServerAliveInterval=10"),
            *("-o", "ServerAliveCountMax=3"),
            *("-o", "ForwardAgent=no"),
            *("-o", "ForwardX11=no"),
            *("-o", "RemoteCommand=none"),
            *("-o", "RequestTTY=no"),
            *("-o", f"ControlPath={self._socket}"),
        ]
        if section.port is not None:
            self._options += ["-p", str(section.port)]
        if section.identity_file is not None:
            self._options += ["-i", section.identity_file.replace("%", "%%"), "-o", "IdentitiesOnly=yes"]
        if section.known_hosts_file is not None:
            known = section.known_hosts_file.replace("%", "%%")
            self._options += ["-o", f'UserKnownHostsFile="{known}"', "-o", "GlobalKnownHostsFile=none"]
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Open the shared connection. It ends by itself five minutes after its last use, should this process die."""
        command = ["ssh", *self._options, "-o", "ControlMaster=yes", "-o", "ControlPersist=300", "-fN", self._target]
        with tempfile.TemporaryFile() as stderr:  # not a pipe: the connection would hold its end open
            try:
                exit_code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, timeout=60, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                raise HostError(
                    f"{self.name} did not answer ssh within 60 s", "look after it, then try again"
                ) from None
            stderr.seek(0)
            told = stderr.read().decode(errors="replace")
        if exit_code:
            raise self._refused(told)

    def _refused(self, told: str) -> HostError:
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in told:
            return HostError(
                f"{self.name} shows another host key than the one that is known",
                "find out why before anything else; then ssh-keygen -R its name, and ask the host's owner for its key",
            )
        if "Host key verification failed" in told or "host key is known" in told:
            return HostError(
                f"the host key of {self.name} is not known",
                "log in once with ssh and compare the fingerprint, or set host.known_hosts_file",
            )
        lines = [line.strip() for line in told.strip().splitlines() if line.strip()]
        trouble = lines[-1] if lines else "ssh gave no reason"
        if "Permission denied" in told:
            return HostError(f"{self.name} does not let us in ({trouble})", "check host.user and host.identity_file")
        return HostError(f"cannot reach {self.name} ({trouble})", "check host.address and host.port, and that it is up")

    def _argv(self, command: Sequence[str]) -> list[str]:
        if not Path(self._socket).exists():  # the host was restarted, or the line broke
            self._connect()
        return ["ssh", *self._options, "-o", "ControlMaster=no", "-T", self._target, "--", shlex.join(command)]

    def _check(self, completed: subprocess.CompletedProcess[bytes]) -> None:
        if completed.returncode == _WAY_FAILED:
            raise self._refused(completed.stderr.decode(errors="replace"))

    @contextlib.contextmanager
    def reach(self, address: str, port: int) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            own_port = free.getsockname()[1]
        forward = f"127.0.0.1:{own_port}:{in_url(address)}:{port}"
        self._control("forward", forward)
        try:
            yield f"http://127.0.0.1:{own_port}"
        finally:
            with contextlib.suppress(HostError):
                self._control("cancel", forward)

    def _control(self, verb: str, forward: str) -> None:
        if verb == "forward" and not Path(self._socket).exists():
            self._connect()
        command = ["ssh", *self._options, "-O", verb, "-L", forward, self._target]
        told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
        if told.returncode:
            raise self._refused(told.stderr.decode(errors="replace"))

    def close(self) -> None:
        if Path(self._socket).exists():
            command = ["ssh", *self._options, "-O", "exit", self._target]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
