"""What was deployed when, and how it went: kept on the host, oldest first."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ddtree.deploy.deployment import Deployment, to_deployment
from ddtree.deploy.host import Host, HostError
from ddtree.deploy.render import Rendered
from ddtree.deploy.supervisor import ProcessIdentity

KEPT = 30
"""Releases; older ones are forgotten, the last good one never."""

ReleaseState = Literal["applying", "good", "failed"]

_LIST = 'for file in "$1"/releases/*/release.json; do [ -f "$file" ] && cat -- "$file" && echo; done; exit 0'
_FORGET = 'cd -- "$1/releases" || exit 0; shift; rm -rf -- "$@"'


@dataclass(frozen=True)
class Release:
    """One apply or rollback.

    Attributes:
        number: counts up from 1.
        state: applying: under way, or broken off where nobody holds the lock.
        begun: UTC, ISO 8601.
        by: user and machine that deployed.
        ddtree: version that rendered it.
        digest: of what was rendered.
        note: what it was for, or why it failed.
        ready_s: how long the first completion took to come; None if it never did.
        identity: of the process that answered.
    """

    number: int
    state: ReleaseState
    begun: str
    by: str
    ddtree: str
    digest: str
    note: str = ""
    ready_s: float | None = None
    identity: ProcessIdentity | None = None

    @property
    def folder(self) -> str:
        """Its name below ``releases``."""
        return f"{self.number:05d}"


class Releases:
    """The releases of one service on one host."""

    def __init__(self, host: Host, state_folder: str) -> None:
        self._host, self._folder = host, state_folder

    def all(self) -> list[Release]:
        """Oldest first; one that cannot be read is left out, as if it had never been finished."""
        told = self._host.run(_LIST, self._folder, privileged=True)
        found = []
        for line in told.stdout.splitlines():
            try:
                found.append(_release(json.loads(line)))
            except (ValueError, TypeError, KeyError):
                continue
        return sorted(found, key=lambda release: release.number)

    def last_good(self, before: int | None = None) -> Release | None:
        """The newest one that answered; ``before`` leaves out that number and later ones."""
        good = [one for one in self.all() if one.state == "good" and (before is None or one.number < before)]
        return good[-1] if good else None

    def begin(self, release: Release, deployment: Deployment, rendered: Rendered) -> None:
        """Record a release with all that is needed to come back to it; the record itself comes last."""
        place = f"{self._folder}/releases/{release.folder}"
        content = deployment.model_dump(mode="json", exclude_unset=True)
        self._write(f"{place}/deployment.json", content)
        kept = {
            "command": rendered.command,
            "environment": dict(rendered.environment),
            "unit_name": rendered.unit_name,
            "unit": rendered.unit,
        }
        self._write(f"{place}/rendered.json", kept)
        self.record(release)

    def record(self, release: Release) -> None:
        """Write how a release is."""
        self._write(f"{self._folder}/releases/{release.folder}/release.json", asdict(release))

    def deployment(self, release: Release) -> Deployment:
        """As it was deployed, checked again.

        Raises:
            HostError: it is gone.
            UserError: this version of ddtree refuses it.
        """
        data = self._read(release, "deployment.json")
        return to_deployment(data, told=f"release {release.number}")

    def rendered(self, release: Release) -> Rendered:
        """As it was rendered then, byte for byte; its secret files are those of its deployment."""
        from ddtree.deploy.render import render

        kept = self._read(release, "rendered.json")
        files = render(self.deployment(release)).secret_files
        return Rendered(tuple(kept["command"]), kept["environment"], kept["unit_name"], kept["unit"], files)

    def forget_old(self) -> None:
        """Forget releases beyond those to keep."""
        every = self.all()
        good = self.last_good()
        old = [one for one in every[:-KEPT] if good is None or one.number != good.number]
        if old:
            self._host.run(_FORGET, self._folder, *[one.folder for one in old], privileged=True)

    def finish(self, release: Release, state: ReleaseState, **facts: Any) -> Release:
        """Record how it ended."""
        ended = replace(release, state=state, **facts)
        self.record(ended)
        return ended

    def _write(self, path: str, content: Any) -> None:
        self._host.write(path, (json.dumps(content) + "\n").encode(), mode=0o600, privileged=True)

    def _read(self, release: Release, name: str) -> dict[str, Any]:
        path = f"{self._folder}/releases/{release.folder}/{name}"
        content = self._host.read(path, privileged=True)
        try:
            data: dict[str, Any] = json.loads(content or b"")
        except ValueError:
            raise HostError(f"{path} on {self._host.name} is gone or broken", "apply a deployment file anew") from None
        return data


def _release(data: dict[str, Any]) -> Release:
    identity = data.pop("identity", None)
    return Release(**data, identity=ProcessIdentity(**identity) if identity else None)
