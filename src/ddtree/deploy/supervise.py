"""From a deployment file and its host to its supervisor."""

from __future__ import annotations

from ddtree.deploy.deployment import Deployment
from ddtree.deploy.host import Host
from ddtree.deploy.process_supervisor import ProcessSupervisor
from ddtree.deploy.supervisor import Supervisor
from ddtree.deploy.systemd_supervisor import SystemdSupervisor


def supervisor_of(deployment: Deployment, host: Host) -> Supervisor:
    """What keeps the service of ``deployment`` running on ``host``.

    Raises:
        HostError: the host has no such supervisor.
    """
    service = deployment.service
    log_file = None if service.log in (None, "journal") else service.log
    if service.supervisor == "process":
        return ProcessSupervisor(host, deployment.name, log_file, service.stop_timeout_s)
    return SystemdSupervisor(host, deployment.name, log_file)
