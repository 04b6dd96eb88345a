"""Secrets on the host: the new ones are put in place with the old ones at hand, until it is known whether it works."""

from __future__ import annotations

from ddtree.deploy.host import Host, HostError
from ddtree.deploy.render import SecretFile
from ddtree.deploy.supervisor import Supervisor

# One that is there already is from an apply that was broken off, and older than what lies in place.
_PUT_ASIDE = '[ -e "$1.previous" ] || [ ! -e "$1" ] || cp -p -- "$1" "$1.previous"'
_KEEP = 'rm -f -- "$1.previous"'
# Without a previous one the file was not there before.
_BACK = 'if [ -e "$1.previous" ]; then mv -f -- "$1.previous" "$1"; else rm -f -- "$1"; fi'


# What an apply that was broken off put aside, in a folder of secrets.
_ALL_BACK = 'for old in "$1"/*.previous; do [ -f "$old" ] && mv -f -- "$old" "${old%.previous}"; done; exit 0'


class SecretSwap:
    """The secret files of one apply. No part of a release: going back to one must not bring an old key back."""

    def __init__(self, host: Host, supervisor: Supervisor, files: tuple[SecretFile, ...]) -> None:
        self._host = host
        self._contents = {supervisor.secret_path(file.path): file.content() for file in files}
        self._put: list[str] = []

    def put(self) -> None:
        """Put the new ones in place, mode 0600."""
        for path, content in self._contents.items():
            told = self._host.run(_PUT_ASIDE, path, privileged=True)
            if told.exit_code:
                raise HostError(f"cannot put {path} aside on {self._host.name} ({told.trouble})", "check the disk")
            self._put.append(path)
            self._host.write(path, content, mode=0o600, privileged=True)

    def keep(self) -> None:
        """It works: forget the old ones."""
        self._each(_KEEP)

    def back(self) -> None:
        """It does not: as it was before."""
        self._each(_BACK)

    def _each(self, script: str) -> None:
        for path in self._put:
            self._host.run(script, path, privileged=True)


def bring_back(host: Host, folder: str) -> None:
    """Undo what an apply that was broken off did to the secrets in ``folder``."""
    host.run(_ALL_BACK, folder, privileged=True)
