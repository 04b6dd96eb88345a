"""A deployment file's sections, each sound in itself; `Deployment` also refuses what cannot go together."""

from __future__ import annotations

from typing import Literal

from ddtree.deploy.section import Section
from ddtree.deploy.sections import (
    Drafter,
    Engine,
    Expect,
    Host,
    Model,
    Parallelism,
    Runtime,
    Secrets,
    Service,
    Speculation,
)


class Declaration(Section):
    """Everything that decides how a model is served: engine, weights, speculation, service and host."""

    engine: Engine
    model: Model
    drafter: Drafter | None = None
    parallelism: Parallelism = Parallelism()
    speculation: Speculation
    runtime: Runtime = Runtime()
    service: Service
    secrets: Secrets = Secrets()
    host: Host = Host()
    expect: Expect = Expect()

    @property
    def name(self) -> str:
        """Of the service."""
        return self.service.name

    @property
    def served_name(self) -> str | None:
        """The name that clients give, where the file decides it: served_name, else the repository's or folder's."""
        if self.model.served_name:
            return self.model.served_name
        if self.model.demo:
            return "smollm2-135m-instruct"
        return self.model.hub or (self.model.path or "").rsplit("/", 1)[-1]

    @property
    def restart(self) -> str:
        """When the service is started again: as written, else by the supervisor's default."""
        return self.service.restart or ("on-failure" if self.service.supervisor == "systemd" else "no")

    @property
    def privilege(self) -> Literal["root", "sudo", "none"]:
        """How the host is changed; none where the supervisor needs no rights."""
        return "none" if self.service.supervisor == "process" else self.host.privilege or "root"

    @property
    def expects_cuda_graphs(self) -> bool:
        """Whether graphs should be seen to be replayed."""
        if self.expect.cuda_graphs is not None:
            return self.expect.cuda_graphs
        return self.runtime.device == "cuda" and self.runtime.cuda_graphs is not False
