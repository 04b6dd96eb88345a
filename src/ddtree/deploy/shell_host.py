"""What hosts have in common that can run a shell: files, locks and rights are scripts."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

from ddtree.deploy import script_lock
from ddtree.deploy.host import Completed, HostError, Lock, Privilege
from ddtree.deploy.script_lock import ScriptLock

_READ = '[ -e "$1" ] || [ -L "$1" ] || exit 44; cat -- "$1"'
_NO_FILE = 44

# The temporary file lies beside its target, so that the rename is one step of one file system. coreutils' sync takes a
# file; where it does not, everything is synchronised.
_WRITE = """
set -eu
umask 077
mkdir -p -- "$(dirname -- "$1")"
new="$1.new.$$"
trap 'rm -f -- "$new"' EXIT
cat >"$new"
[ "$(wc -c <"$new" | tr -d " ")" = "$3" ] || { echo "the connection broke" >&2; exit 1; }
chmod "$2" "$new"
sync "$new" 2>/dev/null || sync
mv -f -- "$new" "$1"
"""


class ShellHost:
    """Scripts by :meth:`_argv`; everything else by scripts.

    They run in sessions of their own: Ctrl-C is for ddtree, which still has to bring the host back.
    """

    def __init__(self, name: str, privilege: Privilege) -> None:
        self._name, self._privilege = name, privilege

    @property
    def name(self) -> str:
        return self._name

    @property
    def privilege(self) -> Privilege:
        return self._privilege

    def _argv(self, command: Sequence[str]) -> list[str]:
        """The command of this machine that runs ``command`` on the host."""
        raise NotImplementedError

    def _check(self, completed: subprocess.CompletedProcess[bytes]) -> None:
        """Raise where it is the way to the host that failed."""

    def run(
        self, script: str, *arguments: str, stdin: bytes = b"", privileged: bool = False, timeout_s: float = 60.0
    ) -> Completed:
        completed = self._run(script, arguments, stdin, privileged, timeout_s)
        told = completed.stdout.decode(errors="replace"), completed.stderr.decode(errors="replace")
        return Completed(completed.returncode, *told)

    def stream(self, script: str, *arguments: str, privileged: bool = False) -> Iterator[str]:
        argv = self._argv(self._shell(script, arguments, privileged))
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout
            try:
                for line in process.stdout:
                    yield line.decode(errors="replace").rstrip("\n")
            finally:
                process.terminate()

    def read(self, path: str, *, privileged: bool = False) -> bytes | None:
        completed = self._run(_READ, (path,), b"", privileged, 60.0)
        if completed.returncode == _NO_FILE:
            return None
        if completed.returncode:
            raise HostError(f"cannot read {path} on {self.name} ({_last_line(completed.stderr)})", "check its rights")
        return completed.stdout

    def _run(
        self, script: str, arguments: Sequence[str], stdin: bytes, privileged: bool, timeout_s: float
    ) -> subprocess.CompletedProcess[bytes]:
        argv = self._argv(self._shell(script, arguments, privileged))
        try:
            completed = subprocess.run(
                argv, input=stdin, capture_output=True, timeout=timeout_s, check=False, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            raise HostError(f"{self.name} did not answer within {timeout_s:g} s", "look after it, try again") from None
        except OSError as error:
            raise HostError(f"cannot run {argv[0]} ({error.strerror})", "install it") from None
        self._check(completed)
        if privileged and completed.returncode == 1 and completed.stderr.startswith(b"sudo: "):
            raise self._no_sudo(_last_line(completed.stderr))
        return completed

    def write(self, path: str, content: bytes, *, mode: int = 0o644, privileged: bool = False) -> None:
        told = self.run(_WRITE, path, f"{mode:o}", str(len(content)), stdin=content, privileged=privileged)
        if told.exit_code:
            raise HostError(f"cannot write {path} on {self.name} ({told.trouble})", "check its rights and the disk")

    @contextlib.contextmanager
    def lock(self, path: str, holder: str, *, privileged: bool = False) -> Iterator[Lock]:
        def failed(completed: subprocess.CompletedProcess[bytes]) -> HostError:
            self._check(completed)
            trouble = _last_line(completed.stderr)
            if completed.stderr.startswith(b"sudo: "):
                return self._no_sudo(trouble)
            return HostError(f"cannot lock {path} on {self.name} ({trouble})", "check its rights, and util-linux")

        lock = ScriptLock(
            self.name, lambda: self._argv(self._shell(script_lock.SCRIPT, (path, holder), privileged)), failed
        )
        try:
            yield lock
        finally:
            lock.release()

    def _shell(self, script: str, arguments: Sequence[str], privileged: bool) -> list[str]:
        elevated = ["sudo", "-n", "--"] if privileged and self.privilege == "sudo" else []
        return [*elevated, "sh", "-c", script, "sh", *arguments]

    def _no_sudo(self, trouble: str) -> HostError:
        return HostError(
            f"sudo -n does not work on {self.name} ({trouble})",
            'let that user run sudo without a password, or log in as root with host.privilege = "root"',
        )

    def require_root(self) -> None:
        """Refuse a host where ``privileged`` scripts would not be root's."""
        told = self.run("id -u", privileged=True)
        if told.stdout.strip() != "0":
            raise HostError(f"the user on {self.name} is not root", 'set host.privilege = "sudo", or deploy as root')


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no reason given"
