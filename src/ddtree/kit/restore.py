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
from ddtree.kit.engine_files import Interpreter, interpreter_of
from ddtree.kit.record import ENVIRONMENT, PATCHES, EnvironmentRecord, KitRecord, PatchRecord, Place, read_record
from ddtree.kit.restore_doctor import doctor_steps
from ddtree.kit.restore_engine import (
    EnginePlan,
    apply_patches,
    build,
    compare_packages,
    plan_build,
    plan_patches,
)
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
        self._sealed = self._read(EnvironmentRecord, ENVIRONMENT)
        self._patches = self._read(PatchRecord, PATCHES)
        self._root: str | None = None

    def plan(self) -> tuple[Step, ...]:
        weights, engine = self._weights(), self._engine()
        return (
            *self._doctor(weights),
            *(_weights_step(each) for each in weights),
            *self._engine_steps(engine),
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
        self._do_engine()
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

    def _interpreter(self) -> Interpreter | None:
        engine = self._deployment.engine
        program = self._rendered.command[0]
        if engine.executable and not program.rsplit("/", 1)[-1].startswith("python"):
            shebang = self._site.host.run('head -n 1 -- "$1" | grep "^#!/"', program, privileged=True).stdout
            program = shebang.strip().removeprefix("#!").split(" ")[0]
        if engine.venv:
            program = f"{engine.venv}/bin/python"
        if program == "/bin/sh" or not program.startswith("/"):
            return None
        return interpreter_of(self._site.host, (program,), {}, engine.venv)

    def _engine(self) -> EnginePlan:
        plan, venv = EnginePlan(), self._deployment.engine.venv
        if venv:
            plan_build(self._site.host, venv, self._sealed, self._options.wheels, plan)
        if plan.build:
            plan.to_patch = list(self._patches.files) if self._patches else []
            return plan
        interpreter = self._interpreter()
        if interpreter is None:
            plan.unknown.append("the engine's interpreter is not known here, so its packages are not compared")
            if self._patches and self._patches.files:
                plan.refused.append("the kit has patches, and it is not known where the engine's files are")
            return plan
        if self._sealed is not None:
            plan.different = compare_packages(interpreter, self._sealed)
        if plan.different and not self._options.keep_environment:
            told = "; ".join(plan.different[:4]) + (" ..." if len(plan.different) > 4 else "")
            plan.refused.append(
                f"the environment is there and not as sealed ({told}): name another engine.venv with --set, "
                "which is then built, or accept it with --keep-environment"
            )
        if self._patches is not None:
            self._root = plan_patches(interpreter, self._patches, plan)
        return plan

    def _do_engine(self) -> None:
        plan, venv, host = self._engine(), self._deployment.engine.venv, self._site.host
        if plan.build:
            assert venv and plan.python and self._sealed
            self._tell(f"building {venv} from the lock")
            build(host, venv, self._sealed, self._options.wheels, plan.python)
            plan = self._engine()
        if plan.refused:
            raise UserError(plan.refused[0], "see all of it with --plan")
        if plan.to_patch:
            assert self._root is not None
            self._tell(f"patching {len(plan.to_patch)} files")
            apply_patches(host, self._root, self._folder / "patches", plan.to_patch)

    def _engine_steps(self, plan: EnginePlan) -> list[Step]:
        steps = [Step("environment", "refused", told) for told in plan.refused]
        venv = self._deployment.engine.venv
        if plan.build and not plan.refused:
            n = len(self._sealed.packages) if self._sealed else 0
            steps.append(Step("environment", "to do", f"build {venv}: {n} packages from the lock, with {plan.python}"))
        elif plan.different and not plan.refused:
            steps.append(Step("environment", "unknown", f"accepted as it is: {'; '.join(plan.different[:4])}"))
        elif not plan.refused:
            told = "; ".join(plan.unknown) or "every sealed package is there, with the same content"
            steps.append(Step("environment", "unknown" if plan.unknown else "done", told))
        if plan.to_patch:
            names = ", ".join(f"{each.path} ({each.change})" for each in plan.to_patch[:6])
            steps.append(Step("patches", "to do", f"{len(plan.to_patch)} files: {names}"))
        else:
            told = f"{plan.patched} files are as sealed" if plan.patched else "the kit has none"
            steps.append(Step("patches", "done", told))
        return steps

    def _doctor(self, weights: Sequence[WeightsPlan]) -> list[Step]:
        interpreter = self._interpreter()
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

    def _read(self, kind: Any, name: str) -> Any:
        return read_record(kind, self._folder / name) if (self._folder / name).exists() else None


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
