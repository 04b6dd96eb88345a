"""From a sweep file to points: each a deployment; the same ones found, those that need no restart together."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddtree.bench.record import Variant
from ddtree.bench.sweep.sweep_file import UNSET, BenchTable, SweepFile
from ddtree.deploy import Deployment, to_deployment
from ddtree.deploy.sections import OF_DRAFTS, OF_TREES
from ddtree.errors import UserError

_ALGORITHM, _BUDGET, _CAP = "speculation.algorithm", "speculation.budget", "speculation.topk_cap"
_PER_REQUEST = (_ALGORITHM, _BUDGET, _CAP)


@dataclass(frozen=True)
class Point:
    """One setting of one sweep.

    Attributes:
        settings: the swept keys with their values, as the file has them.
        data: the deployment, with keys that have no effect taken out.
        refused: why there is no such deployment; empty where there is one.
        same_as: the point that is the same deployment, measured alike.
    """

    name: str
    sweep: str
    settings: dict[str, Any]
    data: dict[str, Any]
    bench: BenchTable
    deployment: Deployment | None = None
    refused: str = ""
    same_as: str | None = None

    @property
    def runs(self) -> bool:
        return not self.refused and self.same_as is None


@dataclass(frozen=True)
class Group:
    """Points of one sweep that one start of the server serves.

    Attributes:
        data: what is deployed: that of a point among them.
        variants: for each point how its requests are drafted.
    """

    sweep: str
    data: dict[str, Any]
    deployment: Deployment
    bench: BenchTable
    points: tuple[Point, ...]
    variants: tuple[Variant, ...]

    @property
    def folder(self) -> str:
        """Of its results: the same for the same group whenever the plan is made."""
        content = json.dumps([self.data, [point.name for point in self.points]], sort_keys=True)
        return f"points/{self.sweep}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"

    def shared_settings(self) -> dict[str, Any]:
        """The swept keys that were deployed for all of the group, with their values."""
        swept = {key: value for key, value in self.points[0].settings.items() if key not in _PER_REQUEST}
        shared = {key: value for key, value in swept.items() if value != UNSET and _has(self.data, key)}
        return shared | _speculation_told(self.points[0]) if self.variants[0].mode == "server" else shared

    def alone(self) -> list[Group]:
        """Each point as a group of its own, deployed as it is."""
        groups = []
        for point in self.points:
            assert point.deployment is not None
            groups.append(Group(self.sweep, point.data, point.deployment, self.bench, (point,), (Variant(),)))
        return groups


@dataclass(frozen=True)
class Plan:
    """All points in the order of the file, and the groups that are to be measured."""

    points: tuple[Point, ...]
    groups: tuple[Group, ...] = field(default=())


def make_plan(sweep_file: SweepFile, base: Mapping[str, Any], folder: Path) -> Plan:
    """Expand a sweep file over the data of its deployment file.

    Args:
        base: as TOML parsed it.
        folder: of the deployment file, which its relative paths start from.

    Raises:
        UserError: a key is none of a deployment's.
    """
    points: list[Point] = []
    seen: dict[str, str] = {}
    for sweep in sweep_file.sweep:
        bench = sweep.bench.over(sweep_file.bench)
        for settings in sweep.settings():
            point = make_point(sweep.name, dict(settings), base, bench, folder)
            if any(other.name == point.name for other in points):
                raise UserError(f"the sweep {sweep.name} has the point {point.name} twice", "name it once")
            if not point.refused and (same := seen.setdefault(_identity(point), point.name)) != point.name:
                point = replace(point, same_as=same)
            points.append(point)
    return Plan(tuple(points), tuple(_groups(points, sweep_file.per_request)))


def make_point(sweep: str, settings: dict[str, Any], base: Mapping[str, Any], bench: BenchTable, folder: Path) -> Point:
    """A point by its settings, refused or not; as :func:`make_plan`."""
    data = copy.deepcopy(dict(base))
    for key, value in settings.items():
        _put(data, key, value)
    _without_effect(data)
    name = f"{sweep}: " + (", ".join(f"{_short(key)}={_told(value)}" for key, value in settings.items()) or "as it is")
    try:
        deployment = to_deployment(data, folder=folder, told="this point")
    except UserError as error:
        if "unknown key" in error.cause:
            raise UserError(f"sweep {sweep}: {error.cause.removeprefix('this point: ')}", error.remedy) from None
        return Point(name, sweep, settings, data, bench, refused=error.cause.removeprefix("this point: "))
    return Point(name, sweep, settings, data, bench, deployment)


def _identity(point: Point) -> str:
    """Equal where two points are the same deployment, measured alike."""
    return json.dumps([point.data, point.bench.model_dump()], sort_keys=True)


def marked_same(point: Point, earlier: Sequence[Point]) -> Point:
    """The point, marked where it is the same as one of ``earlier``."""
    same = next((each.name for each in earlier if not each.refused and _identity(each) == _identity(point)), None)
    return replace(point, same_as=same) if same is not None and not point.refused else point


def group_of(point: Point, base: Mapping[str, Any], per_request: bool, folder: Path) -> Group:
    """A point that runs by itself: on a server as ``base`` has it where its requests can ask for the rest, else alone.

    So points that follow each other need no restart, and each leads to the same server whenever it is asked.
    """
    assert point.deployment is not None
    settings = {key: value for key, value in point.settings.items() if key not in _PER_REQUEST}
    host = make_point(point.sweep, settings, base, point.bench, folder)
    is_plain = _speculation(point).get("algorithm") == "none"
    if (
        per_request
        and _is_native(point)
        and host.deployment is not None
        and _speculation(host).get("algorithm") != "none"
        and (_bare(host.data) == _bare(point.data) if is_plain else _common(host.data) == _common(point.data))
    ):
        return Group(point.sweep, host.data, host.deployment, point.bench, (point,), (variant_of(point.data),))
    return Group(point.sweep, point.data, point.deployment, point.bench, (point,), (Variant(),))


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if not dot or not name:
        raise UserError(f"{key!r} is no key of a deployment", "write section.key, such as speculation.budget")
    *parents, last = [section, *name.split(".")]
    place = data
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise UserError(f"{key!r} is no key of a deployment", "write section.key, such as speculation.budget")
    if value == UNSET:
        place.pop(last, None)
    else:
        place[last] = value


def _without_effect(data: dict[str, Any]) -> None:
    """Take out what changes nothing: a budget of 0 is no speculation, and without that no key of it counts."""
    speculation = data.get("speculation")
    if not isinstance(speculation, dict):
        return
    if speculation.get("budget") == 0 and not isinstance(speculation.get("budget"), bool):
        speculation["algorithm"] = "none"
    if speculation.get("algorithm") == "none":
        for key in OF_DRAFTS:
            speculation.pop(key, None)
        data.pop("drafter", None)
        if isinstance(data.get("expect"), dict):
            data["expect"].pop("tau_floor", None)
    if speculation.get("algorithm") == "dflash":
        for key in OF_TREES:
            speculation.pop(key, None)
    if 1 in (speculation.get("topk_cap"), speculation.get("budget")):  # a chain too
        speculation.pop("draft_temperature", None)
    if type(speculation.get("draft_temperature")) is int:
        speculation["draft_temperature"] = float(speculation["draft_temperature"])  # 1 and 1.0 are one deployment
    budget, cap = speculation.get("budget"), speculation.get("topk_cap")
    if isinstance(budget, int) and isinstance(cap, int) and cap >= budget:
        speculation["topk_cap"] = min(budget, cap)
        if budget <= 64:  # the default cap is min(budget, 64)
            speculation.pop("topk_cap")


def _groups(points: Sequence[Point], per_request: bool) -> list[Group]:
    """Points that run, by sweep and by what must be deployed; groups with the same deployment follow each other."""
    together: dict[str, list[Point]] = {}
    for point in points:
        if not point.runs or point.deployment is None:
            continue
        identity: Any = [point.sweep, point.data]
        if per_request and point.deployment.engine.kind == "native":
            identity = [point.sweep, _common(point.data)]
        together.setdefault(json.dumps(identity, sort_keys=True), []).append(point)
    groups = [group for members in _with_plain(list(together.values()), per_request) for group in _as_groups(members)]
    order: dict[str, int] = {}
    for group in groups:
        order.setdefault(json.dumps(group.data, sort_keys=True), len(order))
    return sorted(groups, key=lambda group: order[json.dumps(group.data, sort_keys=True)])


def _with_plain(together: list[list[Point]], per_request: bool) -> list[list[Point]]:
    """Plain decoding needs no server of its own where a native one of the same sweep can do it per request."""
    if not per_request:
        return together
    kept = []
    for members in together:
        lonely = [p for p in members if _speculation(p).get("algorithm") == "none"]
        host = next(
            (
                other
                for other in together
                if other is not members
                and other[0].sweep == members[0].sweep
                and any(_speculation(p).get("algorithm") != "none" for p in other)
                and _bare(other[0].data) == _bare(members[0].data)
            ),
            None,
        )
        if len(lonely) == len(members) and host is not None and _is_native(members[0]):
            host[:0] = members
        else:
            kept.append(members)
    return kept


def _as_groups(members: list[Point]) -> list[Group]:
    drafting = [point for point in members if _speculation(point).get("algorithm") in ("ddtree", "dflash")]
    host = drafting[0] if drafting else members[0]
    assert host.deployment is not None
    if len(members) == 1:
        return [Group(host.sweep, host.data, host.deployment, host.bench, (host,), (Variant(),))]
    variants = tuple(variant_of(point.data) for point in members)
    return [Group(host.sweep, host.data, host.deployment, host.bench, tuple(members), variants)]


def variant_of(data: Mapping[str, Any]) -> Variant:
    """How a request asks a native server for what ``data`` would deploy."""
    speculation = data.get("speculation", {})
    mode = {"none": "ar", "dflash": "chain", "ddtree": "tree"}[speculation["algorithm"]]
    budget = speculation.get("budget")
    return Variant.model_validate({"mode": mode, "budget": budget, "top_k_cap": speculation.get("topk_cap")})


def _speculation_told(point: Point) -> dict[str, Any]:
    """Speculation as it is deployed: the report names points by it."""
    speculation = _speculation(point)
    keys = (("algorithm", _ALGORITHM), ("budget", _BUDGET), ("topk_cap", _CAP))
    return {name: speculation[key] for key, name in keys if key in speculation}


def _common(data: Mapping[str, Any]) -> dict[str, Any]:
    """The deployment without what can be asked for with each request."""
    common = copy.deepcopy(dict(data))
    speculation = common.get("speculation", {})
    is_plain = speculation.get("algorithm") == "none"
    for key in ("algorithm", "budget", "topk_cap"):
        speculation.pop(key, None)
    common["drafts"] = not is_plain
    return common


def _bare(data: Mapping[str, Any]) -> dict[str, Any]:
    """The deployment without anything that only speculation uses, but for what distinguishes drafting servers."""
    bare = copy.deepcopy(dict(data))
    bare.pop("drafter", None)
    bare["speculation"] = {}
    expect = bare.get("expect")
    if isinstance(expect, dict):
        expect.pop("tau_floor", None)
    return bare


def _has(data: Mapping[str, Any], key: str) -> bool:
    place: Any = data
    for part in key.split("."):
        if not isinstance(place, dict) or part not in place:
            return False
        place = place[part]
    return True


def _speculation(point: Point) -> Mapping[str, Any]:
    found = point.data.get("speculation", {})
    return found if isinstance(found, dict) else {}


def _is_native(point: Point) -> bool:
    return point.deployment is not None and point.deployment.engine.kind == "native"


def _short(key: str) -> str:
    return key.removeprefix("speculation.")


def _told(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
