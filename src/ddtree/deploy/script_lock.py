"""A lock that a script on the host holds for as long as it is listened to."""

from __future__ import annotations

import contextlib
import select
import subprocess
from collections.abc import Callable

from ddtree.deploy.host import HostError, LockedError

# The lock is the kernel's, on the file; what stands in it only tells who holds it. It ends with the script's standard
# input, that is with this process or the connection, however they end.
SCRIPT = """
umask 077
mkdir -p -- "$(dirname -- "$1")" || exit 1
command -v flock >/dev/null || { echo "no flock command" >&2; exit 69; }
exec 9<>"$1" || exit 1
flock -n 9 || { cat -- "$1"; exit 75; }
printf '%s\\n' "$2" >"$1"
echo locked
cat >/dev/null
"""
_IS_LOCKED = 75
_ANSWER_S = 60.0

Judge = Callable[[subprocess.CompletedProcess[bytes]], HostError]


class ScriptLock:
    """Held from the start until :meth:`release`.

    Args:
        argv: makes the command of this machine that runs the script on the host; it may connect anew.
        judge: says why the script failed, where it is not the lock.
    """

    def __init__(self, host_name: str, argv: Callable[[], list[str]], judge: Judge) -> None:
        self._host_name, self._argv, self._judge = host_name, argv, judge
        self._process = self._take()

    def keep(self) -> None:
        """Make sure that it is held: where the connection broke, take it again.

        Raises:
            LockedError: somebody else was faster.
            HostError: the host is not reached.
        """
        if self._process.poll() is not None:
            self._close(self._process)
            self._process = self._take()

    def release(self) -> None:
        """Let others have it."""
        self._close(self._process)

    def _take(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(self._argv(), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert process.stdout and process.stderr
        try:
            heard = process.stdout.readline() if select.select([process.stdout], [], [], _ANSWER_S)[0] else b""
            if heard.strip() == b"locked":
                return process
        except BaseException:
            self._close(process)
            raise
        if process.stdin:
            process.stdin.close()
        try:
            exit_code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._close(process)
            raise HostError(f"{self._host_name} gave no lock within a minute", "look after it, try again") from None
        trouble = process.stderr.read()
        self._close(process)
        if exit_code == _IS_LOCKED:
            raise LockedError(self._host_name, heard.decode(errors="replace").strip())
        raise self._judge(subprocess.CompletedProcess(process.args, exit_code, heard, trouble))

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # the script's cat ends, and the lock with it
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
