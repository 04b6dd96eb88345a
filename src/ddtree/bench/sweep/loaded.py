"""A sweep that is ready to run: its files read, its points made, its prompts there."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.bench.padding import read_pad_text
from ddtree.bench.plan import Load, Matrix
from ddtree.bench.record import Variant
from ddtree.bench.sweep.points import Plan, make_plan
from ddtree.bench.sweep.search import Search
from ddtree.bench.sweep.store import PointRow
from ddtree.bench.sweep.sweep_file import BenchTable, SweepFile, read_sweep_file
from ddtree.bench.workload import read_workload
from ddtree.deploy.deployment import load_deployment


@dataclass(frozen=True)
class Sweep:
    """A sweep that is ready to run: files read, points made.

    Attributes:
        base: the deployment as it was written, before any point.
        folder: of the sweep file.
        deployment_folder: of the deployment file, which its relative paths start from.
    """

    file: SweepFile
    text: str
    folder: Path
    base: dict[str, Any]
    base_text: str
    deployment_folder: Path
    plan: Plan
    searches: tuple[Search, ...] = ()

    def data_of(self, row: PointRow) -> dict[str, Any]:
        """The deployment of a point that has ended."""
        for point in self.plan.points:
            if point.name == row.point:
                return point.data
        return next(search.point(row.settings).data for search in self.searches if search.rows([row]))


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file and the deployment file that it names, and make its points.

    Raises:
        UserError: a file or a key is wrong, or a workload cannot be read.
    """
    file, text = read_sweep_file(path)
    folder = path.absolute().parent
    deployment_path = folder / file.deployment
    load_deployment(deployment_path)  # complains in its own words
    base_text = deployment_path.read_text(encoding="utf-8")
    base = tomllib.loads(base_text)
    plan = make_plan(file, base, deployment_path.parent)
    for table in {
        each.bench.over(file.bench).model_dump_json(): each.bench.over(file.bench) for each in file.sweep
    }.values():
        matrix_of(table, (Variant(),), folder).cells()
        if table.pad_text is not None:
            read_pad_text(folder / table.pad_text)
    searches = tuple(
        Search(each.name, each.search, each.bench.over(file.bench), base, deployment_path.parent, file.per_request)
        for each in file.sweep
        if each.search is not None
    )
    return Sweep(file, text, folder, base, base_text, deployment_path.parent, plan, searches)


def matrix_of(bench: BenchTable, variants: tuple[Variant, ...], folder: Path) -> Matrix:
    """The matrix of a group."""
    workloads = tuple(read_workload(spec, folder, bench.limit) for spec in bench.workloads or ())
    contexts = tuple(None if each == "as-is" else int(each) for each in bench.contexts or ["as-is"])
    return Matrix(
        workloads=workloads,
        contexts=contexts,
        concurrencies=tuple(bench.concurrency or [1]),
        temperatures=tuple(bench.temperatures or [0.0]),
        variants=variants,
    )


def prompts_sha256(sweep: Sweep) -> dict[str, str]:
    """Of every workload and of every text that contexts are filled with, under names that tell whose it is."""
    digests = {}
    for each in sweep.file.sweep:
        table = each.bench.over(sweep.file.bench)
        for workload in matrix_of(table, (Variant(),), sweep.folder).workloads:
            digests[f"{each.name}: {workload.name}"] = workload.record().sha256
        if table.pad_text is not None:
            text = read_pad_text(sweep.folder / table.pad_text)
            content = text.piece(0, len(text)).encode("utf-8")
            digests[f"{each.name}: pad_text {table.pad_text}"] = hashlib.sha256(content).hexdigest()
    return digests


def load_of(bench: BenchTable) -> Load:
    """How a group is measured; what is not given is as in ``ddtree bench``."""
    names = {"repeats": "repetitions", "warm_up": "warm_up_requests"}
    own = ("requests", "max_tokens", "ignore_eos", "seed", "unique_prefix", "request_timeout_s", "stall_timeout_s")
    given = {names.get(name, name): getattr(bench, name) for name in (*names, *own)}
    return Load(**{name: value for name, value in given.items() if value is not None})
