"""A kit in a git repository, with a message that carries the verdict."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ddtree.errors import UserError
from ddtree.kit.bag import MANIFEST, PAYLOAD, TAG_MANIFEST
from ddtree.kit.record import KIT, KitRecord

LARGEST_WHOLE_BYTES = 50 << 20
_PARTS = (
    *("bagit.txt", "bag-info.txt", MANIFEST, TAG_MANIFEST),
    *(f"{PAYLOAD}/{name}" for name in (KIT, "README.md", "REPORT.md", "deployment.toml", "verify.json")),
)


def require_repository(folder: Path) -> None:
    """Refuse a place that git does not know, before anything is captured."""
    near = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    _git(near, "rev-parse", "--show-toplevel")


def commit_kit(place: Path, kit: KitRecord) -> str:
    """Commit the kit, or of a large one its manifests and report; returns the commit.

    Nothing else that is staged goes with it.

    Raises:
        UserError: the kit is in no repository, or git refuses.
    """
    where = place.absolute().parent
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    is_whole = size <= LARGEST_WHOLE_BYTES
    paths = [place.name] if is_whole else [f"{place.name}/{part}" for part in _PARTS if (place / part).exists()]
    _git(where, "-c", "core.autocrlf=false", "add", "--force", "--", *paths)
    _git(where, "commit", "--quiet", "--message", message_of(kit, is_whole), "--", *paths)
    return _git(where, "rev-parse", "HEAD").strip()


def message_of(kit: KitRecord, is_whole: bool) -> str:
    """The commit's message."""
    subject = f"Kit {kit.name}: {kit.verdict}"
    body = [f"{place.name}: {place.verdict} ({place.engine})" for place in kit.places]
    if kit.even_if_failing:
        body.append("Sealed although not every service is proven to do what it declares.")
    body.append(f"{len(kit.experiments)} measured configurations, sealed {kit.sealed} by {kit.tool}.")
    if not is_whole:
        body.append("Manifests and report only: the kit is larger than 50 MiB.")
    return "\n".join([subject, "", *body])


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    except FileNotFoundError:
        raise UserError("there is no git on this machine", "install it, or leave --git out") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"git does not commit the kit ({lines[-1] if lines else 'no reason given'})", "leave --git out")
    return done.stdout
