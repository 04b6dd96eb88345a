"""Runs a sweep: apply, verify, measure and store, group by group; a kill at any instant loses nothing stored."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree.bench.files import locked
from ddtree.bench.numbers import cell_numbers
from ddtree.bench.padding import read_pad_text
from ddtree.bench.record import Variant
from ddtree.bench.result_folder import read_requests, read_units
from ddtree.bench.run import RunOptions, Watcher, run_bench
from ddtree.bench.sweep.claims import violations, what_is_wrong
from ddtree.bench.sweep.loaded import Sweep, load_of, matrix_of, prompts_sha256
from ddtree.bench.sweep.points import Group, Point
from ddtree.bench.sweep.search import Search
from ddtree.bench.sweep.store import SWEEP, PointRow, Status, SweepRecord, append_point, begin_sweep, go_on, read_points
from ddtree.bench.sweep.toml_text import toml_text
from ddtree.deploy.apply import ApplyError, Site, apply, open_site
from ddtree.deploy.deployment import Deployment, to_deployment
from ddtree.deploy.ready import connect_address
from ddtree.deploy.secret_file import fetch_secret
from ddtree.deploy.supervisor import ProcessIdentity
from ddtree.disk import write_whole
from ddtree.errors import UserError
from ddtree.verify import Options, Verdict, Verification, from_deployment

_LOG_LINES = 200
RECOMMENDED = "recommended.toml"


@dataclass
class SweepWatcher:
    """What a sweep tells while it goes."""

    on_group: Callable[[int, int, Group], None] = lambda number, count, group: None
    on_stage: Callable[[str], None] = lambda stage: None
    on_point: Callable[[PointRow], None] = lambda row: None
    bench: Watcher = field(default_factory=Watcher)


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    resume: bool,
    choose: Callable[[Path], PointRow | None],
    restore: bool = True,
    watcher: SweepWatcher | None = None,
) -> list[PointRow]:
    """Measure every point that has no row yet; returns all rows.

    Args:
        choose: the point that is recommended, from the sweep's folder; None: there is none.
        restore: deploy it at the end; without a recommendation, what the deployment file says.

    Raises:
        UserError: the folder holds another sweep, or the host speaks against it.
    """
    with locked(folder):
        return _Run(sweep, folder, watcher or SweepWatcher()).run(resume, choose, restore)


class _Run:
    def __init__(self, sweep: Sweep, folder: Path, watcher: SweepWatcher) -> None:
        self._sweep, self._folder, self._watcher = sweep, folder, watcher
        self._id = ""
        self._deployed: dict[str, Any] | None = None
        self._verdict: Verdict | None = None
        self._process: ProcessIdentity | None = None

    def run(self, resume: bool, choose: Callable[[Path], PointRow | None], restore: bool) -> list[PointRow]:
        self._begin(resume)
        done = {row.point for row in read_points(self._folder)}
        for point in self._sweep.plan.points:
            if not point.runs and point.name not in done:
                self._add(point, "refused" if point.refused else "same", point.refused, same_as=point.same_as)
        groups = [group for each in self._sweep.plan.groups for group in self._as_left(each)]
        for number, group in enumerate(groups, 1):
            if all(point.name in done for point in group.points):
                continue
            self._watcher.on_group(number, len(groups), group)
            self._measure(group, done)
        for search in self._sweep.searches:
            self._search(search, done)
        rows = read_points(self._folder)
        if restore:
            self._restore(choose(self._folder))
        return rows

    def _search(self, search: Search, done: set[str]) -> None:
        while (point := search.next_point(rows := read_points(self._folder), self._folder)) is not None:
            if point.runs:
                group = search.group(point)
                self._watcher.on_group(len(search.rows(rows)) + 1, search.table.trials, group)
                self._measure(group, done)
            else:
                self._add(point, "refused" if point.refused else "same", point.refused, same_as=point.same_as)

    def _begin(self, resume: bool) -> None:
        path = self._folder / SWEEP
        record = SweepRecord(
            sweep_id=uuid.uuid4().hex[:12],
            created_at=time.time(),
            sweep_text=self._sweep.text,
            deployment_text=self._sweep.base_text,
            points=[point.name for point in self._sweep.plan.points],
            prompts_sha256=prompts_sha256(self._sweep),
        )
        if not path.exists():
            begin_sweep(self._folder, record)
            self._id = record.sweep_id
            return
        if not resume:
            raise UserError(f"{self._folder} holds a sweep already", "add --resume to go on, or give another folder")
        self._id = go_on(self._folder, record).sweep_id

    def _as_left(self, group: Group) -> list[Group]:
        """The group, or its points alone where an earlier attempt at them together broke the server."""
        return group.alone() if (self._folder / group.folder / "split").exists() else [group]

    def _measure(self, group: Group, done: set[str]) -> None:
        began = time.time()
        place = self._folder / group.folder
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / "deployment.toml", toml_text(group.data))
        left = [
            (point, variant)
            for point, variant in zip(group.points, group.variants, strict=True)
            if point.name not in done
        ]

        def end(status: Status, reason: str, log: str | None = None) -> None:
            for point, variant in left:
                self._add(point, status, reason, group, variant, log, began)
                done.add(point.name)

        try:
            with open_site(group.deployment) as site:
                self._deploy(group, site)
                with site.host.reach(connect_address(group.deployment), group.deployment.service.port) as url:
                    if self._sweep.file.verify.enabled and self._verdict is None:
                        self._verdict = self._verified(group, url)
                    if self._verdict is not None:
                        write_whole(place / "verify.json", json.dumps(self._verdict.to_json(), indent=2))
                        if self._verdict.exit_code == 1:
                            return end("invalid", violations(self._verdict))
                    try:
                        run_bench(self._options(group, url, place), self._watcher.bench)
                        self._require_same_process(site)
                    except UserError as error:
                        log = self._log(place, site)
                        self._deployed = None
                        if len(group.points) > 1:
                            write_whole(place / "split", str(error))
                            for alone in group.alone():
                                if alone.points[0].name not in done:
                                    self._measure(alone, done)
                            return None
                        return end("failed", str(error), log)
        except ApplyError as error:
            self._deployed = None
            write_whole(place / "log.txt", error.tail)
            return end("failed", f"it did not come up: {error.reason}", "log.txt")
        units, rows = read_units(place), read_requests(place)
        for point, variant in left:
            own = [row for row in rows if row.variant == variant.name]
            cells = cell_numbers([unit for unit in units if unit.variant == variant.name], own)
            wrong = what_is_wrong(cells, own, variant, group.deployment)
            self._add(point, "invalid" if wrong else "measured", wrong, group, variant, None, began)
            done.add(point.name)

    def _deploy(self, group: Group, site: Site) -> None:
        if self._deployed == group.data:
            return
        self._deployed, self._verdict = None, None
        self._watcher.on_stage("deploying")
        applied = apply(
            group.deployment,
            host=site.host,
            note=f"sweep {self._id}: {group.points[0].name}",
            tell=lambda progress: self._watcher.on_stage(f"deploying: {progress.stage}"),
        )
        self._deployed, self._process = group.data, applied.ready.identity

    def _require_same_process(self, site: Site) -> None:
        """A crash during the last requests leaves errors in a unit, and a server that must not be called measured."""
        state = site.supervisor.state()
        if state.identity is None:
            raise UserError(f"the server ended while it was measured ({state.detail})", "see its log")
        if state.identity != self._process:
            raise UserError("the server ended while it was measured, and was started again", "see its log")

    def _verified(self, group: Group, url: str) -> Verdict:
        table = self._sweep.file.verify
        options = Options(
            answer_timeout_s=table.timeout_s,
            probe_tokens=table.probe_tokens,
            long_tokens=table.long_tokens,
            concurrency=table.concurrency,
            baseline=False,
        )
        return Verification(
            url,
            from_deployment(group.deployment, "the sweep's point"),
            options,
            key=_key(group.deployment),
            is_strict=table.strict,
            tell=lambda stage, share: self._watcher.on_stage(f"verifying: {stage}"),
        ).run()

    def _options(self, group: Group, url: str, place: Path) -> RunOptions:
        bench, folder = group.bench, self._sweep.folder
        service = group.deployment.service
        return RunOptions(
            url=url,
            told_url=f"http://{connect_address(group.deployment)}:{service.port}",
            folder=place,
            matrix=matrix_of(bench, group.variants, folder),
            load=load_of(bench),
            api_key=_key(group.deployment),
            model=group.deployment.served_name,
            label=place.name,
            settings=group.shared_settings(),
            pad_text=read_pad_text(folder / bench.pad_text) if bench.pad_text else None,
            deployment=place / "deployment.toml",
            resume=True,
        )

    def _log(self, place: Path, site: Site) -> str | None:
        with suppress(UserError):
            write_whole(place / "log.txt", site.supervisor.tail(_LOG_LINES))
            return "log.txt"
        return None

    def _add(
        self,
        point: Point,
        status: Status,
        reason: str = "",
        group: Group | None = None,
        variant: Variant | None = None,
        log: str | None = None,
        began: float | None = None,
        same_as: str | None = None,
    ) -> None:
        now = time.time()
        verdict = self._verdict.status.value if self._verdict is not None and group is not None else None
        row = PointRow(
            sweep_id=self._id,
            point=point.name,
            settings=point.settings,
            status=status,
            reason=reason,
            same_as=same_as,
            folder=group.folder if group else None,
            variant=variant.name if variant else "server",
            verdict=verdict,
            log=log,
            finished_at=now,
            duration_s=round(now - began, 3) if began else 0.0,
        )
        append_point(self._folder, row)
        self._watcher.on_point(row)

    def _restore(self, chosen: PointRow | None) -> None:
        """Deploy what was chosen, as a file of its own beside the results."""
        data = self._sweep.base
        if chosen is not None:
            data = self._sweep.data_of(chosen)
        write_whole(self._folder / RECOMMENDED, toml_text(data))
        if self._deployed == data:
            return
        deployment = to_deployment(data, folder=self._sweep.deployment_folder, told="the recommended deployment")
        self._watcher.on_stage("deploying the recommended configuration" if chosen else "deploying what was there")
        try:
            apply(deployment, note=f"sweep {self._id}: recommended")
        except ApplyError as error:
            raise UserError(
                f"the recommended configuration did not come up ({error.reason})",
                f"deploy it by hand: {self._folder / RECOMMENDED}",
            ) from error
        self._deployed = data


def _key(deployment: Deployment) -> str | None:
    secret = deployment.secrets.api_key
    return fetch_secret(secret, "secrets.api_key") if secret is not None else None
