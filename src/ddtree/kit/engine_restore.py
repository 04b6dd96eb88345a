"""The engine's part of a restore: what its environment and its patches lack, and how they get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddtree.deploy.apply import Site
from ddtree.deploy.render import render
from ddtree.errors import UserError
from ddtree.kit.engine_files import Interpreter, interpreter_of
from ddtree.kit.record import ENVIRONMENT, PATCHES, EnvironmentRecord, PatchRecord, read_record
from ddtree.kit.restore_engine import (
    EnginePlan,
    apply_patches,
    build,
    compare_packages,
    plan_build,
    plan_patches,
    remove,
)
from ddtree.kit.step import Step


class EngineRestore:
    """Of one deployment of a kit.

    Args:
        folder: of the deployment, in the kit.
        wheels: files of wheels that no index has.
        keeps_environment: an environment that is there is taken although it is not as sealed.
    """

    def __init__(
        self,
        folder: Path,
        site: Site,
        wheels: Sequence[Path],
        keeps_environment: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._folder, self._site, self._wheels, self._keeps, self._tell = folder, site, wheels, keeps_environment, tell
        self._deployment, self._rendered = site.deployment, render(site.deployment)
        self._sealed = self._read(EnvironmentRecord, ENVIRONMENT)
        self._patches = self._read(PatchRecord, PATCHES)
        self._root: str | None = None

    def interpreter(self) -> Interpreter | None:
        """The engine's own, as the host has it now."""
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

    def plan(self) -> EnginePlan:
        """What is to be done, by what the host has now."""
        plan, venv = EnginePlan(), self._deployment.engine.venv
        if venv:
            plan_build(self._site.host, venv, self._sealed, self._wheels, plan)
        if plan.build:
            plan.to_patch = list(self._patches.files) if self._patches else []
            return plan
        interpreter = self.interpreter()
        if interpreter is None:
            plan.unknown.append("the engine's interpreter is not known here, so its packages are not compared")
            if self._patches and self._patches.files:
                plan.refused.append("the kit has patches, and it is not known where the engine's files are")
            return plan
        if self._sealed is not None:
            plan.different = compare_packages(interpreter, self._sealed)
        if plan.different and not self._keeps:
            told = "; ".join(plan.different[:4]) + (" ..." if len(plan.different) > 4 else "")
            plan.refused.append(
                f"the environment is there and not as sealed ({told}): name another engine.venv with --set, "
                "which is then built, or accept it with --keep-environment"
            )
        if self._patches is not None:
            self._root = plan_patches(interpreter, self._patches, plan)
        return plan

    def run(self) -> None:
        """Do it.

        Raises:
            UserError: a step is refused, or fails.
        """
        plan, venv, host = self.plan(), self._deployment.engine.venv, self._site.host
        if plan.build:
            assert venv and plan.python and self._sealed
            self._tell(f"building {venv} from the lock")
            build(host, venv, self._sealed, self._wheels, plan.python)
            plan = self.plan()
        if plan.refused:
            raise UserError(plan.refused[0], "see all of it with --plan")
        if plan.left_over:
            assert self._root is not None
            remove(host, self._root, plan.left_over)
        if plan.to_patch:
            assert self._root is not None
            self._tell(f"patching {len(plan.to_patch)} files")
            apply_patches(host, self._root, self._folder / "patches", plan.to_patch)

    def steps(self, plan: EnginePlan) -> list[Step]:
        """The plan in words."""
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

    def _read(self, kind: Any, name: str) -> Any:
        return read_record(kind, self._folder / name) if (self._folder / name).exists() else None
