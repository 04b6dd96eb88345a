"""A kit back to life: every step looks before it changes anything, so that it can be broken off and run again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree.deploy.apply import Site, apply, open_site
from ddtree.deploy.deployment import Deployment, to_deployment
from ddtree.deploy.ready import connect_address
from ddtree.deploy.render import render
from ddtree.deploy.secret_file import fetch_secret
from ddtree.errors import UserError
from ddtree.kit.canary import Canary, Comparison, choose_canary, run_canary
from ddtree.kit.engine_restore import EngineRestore
from ddtree.kit.record import KitRecord, Place
from ddtree.kit.restore_doctor import doctor_steps
from ddtree.kit.restore_weights import WeightsPlan, bring_weights, look_at_weights
from ddtree.kit.step import Step
from ddtree.verify import Options, Verdict, Verification, from_deployment

Tell = Callable[[str], None]
_HOW_IT_RUNS = ("parallelism", "speculation", "runtime")


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """How a kit is brought back.

    Attributes:
        place: which of its deployments; the first if None.
        changes: keys of the deployment file that are other here, dotted, with their values.
        wheels: files of wheels that no index has.
        keep_environment: take the environment that is there although it is not as sealed.
        ignore_faults: go on although doctor finds that a start would fail.
        out: folder for the canary's results; a temporary one if None.
    """

    place: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    wheels: tuple[Path, ...] = ()
    keep_environment: bool = False
    ignore_faults: bool = False
    with_canary: bool = True
    timeout_s: float | None = None
    out: Path | None = None
    verify: Options = Options(baseline=False)  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Restored:
    """How it went.

    Attributes:
        sealed_verdict: what was found when the kit was sealed.
        no_canary: why nothing was measured.
    """

    steps: tuple[Step, ...]
    verdict: Verdict
    sealed_verdict: str
    comparison: Comparison | None
    no_canary: str

    @property
    def is_as_sealed(self) -> bool:
        """Proven, and the canary, where there is one, is within its interval."""
        within = self.comparison.is_within if self.comparison else True
        return self.verdict.status.value == "proven" and within

    def to_json(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return {
            "as_sealed": self.is_as_sealed,
            "steps": [vars(step) for step in self.steps],
            "verdict": self.verdict.to_json(),
            "sealed_verdict": self.sealed_verdict,
            "canary": self.comparison.to_json() if self.comparison else None,
            "no_canary": self.no_canary,
        }


def plan_restore(payload: Path, kit: KitRecord, options: RestoreOptions) -> tuple[Step, ...]:
    """Every step, without doing any; nothing is changed.

    Raises:
        UserError: the host is not reached, or a key of the deployment file is wrong.
    """
    place = _place(kit, options.place)
    with open_site(restored_deployment(payload / place.folder, options.changes)) as site:
        return _Restore(payload, kit, place, site, options, lambda stage: None).plan()


def restore(payload: Path, kit: KitRecord, options: RestoreOptions, tell: Tell = lambda stage: None) -> Restored:
    """Do every step that is not done yet, and state how the result compares with what was sealed.

    Raises:
        UserError: a step is refused, or fails: what was done stays, and the next restore goes on from there.
        ApplyError: the service did not come to answer, and was taken back.
    """
    place = _place(kit, options.place)
    with open_site(restored_deployment(payload / place.folder, options.changes)) as site:
        return _Restore(payload, kit, place, site, options, tell).run()


def restored_deployment(folder: Path, changes: dict[str, Any]) -> Deployment:
    """The sealed deployment with another [host], which is this machine unless told otherwise, and other changes.

    Relative paths, of secrets for example, start from the working folder.
    """
    import tomllib

    data = tomllib.loads((folder / "deployment.toml").read_text(encoding="utf-8"))
    sealed_host = data.pop("host", {})
    if "privilege" in sealed_host:
        data["host"] = {"privilege": sealed_host["privilege"]}
    for dotted, value in changes.items():
        table = data
        *path, key = dotted.split(".")
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"--set {dotted}: {part} is no table", "see docs/deploy.md for the keys")
        table[key] = value
    return to_deployment(data, folder=Path.cwd(), told="the kit's deployment, as changed")


def _place(kit: KitRecord, name: str | None) -> Place:
    if name is None:
        return kit.places[0]
    found = next((place for place in kit.places if place.name == name), None)
    if found is None:
        raise UserError(f"the kit has no deployment {name}", f"it has {', '.join(p.name for p in kit.places)}")
    return found


class _Restore:
    def __init__(
        self, payload: Path, kit: KitRecord, place: Place, site: Site, options: RestoreOptions, tell: Tell
    ) -> None:
        self._payload, self._kit, self._place, self._site = payload, kit, place, site
        self._options, self._tell = options, tell
        self._folder = payload / place.folder
        self._deployment = site.deployment
        self._rendered = render(site.deployment)
        self._engine = EngineRestore(self._folder, site, options.wheels, options.keep_environment, tell)

    def plan(self) -> tuple[Step, ...]:
        weights = self._weights()
        return (
            *self._doctor(weights),
            *(_weights_step(each) for each in weights),
            *self._engine.steps(self._engine.plan()),
            self._service_step(),
            Step("verify", "to do", f"hold the service to its deployment file; sealed was: {self._place.verdict}"),
            self._canary_step(),
        )

    def run(self) -> Restored:
        self._tell("looking at the host")
        steps = self.plan()
        if refused := [step for step in steps if step.state == "refused"]:
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            raise UserError(f"{refused[0].name}: {refused[0].told}{more}", "see all of it with --plan")
        for plan in self._weights():
            if plan.missing:
                self._tell(f"fetching {len(plan.missing)} files of the {plan.name}")
                folder = self._folder / plan.name
                bring_weights(self._site.host, folder, plan, self._deployment.host.kind == "local")
        self._engine.run()
        if self._service_step().state != "done":
            self._tell("putting the service in place")
            note = f"restored from the kit {self._kit.name}"
            apply(
                self._deployment,
                host=self._site.host,
                note=note,
                timeout_s=self._options.timeout_s,
                tell=lambda progress: self._tell(f"service: {progress.stage}"),
            )
        verdict, comparison, why = self._measure()
        return Restored(steps, verdict, self._place.verdict, comparison, why)

    def _weights(self) -> list[WeightsPlan]:
        found = []
        for name, weights in (("model", self._deployment.model), ("drafter", self._deployment.drafter)):
            if weights is not None and (self._folder / name / "fetch.json").exists():
                found.append(look_at_weights(self._site.host, self._folder / name, name, weights.path))
        return found

    def _doctor(self, weights: Sequence[WeightsPlan]) -> list[Step]:
        interpreter = self._engine.interpreter()
        builds = bool(self._deployment.engine.venv) and interpreter is None
        return doctor_steps(
            self._site, self._folder, weights, interpreter, builds=builds, ignore_faults=self._options.ignore_faults
        )

    def _service_step(self) -> Step:
        site = self._site
        installed = site.supervisor.installed()
        is_same = installed == site.supervisor.told(self._rendered)
        if is_same and site.supervisor.state().status == "running" and site.releases.last_good():
            every = site.releases.all()
            if every[-1].state == "good" and every[-1].digest == self._rendered.digest:
                return Step("service", "done", f"{self._deployment.name} runs as it is rendered")
        told = "install and start" if installed is None else "replace and start"
        return Step("service", "to do", f"{told} {self._deployment.name} on {site.host.name}, and await an answer")

    def _canary(self) -> Canary | str:
        if not self._options.with_canary:
            return "left out as asked"
        # Where it lies and listens does not matter for what is measured; how it runs does.
        how = {key: value for key, value in self._options.changes.items() if key.split(".")[0] in _HOW_IT_RUNS}
        command = render(restored_deployment(self._folder, how)).command
        return choose_canary(self._payload, self._kit, self._deployment, command)

    def _canary_step(self) -> Step:
        canary = self._canary()
        if isinstance(canary, str):
            return Step("canary", "unknown", f"not measured: {canary}")
        told = f"{canary.experiment.configuration} on {canary.workload.name}, {canary.concurrency} at once"
        return Step("canary", "to do", f"measure {told}, and compare")

    def _measure(self) -> tuple[Verdict, Comparison | None, str]:
        deployment, site = self._deployment, self._site
        secret = deployment.secrets.api_key
        key = fetch_secret(secret, "secrets.api_key") if secret else None
        with site.host.reach(connect_address(deployment), deployment.service.port) as url:
            self._tell("verifying")
            verdict = Verification(
                url,
                from_deployment(deployment, "the kit's deployment.toml"),
                self._options.verify,
                key=key,
                tell=lambda stage, share: self._tell(f"verifying: {stage}"),
            ).run()
            canary = self._canary()
            if isinstance(canary, str):
                return verdict, None, canary
            self._tell("measuring the canary")
            with tempfile.TemporaryDirectory(prefix="ddtree-kit-") as scratch:
                out = self._options.out or Path(scratch) / "canary"
                return verdict, run_canary(canary, url, key, deployment.served_name, out), ""


def _weights_step(plan: WeightsPlan) -> Step:
    if plan.by_hand:
        names = ", ".join(each.path for each in plan.by_hand[:5])
        return Step(plan.name, "refused", f"{plan.path} lacks {names}; nothing says where they come from: bring them")
    if plan.missing:
        size = plan.missing_bytes / 1e9
        return Step(
            plan.name, "to do", f"bring {len(plan.missing)} files, {size:.3f} GB, to {plan.path}, and check them"
        )
    told = (
        f"{len(plan.fetch.files)} files in {plan.path} have their hashes" if plan.fetch.files else plan.fetch.notes[0]
    )
    return Step(plan.name, "done", told)
