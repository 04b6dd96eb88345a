"""One service on one host, opened for looking at it or changing it."""

from __future__ import annotations

import contextlib
import getpass
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from ddtree.deploy.deployment import Deployment
from ddtree.deploy.host import Host, Lock
from ddtree.deploy.open_host import open_host
from ddtree.deploy.release import Releases
from ddtree.deploy.supervise import supervisor_of
from ddtree.deploy.supervisor import Supervisor


@dataclass(frozen=True)
class Site:
    """One service on one host, with what is needed to change it."""

    deployment: Deployment
    host: Host
    supervisor: Supervisor
    releases: Releases

    @contextlib.contextmanager
    def locked(self) -> Iterator[Lock]:
        """Nobody else changes this service meanwhile.

        Raises:
            HostError: somebody does right now.
        """
        path = f"{self.supervisor.state_folder}/lock"
        holder = f"{deployer()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        with self.host.lock(path, holder, privileged=True) as lock:
            yield lock


@contextlib.contextmanager
def open_site(deployment: Deployment, host: Host | None = None) -> Iterator[Site]:
    """The place that a deployment is for; a ``host`` that is given stays open."""
    with contextlib.nullcontext(host) if host else open_host(deployment) as at:
        supervisor = supervisor_of(deployment, at)
        yield Site(deployment, at, supervisor, Releases(at, supervisor.state_folder))


def deployer() -> str:
    """User and machine, for people."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return f"{user}@{platform.node() or 'unknown'}"
