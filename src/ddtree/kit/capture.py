"""One live service into one folder: units, process, packages, patches, machine, weights by hash, log, verdict."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ddtree.deploy.apply import Site, open_site
from ddtree.deploy.deployment import Deployment, load_deployment
from ddtree.deploy.ready import connect_address
from ddtree.deploy.render import Rendered, render
from ddtree.deploy.secret_file import fetch_secret
from ddtree.errors import UserError
from ddtree.kit.engine_files import Interpreter, interpreter_of
from ddtree.kit.host_facts import record_host, without_private
from ddtree.kit.live_process import LiveProcess, look_at
from ddtree.kit.lock import freeze, requirements, with_hashes
from ddtree.kit.mask import Masker
from ddtree.kit.patches import PACKAGE, capture_patches
from ddtree.kit.record import (
    ENVIRONMENT,
    PROCESS,
    VERIFY,
    EnvironmentRecord,
    Package,
    Place,
    ProcessRecord,
    Record,
)
from ddtree.kit.weights import capture_weights
from ddtree.kit.wheel import Wheel
from ddtree.verify import Options, Verdict, Verification, from_deployment

LOG_LINES = 2000
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """What to capture.

    Attributes:
        wheels: released wheels that lie here, by package; others are asked of the host's pip.
        with_drafter: the drafter's weights too.
        hashes: ask the index for wheels and their hashes.
        verify: how hard to look at the service.
    """

    wheels: tuple[Wheel, ...] = ()
    with_drafter: bool = False
    hashes: bool = True
    verify: Options = Options(baseline=False)  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Source:
    """A deployment file, read."""

    deployment: Deployment
    text: str


def read_source(path: Path) -> Source:
    """A deployment file with its text.

    Raises:
        UserError: it cannot be read, or is none.
    """
    deployment = load_deployment(path)
    return Source(deployment, path.read_text(encoding="utf-8"))


def learn_secrets(source: Source, masker: Masker) -> None:
    """Everything that is known to be secret, from the host and its process, before a byte is written."""
    with open_site(source.deployment) as site:
        rendered = render(source.deployment)
        for name, value in _secrets_of(site, rendered).items():
            masker.learn(f"secret {name}", value)
        process = _process(site)
        if isinstance(process, LiveProcess):
            masker.learn_environment(process.environment)


def capture(
    source: Source, root: Path, folder: str, masker: Masker, options: CaptureOptions, tell: Tell = lambda stage: None
) -> Place:
    """Capture one service into ``root/folder``.

    Raises:
        UserError: the host is not reached, or a secret is found where the masker is strict.
    """
    with open_site(source.deployment) as site:
        return _Capture(source, site, root, folder, masker, options, tell).run()


class _Capture:
    def __init__(
        self, source: Source, site: Site, root: Path, folder: str, masker: Masker, options: CaptureOptions, tell: Tell
    ) -> None:
        self._source, self._site, self._masker, self._options, self._tell = source, site, masker, options, tell
        self._folder = root / folder
        self._inside = "" if folder == "." else f"{folder}/"
        self._rendered = render(source.deployment)
        self._notes: list[str] = []

    def run(self) -> Place:
        deployment, name = self._source.deployment, self._source.deployment.name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tell(f"{name}: units and process")
        self._write("deployment.toml", self._source.text)
        self._services()
        process = _process(self._site)
        if isinstance(process, str):
            self._notes.append(process)
        live = process if isinstance(process, LiveProcess) else None
        if live:
            self._process(live)
        interpreter = interpreter_of(
            self._site.host,
            live.arguments if live else (),
            live.environment if live else {},
            deployment.engine.venv,
        )
        self._tell(f"{name}: packages")
        self._environment(interpreter)
        self._tell(f"{name}: engine files")
        self._patches(interpreter)
        self._tell(f"{name}: machine")
        self._machine(interpreter, live)
        self._tell(f"{name}: weights")
        self._weights()
        self._tell(f"{name}: log")
        self._write("logs/service.log", self._site.supervisor.tail(LOG_LINES))
        verdict = self._verdict(live is not None)
        state = self._site.supervisor.state()
        after = state.identity
        if live and after != live.identity:
            raise UserError(
                f"{name} was started again while it was captured", "wait until it stays up, then create the kit again"
            )
        return Place(
            name=name,
            folder=self._inside.rstrip("/") or ".",
            host=deployment.host.kind,
            engine=deployment.engine.kind,
            is_running=state.status == "running",
            verdict=verdict.status.value if verdict else "unknown",
            notes=self._notes,
        )

    def _services(self) -> None:
        supervisor = self._site.supervisor
        rendered = supervisor.told(self._rendered)
        installed = supervisor.installed()
        unit = self._rendered.unit_name or "launch.sh"
        self._write(f"services/{unit}.rendered", rendered)
        if installed is None:
            self._notes.append("nothing is installed on the host under this name")
            return
        self._write(f"services/{unit}.installed", installed)
        lines = list(
            difflib.unified_diff(installed.splitlines(), rendered.splitlines(), "installed", "rendered", lineterm="")
        )
        self._write(f"services/{unit}.diff", "".join(f"{line}\n" for line in lines))
        if lines:
            self._notes.append(
                "what is installed on the host is not what the deployment file renders to: see services/"
            )
        if self._rendered.unit_name:
            told = self._site.host.run(
                'systemctl cat --no-pager -- "$1"', self._rendered.unit_name, privileged=True
            ).stdout
            self._write(f"services/{unit}.effective", told)
            if "/.d/" in told or f"{unit}.d/" in told:
                self._notes.append("the unit is changed by drop-ins: see services/")

    def _process(self, live: LiveProcess) -> None:
        place = f"{self._inside}{PROCESS}"
        as_rendered = list(live.arguments[-len(self._rendered.command) + 1 :]) == list(self._rendered.command[1:])
        if not as_rendered:
            self._notes.append("the process was started with another command line than the deployment file renders to")
        self._record(
            PROCESS,
            ProcessRecord(
                pid=live.identity.pid,
                started=live.identity.started,
                invocation=live.identity.invocation,
                executable=live.executable,
                folder=live.folder,
                arguments=self._masker.arguments(live.arguments, place),
                environment=self._masker.environment(live.environment, place),
                as_rendered=as_rendered,
            ),
        )

    def _environment(self, interpreter: Interpreter | None) -> None:
        told = interpreter.packages() if interpreter else None
        if told is None or interpreter is None:
            self._notes.append("the engine's interpreter was not found, so its packages are not known")
            return
        packages = [Package(**each) for each in told.pop("packages")]
        notes = []
        if self._options.hashes:
            packages, why = with_hashes(interpreter, packages)
            if why:
                notes.append(f"no wheel hashes from an index: {why}")
        else:
            notes.append("no wheel hashes: the index was not asked")
        lacking = [each.name for each in packages if not each.wheel_sha256]
        if lacking:
            notes.append(f"without a wheel's hash, {len(lacking)} packages: {', '.join(lacking[:20])}")
        self._record(ENVIRONMENT, EnvironmentRecord(**told, packages=packages, notes=notes))
        self._write("env/requirements.lock", requirements(packages))
        self._write("env/pip-freeze.txt", freeze(packages))

    def _patches(self, interpreter: Interpreter | None) -> None:
        kind = self._source.deployment.engine.kind
        wheel = next((each for each in self._options.wheels if each.name == PACKAGE[kind]), None)
        record = capture_patches(
            interpreter, kind, self._folder, self._masker, self._inside, wheel, may_download=self._options.hashes
        )
        self._notes += [f"patches: {note}" for note in record.notes]

    def _machine(self, interpreter: Interpreter | None, live: LiveProcess | None) -> None:
        model = self._source.deployment.model
        environment = live.environment if live else {}
        recording = record_host(self._site.host, interpreter, environment, model.path)
        self._write("env/host.json", json.dumps(without_private(recording), indent=1) + "\n")

    def _weights(self) -> None:
        deployment, host = self._source.deployment, self._site.host
        model = deployment.model
        folder, inside = self._folder / "model", f"{self._inside}model/"
        capture_weights(host, model, folder, self._masker, inside, is_demo=model.demo)
        if deployment.drafter:
            folder, inside = self._folder / "drafter", f"{self._inside}drafter/"
            include = self._options.with_drafter
            capture_weights(host, deployment.drafter, folder, self._masker, inside, include=include)

    def _verdict(self, is_running: bool) -> Verdict | None:
        deployment, name = self._source.deployment, self._source.deployment.name
        if not is_running:
            told = {"verdict": "unknown", "reason": "the service was not running when the kit was sealed"}
            self._write(VERIFY, json.dumps(told, indent=1) + "\n")
            return None
        secret = deployment.secrets.api_key
        key = fetch_secret(secret, "secrets.api_key") if secret else None
        options = replace(self._options.verify, log=lambda: self._site.supervisor.tail(LOG_LINES))
        with self._site.host.reach(connect_address(deployment), deployment.service.port) as url:
            verdict = Verification(
                url,
                from_deployment(deployment, "deployment.toml"),
                options,
                key=key,
                tell=lambda stage, share: self._tell(f"{name}: verifying: {stage}"),
            ).run()
        told = verdict.to_json() | {"target": f"http://{connect_address(deployment)}:{deployment.service.port}"}
        text = json.dumps(told, indent=1).replace(url, str(told["target"]))
        self._write(VERIFY, text + "\n")
        return verdict

    def _record(self, name: str, record: Record) -> None:
        self._write(name, record.model_dump_json(indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._masker.text(text, f"{self._inside}{name}"), encoding="utf-8", newline="\n")


def _process(site: Site) -> LiveProcess | str:
    state = site.supervisor.state()
    if state.identity is None:
        return f"the service is not running ({state.status}: {state.detail})"
    return look_at(site.host, state.identity)


def _secrets_of(site: Site, rendered: Rendered) -> dict[str, str]:
    """As they are on the host; one that is not there yet as this machine has it."""
    found: dict[str, str] = {}
    for file in rendered.secret_files:
        content = site.host.read(site.supervisor.secret_path(file.path), privileged=True)
        for name, secret in file.sources.items():
            value = replace(file, api_key=name).key_in(content) if content else None
            found[name] = value if value is not None else fetch_secret(secret, name)
    return found
