"""Signing a kit: only one that is whole, and without a moment in which it is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ddtree.errors import UserError
from ddtree.kit.check import check_folder
from ddtree.kit.durable import replacing
from ddtree.kit.signature import sign


def sign_kit(place: Path, key: Path) -> str:
    """Sign a kit that is a folder; returns the key's fingerprint.

    Raises:
        UserError: it is no folder, does not pass its check, or the key does not sign.
    """
    if not place.is_dir():
        raise UserError(f"{place} is no folder", "unpack the kit, sign it, and pack it again")
    found = check_folder(place)
    if not found.is_whole:
        raise UserError(f"{place} does not pass its check: {found.faults[0]}", "sign nothing that is damaged")
    with replacing(place) as draft:
        # The payload is the same files under a second name; what a signature changes is written as new files.
        shutil.copytree(place, draft, dirs_exist_ok=True, copy_function=os.link)
        return sign(draft, key)
