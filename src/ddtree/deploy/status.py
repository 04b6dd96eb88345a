"""How a service is right now, as its supervisor, its port and its history tell."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.deploy.listeners import Listener
from ddtree.deploy.ready import gpu_memory
from ddtree.deploy.release import Release
from ddtree.deploy.site import Site
from ddtree.deploy.supervisor import ServiceState


@dataclass(frozen=True)
class Status:
    """What was seen.

    Attributes:
        name, host: which service, and where.
        state: in the supervisor's words.
        listeners: who holds the port, as far as connections to the service could reach them.
        release: the newest good one, which is what is installed.
        broken_off: an apply began and did not end; it may be under way.
        gpu_used_mib, gpu_total_mib: of all GPUs of the host; None where it has none.
    """

    name: str
    host: str
    port: int
    state: ServiceState
    listeners: tuple[Listener, ...]
    release: Release | None
    broken_off: Release | None
    gpu_used_mib: int | None = None
    gpu_total_mib: int | None = None

    @property
    def is_up(self) -> bool:
        """Its process runs, holds the port, and nobody else does."""
        return self.state.status == "running" and bool(self.listeners) and all(one.is_ours for one in self.listeners)

    def lines(self) -> list[tuple[str, str]]:
        """Name and value, for people."""
        told = [("service", f"{self.name} on {self.host}"), ("state", f"{self.state.status}: {self.state.detail}")]
        if self.state.restarts:
            told.append(("restarts", f"{self.state.restarts} since it was started"))
        if self.state.identity:
            told.append(("process", str(self.state.identity.pid)))
        if not self.listeners:
            told.append(("port", f"{self.port}: nobody listens"))
        for one in self.listeners:
            told.append(
                ("port", f"{self.port} on {one.address}: {'held by it' if one.is_ours else 'held by another!'}")
            )
        if self.release:
            told.append(("release", f"{self.release.number} of {self.release.begun} by {self.release.by}"))
        if self.broken_off:
            told.append(
                ("beware", f"release {self.broken_off.number} is under way or was broken off: apply or rollback")
            )
        if self.gpu_used_mib is not None and self.gpu_total_mib is not None:
            told.append(("GPU", f"{self.gpu_used_mib / 1024:.1f} of {self.gpu_total_mib / 1024:.0f} GiB used"))
        return told


def look(site: Site) -> Status:
    """Look at a service without touching it."""
    deployment, every = site.deployment, site.releases.all()
    good = [one for one in every if one.state == "good"]
    last = every[-1] if every else None
    used, total = gpu_memory(site.host) or (None, None)
    service = deployment.service
    return Status(
        name=deployment.name,
        host=site.host.name,
        port=service.port,
        state=site.supervisor.state(),
        listeners=tuple(one for one in site.supervisor.listeners(service.port) if one.serves(service.address)),
        release=good[-1] if good else None,
        broken_off=last if last and last.state == "applying" else None,
        gpu_used_mib=used,
        gpu_total_mib=total,
    )
