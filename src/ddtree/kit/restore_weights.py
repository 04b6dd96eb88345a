"""Weights of a kit onto a host: what is there is checked, what is missing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree.deploy.host import Host
from ddtree.errors import UserError
from ddtree.kit.names import checked
from ddtree.kit.record import FETCH, FetchList, WeightFile, read_record

_HASHING_S = 6 * 3600.0
_FETCH_S = 24 * 3600.0
# Prints a name for each file that is right.
_LOOK = """
cd -- "$1" 2>/dev/null || exit 0
shift
while [ $# -gt 1 ]; do
    if [ -f "$2" ] && [ "$(sha256sum -- "$2" | cut -c1-64)" = "$1" ]; then printf '%s\\n' "$2"; fi
    shift 2
done
"""
_FETCH_ONE = """
set -eu
cd -- "$1"
mkdir -p -- "$(dirname -- "$2")"
part="$2.ddtree-kit-part"
if command -v curl >/dev/null; then curl -fsSL --retry 3 -C - -o "$part" -- "$4"
elif command -v wget >/dev/null; then wget -q -c -O "$part" -- "$4"
else echo "neither curl nor wget is installed" >&2; exit 1; fi
[ "$(sha256sum -- "$part" | cut -c1-64)" = "$3" ] || {
    rm -f -- "$part"
    echo "its content is another one" >&2
    exit 1
}
sync "$part" 2>/dev/null || sync
mv -f -- "$part" "$2"
"""


@dataclass(frozen=True)
class WeightsPlan:
    """What is to be done for one folder of weights.

    Attributes:
        missing: files that are not there, or not right.
        by_hand: those of them that nothing says where to get.
    """

    name: str
    path: str | None
    fetch: FetchList
    missing: tuple[WeightFile, ...]
    by_hand: tuple[WeightFile, ...]

    @property
    def missing_bytes(self) -> int:
        return sum(each.size_bytes for each in self.missing)


def look_at_weights(host: Host, folder: Path, name: str, path: str | None) -> WeightsPlan:
    """Compare a folder on the host with ``fetch.json``.

    Args:
        folder: of the kit, that holds ``fetch.json``.
        path: on the host; None where the engine fetches for itself.
    """
    fetch = read_record(FetchList, folder / FETCH)
    if path is None or not fetch.files:
        return WeightsPlan(name, path, fetch, (), ())
    words = [word for each in fetch.files for word in (each.sha256, checked(each.path))]
    told = host.run(_LOOK, path, *words, privileged=True, timeout_s=_HASHING_S)
    right = set(told.stdout.splitlines())
    missing = tuple(each for each in fetch.files if each.path not in right)
    return WeightsPlan(name, path, fetch, missing, tuple(each for each in missing if not each.in_kit and not each.url))


def bring_weights(host: Host, folder: Path, plan: WeightsPlan, is_local: bool) -> None:
    """Put every missing file in place, checked.

    Raises:
        UserError: one cannot be had; what came is kept, and is gone on with the next time.
    """
    assert plan.path is not None or not plan.missing
    if plan.by_hand:
        names = ", ".join(each.path for each in plan.by_hand[:5])
        raise UserError(
            f"{plan.path} on {host.name} lacks {names}, and the kit does not know where they come from",
            "bring them there by hand; fetch.json has their hashes",
        )
    for each in plan.missing:
        if each.in_kit:
            host.write(f"{plan.path}/{each.path}", (folder / each.path).read_bytes(), privileged=True)
    wanted = [each for each in plan.missing if not each.in_kit]
    if wanted and is_local and plan.path is not None:
        _fetch_here(wanted, Path(plan.path))
    elif wanted:
        told = host.run('mkdir -p -- "$1"', str(plan.path), privileged=True)
        if told.exit_code:
            raise UserError(f"cannot make {plan.path} on {host.name} ({told.trouble})", "check its rights")
        for each in wanted:
            words = (str(plan.path), each.path, each.sha256, str(each.url))
            told = host.run(_FETCH_ONE, *words, privileged=True, timeout_s=_FETCH_S)
            if told.exit_code:
                raise UserError(f"{each.path} did not come to {host.name} ({told.trouble})", "run restore again")


def _fetch_here(wanted: list[WeightFile], path: Path) -> None:
    from ddtree.fetch import Fetch, ListSource
    from ddtree.fetch.wanted import WantedFile

    files = tuple(WantedFile(each.path, each.size_bytes, each.sha256, None, str(each.url)) for each in wanted)
    Fetch(ListSource("fetch.json", "", files), path).run()
