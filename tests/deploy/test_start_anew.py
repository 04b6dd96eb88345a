"""A start is believed only where systemd tells a new invocation."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree.deploy.host import Completed, HostError
from ddtree.deploy.systemd_supervisor import SystemdSupervisor

SHOWN = """LoadState=loaded
ActiveState=active
SubState=running
MainPID=77
Result=success
InvocationID={invocation}
Started=boot:4242
"""


class HostOfOneUnit:
    """Tells what systemd tells of a unit; a restart that works gives it a new invocation."""

    name = "far"

    def __init__(self, *, restarts: bool) -> None:
        self._restarts, self._starts = restarts, 1

    def run(self, script: str, *arguments: str, **how: Any) -> Completed:
        if "systemctl restart" in script:
            self._starts += self._restarts
        if "systemctl show" in script:
            return Completed(0, SHOWN.format(invocation=f"start-{self._starts}"), "")
        return Completed(0, "", "")


def supervisor(*, restarts: bool) -> SystemdSupervisor:
    return SystemdSupervisor(HostOfOneUnit(restarts=restarts), "x")  # type: ignore[arg-type]


def test_a_new_invocation_of_the_same_number_is_another_process() -> None:
    """Numbers of processes are given again; the name of a start is not."""
    started = supervisor(restarts=True).start()
    assert (started.pid, started.invocation) == (77, "start-2")


def test_a_restart_that_left_the_old_process_is_refused() -> None:
    with pytest.raises(HostError, match="not started anew: systemd still tells invocation start-1"):
        supervisor(restarts=False).start()
