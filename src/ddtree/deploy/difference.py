"""What is on the host against what the deployment file comes to."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ddtree.deploy.render import render
from ddtree.deploy.site import Site


@dataclass(frozen=True)
class Difference:
    """How far a host is from a deployment file.

    Attributes:
        lines: unified diff, installed against rendered; empty where they are the same.
        is_absent: nothing of that name is installed.
    """

    lines: tuple[str, ...]
    is_absent: bool


def difference(site: Site) -> Difference:
    """Compare what is installed with what the deployment renders to; secrets are not looked at.

    Raises:
        HostError: the service there is not ddtree's, or is changed by drop-ins.
    """
    site.supervisor.refuse_foreign()
    installed = site.supervisor.installed()
    wanted = site.supervisor.told(render(site.deployment))
    lines = difflib.unified_diff(
        (installed or "").splitlines(),
        wanted.splitlines(),
        f"installed on {site.host.name}",
        "rendered",
        lineterm="",
        n=1,
    )
    return Difference(tuple(lines), installed is None)
