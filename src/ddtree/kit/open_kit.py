"""A kit as a folder, whichever form it has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddtree.errors import UserError
from ddtree.kit.bag import PAYLOAD
from ddtree.kit.check import check_folder
from ddtree.kit.pack import ENDINGS, ending_of
from ddtree.kit.record import KIT, KitRecord, read_record
from ddtree.kit.unpack import extract


@contextmanager
def as_folder(place: Path) -> Iterator[Path]:
    """The kit's folder; an archive is unpacked for as long as the block lasts.

    Raises:
        UserError: there is none, or the archive is refused.
    """
    if place.is_dir():
        yield place
        return
    if not place.is_file():
        raise UserError(f"there is no kit {place}", f"name a folder, or a file with {' or '.join(ENDINGS)}")
    if ending_of(place) is None:
        raise UserError(f"{place} is no kit", f"name a folder, or a file with {' or '.join(ENDINGS)}")
    with tempfile.TemporaryDirectory(prefix="ddtree-kit-") as scratch:
        extract(place, Path(scratch))
        yield Path(scratch)


@contextmanager
def whole_kit(place: Path) -> Iterator[tuple[Path, KitRecord]]:
    """The payload of a kit that passes its check, and its record.

    Raises:
        UserError: it does not pass.
    """
    with as_folder(place) as folder:
        found = check_folder(folder)
        if not found.is_whole:
            more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
            raise UserError(f"{place} does not pass its check: {found.faults[0]}{more}", "see ddtree kit check")
        payload = folder / PAYLOAD
        yield payload, read_record(KitRecord, payload / KIT)
