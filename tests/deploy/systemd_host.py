"""A real systemd host with an SSH server, in a folder and a network namespace of its own.

Its root file system is built once by debootstrap and kept in the user's cache folder; every host boots from a copy. The
interpreter, the packages and the sources that the tests run with are mounted into it read-only below /opt, so that it
serves with what is tested; /opt/ddtree/bin/ddtree starts that. Nothing but this machine can reach it: the namespace has
one address on one virtual cable to this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ddtree
from ddtree.user_cache import cache_folder

TOOLS = ("debootstrap", "systemd-nspawn", "ssh", "ssh-keygen", "ip")
PACKAGES = ("systemd", "systemd-sysv", "dbus", "openssh-server", "sudo")
LIBRARIES = (
    "libbz2-1.0 libexpat1 libffi8 libgomp1 liblzma5 libncursesw6 libreadline8 libsqlite3-0 libssl3 libstdc++6 zlib1g"
)
"""What the interpreter from this machine may want to load there."""
WRAPPER = """#!/bin/sh
export PYTHONPATH=/opt/src:/opt/packages LD_LIBRARY_PATH=/opt/python/lib PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
exec /opt/python/bin/{python} -m ddtree "$@"
"""
SSHD = """
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM yes
"""


class NoSuchHost(Exception):
    """This machine cannot run such a host; the text says why."""


class SystemdHost:
    """A running host.

    Attributes:
        address: of its SSH server, on port 22.
        root: its root file system, seen from here.
        key: private key that lets root, deploy (sudo without a password) and plain (no sudo) in.
        known_hosts: holds its host key.
    """

    def __init__(self, address: str, root: Path, key: Path, known_hosts: Path, command: list[str], console: Path):
        self.address, self.root, self.key, self.known_hosts = address, root, key, known_hosts
        self._command, self._console = command, console
        self._boot()

    def ssh(self, command: str, user: str = "root") -> str:
        """Run something on it, as a person would."""
        options = ["-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={self.known_hosts}", "-i", str(self.key)]
        done = subprocess.run(
            ["ssh", *options, f"{user}@{self.address}", command], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def reboot(self) -> None:
        """Let it go down in order, and come up again with what its disk holds."""
        with suppress(subprocess.CalledProcessError):  # the connection goes with it
            self.ssh("systemctl reboot")
        try:
            self._process.wait(timeout=60)  # systemd-nspawn ends, and leaves the restart to who started it
        except subprocess.TimeoutExpired:
            raise NoSuchHost("the host did not go down within 60 s") from None
        self._boot()

    def shut_down(self) -> None:
        self._process.send_signal(signal.SIGTERM)  # which it takes for the power button
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _boot(self) -> None:
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 90
        while not self._is_up():
            if self._process.poll() is not None:
                raise NoSuchHost(f"systemd-nspawn ended: {self._console.read_text(errors='replace').strip()[-200:]}")
            if time.monotonic() > deadline:
                self.shut_down()
                raise NoSuchHost("the host did not boot within 90 s")
            time.sleep(0.3)

    def _is_up(self) -> bool:
        try:
            return self.ssh("systemctl is-system-running --wait || true").strip() in ("running", "degraded")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False


@contextmanager
def systemd_host(scratch: Path, mounts: dict[Path, str], number: int | None = None) -> Iterator[SystemdHost]:
    """Boot a host; ``mounts``: what of this machine it sees read-only, and where. ``number``: for several at once.

    Raises:
        NoSuchHost: this machine cannot.
    """
    _require_tools()
    image = _image()
    number = os.getpid() if number is None else number
    name = f"ddt{number % 100000}"
    near, far = f"10.213.{number % 250}.1", f"10.213.{number % 250}.2"
    root, key = scratch / "root", scratch / "key"
    _do("cp", "-a", "--reflink=auto", str(image), str(root))
    _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    _set_up(root, key, far)
    known_hosts = scratch / "known_hosts"
    known_hosts.write_text(f"{far} {(root / 'etc/ssh/ssh_host_ed25519_key.pub').read_text()}")
    ours = {
        Path(sys.base_prefix): "/opt/python",
        Path(sysconfig.get_path("purelib")): "/opt/packages",
        Path(ddtree.__file__).parents[1]: "/opt/src",
    }
    command = ["systemd-nspawn", "--quiet", "--boot", f"--directory={root}", f"--machine={name}", "--register=no"]
    command += ["--keep-unit", f"--network-namespace-path=/run/netns/{name}", "--console=pipe"]
    command += [f"--bind-ro={here}:{there}" for here, there in {**ours, **mounts}.items()]
    try:
        _do("ip", "netns", "add", name)
        _do("ip", "link", "add", name, "type", "veth", "peer", "name", "host0", "netns", name)
        _do("ip", "address", "add", f"{near}/30", "dev", name)
        _do("ip", "link", "set", name, "up")
        _do("ip", "-n", name, "address", "add", f"{far}/30", "dev", "host0")
        _do("ip", "-n", name, "link", "set", "host0", "up")
        _do("ip", "-n", name, "link", "set", "lo", "up")
        host = SystemdHost(far, root, key, known_hosts, command, scratch / "console.log")
        try:
            try:
                host.ssh("/opt/ddtree/bin/ddtree --version")
            except subprocess.CalledProcessError as error:
                raise NoSuchHost(f"this interpreter does not run there: {error.stderr.strip()}") from None
            yield host
        finally:
            host.shut_down()
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(root, ignore_errors=True)


def _set_up(root: Path, key: Path, address: str) -> None:
    """Users, their key, the SSH server's address, and the program that serves."""
    (root / "etc/ssh/sshd_config").write_text(f"{SSHD}ListenAddress {address}\n")
    for user in ("deploy", "plain"):
        _do("chroot", str(root), "useradd", "--create-home", "--shell", "/bin/sh", user)
    (root / "etc/sudoers.d/deploy").write_text("deploy ALL=(ALL) NOPASSWD: ALL\n")
    for home in ("root", "home/deploy", "home/plain"):
        folder = root / home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(key.with_suffix(".pub"), folder / "authorized_keys")
        owner = (root / home).stat()
        for path in (folder, folder / "authorized_keys"):
            os.chown(path, owner.st_uid, owner.st_gid)
    wrapper = root / "opt/ddtree/bin/ddtree"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(WRAPPER.format(python=f"python{sys.version_info.major}.{sys.version_info.minor}"))
    wrapper.chmod(0o755)


