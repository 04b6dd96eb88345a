"""A kit that is made as one file: its folder is never seen, and nothing of it stays."""

from __future__ import annotations

from dataclasses import replace

from ddtree.errors import UserError
from ddtree.kit.capture import Tell
from ddtree.kit.create import CreateOptions, create
from ddtree.kit.durable import drafting
from ddtree.kit.pack import ending_of, pack, require_zstandard
from ddtree.kit.record import KitRecord


def create_archive(options: CreateOptions, tell: Tell = lambda stage: None) -> KitRecord:
    """Like :func:`ddtree.kit.create.create`, where ``options.out`` is the name of an archive.

    Raises:
        UserError: as there; or the file is there already, or its format needs what is not installed.
    """
    out = options.out.absolute()
    ending = ending_of(out)
    assert ending is not None
    if out.exists():
        raise UserError(f"{out} is there already", "give another place, or move it away")
    if ending == ".tar.zst":
        require_zstandard()
    with drafting(out.with_name(f"{out.name}.folder")) as scratch:
        folder = scratch / out.name.removesuffix(ending)
        made = create(replace(options, out=folder), tell)
        tell("packing")
        pack(folder, out)
    return made
