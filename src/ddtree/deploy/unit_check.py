"""What systemd itself says about a unit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree.deploy.host import Host

# In a folder of its own and with the program stood in for where it is missing, so that a unit for another machine can
# be checked here too. Exit 69: this machine cannot check.
_CHECK = """
command -v systemd-analyze >/dev/null || { echo "systemd-analyze is not on it" >&2; exit 69; }
folder=$(mktemp -d) || exit 69
trap 'rm -rf -- "$folder"' EXIT
cat >"$folder/$1"
systemd-analyze verify --man=no "$folder/$1" 2>&1 </dev/null
"""
_CANNOT = 69


@dataclass(frozen=True)
class UnitCheck:
    """What came of it.

    Attributes:
        complaints: what systemd found, one line each; empty if nothing.
        unchecked: why it could not look, or None if it did.
    """

    complaints: tuple[str, ...]
    unchecked: str | None = None


def check_unit(host: Host, name: str, text: str, *, is_its_host: bool) -> UnitCheck:
    """Let ``systemd-analyze verify`` on ``host`` read a unit.

    Args:
        is_its_host: the unit is meant for ``host``: programs and users that it names must be there.
    """
    told = host.run(_CHECK, name, stdin=text.encode(), timeout_s=60)
    if told.exit_code == _CANNOT:
        return UnitCheck((), f"{host.name} cannot check units: {told.trouble}")
    lines = [re.sub(r"\S*/(?=" + re.escape(name) + ")", "", line) for line in told.stdout.splitlines()]
    ours = [line for line in lines if line.startswith(name)]
    if not is_its_host:
        ours = [line for line in ours if "is not executable" not in line]
    if not ours and told.exit_code and not any(" is not executable" in line for line in lines):
        return UnitCheck((), f"systemd-analyze on {host.name} failed: {lines[-1] if lines else told.trouble}")
    return UnitCheck(tuple(ours))