def _require_tools() -> None:
    if platform.system() != "Linux":
        raise NoSuchHost("it takes Linux")
    if os.geteuid() != 0:
        raise NoSuchHost("it takes root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoSuchHost(
            f"{', '.join(missing)} missing: apt-get install debootstrap systemd-container openssh-client iproute2"
        )
    if platform.freedesktop_os_release().get("ID") != "debian":
        raise NoSuchHost("this machine is no Debian, so its interpreter may not run in a Debian host")


def _image() -> Path:
    """The root file system to boot copies of; built where it is not kept yet."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    recipe = hashlib.sha256(repr((1, release, PACKAGES, LIBRARIES, platform.machine())).encode()).hexdigest()[:12]
    folder = cache_folder() / "test-hosts"
    image = folder / f"{release}-{recipe}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if image.is_dir():
            return image
        print(f"building a {release} host in {image}: about a minute, once", file=sys.stderr, flush=True)
        new = folder / f"{image.name}.new"
        shutil.rmtree(new, ignore_errors=True)
        include = ",".join((*PACKAGES, *LIBRARIES.split()))
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={include}", release, str(new)],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(new, ignore_errors=True)
            raise NoSuchHost(f"debootstrap failed: {done.stdout.strip().splitlines()[-1:]}")
        for bulk in ("usr/share/doc", "usr/share/locale", "var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(new / bulk, ignore_errors=True)
        new.rename(image)
    return image


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise NoSuchHost(f"{' '.join(command[:4])} failed: {done.stderr.strip()}")
