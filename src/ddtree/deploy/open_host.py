"""From a deployment file to its host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddtree.deploy.deployment import Deployment
from ddtree.deploy.host import Host
from ddtree.deploy.local_host import LocalHost
from ddtree.deploy.ssh_host import SshHost


@contextlib.contextmanager
def open_host(deployment: Deployment) -> Iterator[Host]:
    """The host of a deployment, with the rights that its supervisor needs.

    Raises:
        HostError: it is not reached, its key is not known, or the rights are not to be had.
    """
    privilege = deployment.privilege
    host = SshHost(deployment.host, privilege) if deployment.host.kind == "ssh" else LocalHost(privilege)
    try:
        if privilege != "none":
            host.require_root()
        yield host
    finally:
        host.close()
