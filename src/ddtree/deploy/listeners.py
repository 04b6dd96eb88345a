"""Who listens on a port of a host, read from the kernel's own tables."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ddtree.deploy.host import Host, HostError

# Standard input: the processes that count as ours, one number a line. Output: for each listening socket its address in
# the kernel's hexadecimal, and "ours" or "other". Without /proc (macOS), lsof tells the same; addresses are left plain.
SCRIPT = """
ours=$(cat)
if [ ! -r /proc/net/tcp ]; then
    command -v lsof >/dev/null || { echo "neither /proc nor lsof" >&2; exit 69; }
    lsof -nP -iTCP:"$1" -sTCP:LISTEN -Fpn | while read -r line; do
        case $line in
            p*) owner=other; for pid in $ours; do [ "p$pid" = "$line" ] && owner=ours; done ;;
            n*) name=${line#n}; echo "plain:${name%:*} $owner" ;;
        esac
    done
    exit 0
fi
hex=$(printf '%04X' "$1")
# The table first: a socket that begins to listen after it is seen next time, never taken for somebody else's.
held=$(for table in /proc/net/tcp /proc/net/tcp6; do
    [ -r "$table" ] || continue
    while read -r _ local _ state _ _ _ _ _ inode _; do
        [ "$state" = 0A ] && [ "${local##*:}" = "$hex" ] && echo "${local%:*} $inode"
    done <"$table"
done)
[ -n "$held" ] || exit 0
sockets=" $(for pid in $ours; do ls -l "/proc/$pid/fd" 2>/dev/null; done |
    sed -n 's/.*socket:\\[\\([0-9]*\\)\\]$/\\1/p' | tr '\\n' ' ')"
printf '%s\\n' "$held" | while read -r address inode; do
    case $sockets in *" $inode "*) echo "$address ours" ;; *) echo "$address other" ;; esac
done
"""


@dataclass(frozen=True)
class Listener:
    """A socket that listens on the port.

    Attributes:
        address: that it listens on.
        is_ours: a process of the service holds it.
    """

    address: str
    is_ours: bool

    def serves(self, address: str) -> bool:
        """Whether a connection to ``address`` could end up here."""
        try:
            wanted, own = ipaddress.ip_address(address), ipaddress.ip_address(self.address)
        except ValueError:
            return True  # a host name: it may
        if own.is_unspecified or wanted.is_unspecified:
            return own.version == wanted.version or own.version == 6 or wanted.version == 6
        return own == wanted


def find_listeners(host: Host, port: int, pids: tuple[int, ...], *, privileged: bool) -> tuple[Listener, ...]:
    """Every socket that listens on ``port``; those of ``pids`` are ours."""
    stdin = "".join(f"{pid}\n" for pid in pids).encode()
    told = host.run(SCRIPT, str(port), stdin=stdin, privileged=privileged)
    if told.exit_code:
        raise HostError(f"cannot see who listens on {host.name} ({told.trouble})", "install lsof, or mount /proc")
    pairs = [line.split() for line in told.stdout.splitlines()]
    return tuple(Listener(_address(address), owner == "ours") for address, owner in pairs)


def _address(told: str) -> str:
    """An address from the kernel's hexadecimal: four bytes at a time, each in the machine's (little) order."""
    if told.startswith("plain:"):
        plain = told.removeprefix("plain:").strip("[]")
        return "::" if plain == "*" else plain
    words = [bytes.fromhex(told[start : start + 8])[::-1] for start in range(0, len(told), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
