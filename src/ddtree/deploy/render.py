"""What a deployment comes to: a command, an environment, a unit, and the files that hold secrets.

Rendering reads the deployment file and nothing else, so that the same file always gives the same; secrets are fetched
only when they are about to be put on the host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from ddtree.deploy.command import render_command, require_program
from ddtree.deploy.deployment import Deployment
from ddtree.deploy.secret_file import SecretFile
from ddtree.deploy.sections import Secret
from ddtree.deploy.unit import cache_folder, render_unit

SECRETS_FOLDER = "/etc/ddtree"
VLLM_KEY = "VLLM_API_KEY"


@dataclass(frozen=True)
class Rendered:
    """Everything that will be on the host.

    Attributes:
        command: as the process will have it, argument by argument.
        environment: variables of the process that are no secrets.
        unit_name: of systemd, or None for the process supervisor.
        unit: its text.
        secret_files: made when applied.
        digest: SHA-256 of all of this.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    unit_name: str | None
    unit: str | None
    secret_files: tuple[SecretFile, ...]

    @property
    def digest(self) -> str:
        files = [(file.path, file.form, sorted(file.sources)) for file in self.secret_files]
        content = json.dumps([self.command, dict(self.environment), self.unit_name, self.unit, files])
        return hashlib.sha256(content.encode()).hexdigest()


def render(deployment: Deployment) -> Rendered:
    """Everything that a deployment comes to.

    Raises:
        UserError: no engine is named where one must be.
    """
    require_program(deployment)
    environment = dict(sorted(deployment.runtime.env.items()))
    if deployment.service.supervisor == "process":
        return _for_process(deployment, environment)
    # The home is where compilers and hubs keep what they make: the service's own folder, not a person's.
    environment = {"HOME": f"/var/cache/{cache_folder(deployment)}", "PYTHONUNBUFFERED": "1"} | environment
    secrets, files, credentials = deployment.secrets, [], {}
    folder = f"{SECRETS_FOLDER}/{deployment.name}"
    credential = _key_file_name(deployment)
    if secrets.api_key and deployment.engine.kind != "vllm":
        path = f"{folder}/{credential}"
        credentials[credential] = path
        files.append(_key_file(deployment, secrets.api_key, path))
    environment_file = None
    if variables := _secret_variables(deployment):
        environment_file = f"{folder}/environment"
        files.append(SecretFile(environment_file, "systemd_environment", variables, _key_variable(deployment)))
    command = render_command(deployment, f"/run/credentials/{unit_name(deployment)}/{credential}")
    unit = render_unit(deployment, command, environment, environment_file=environment_file, credentials=credentials)
    return Rendered(command, environment, unit_name(deployment), unit, tuple(files))


def unit_name(deployment: Deployment) -> str:
    """As systemd knows it."""
    return f"{deployment.name}.service"


def _for_process(deployment: Deployment, environment: dict[str, str]) -> Rendered:
    environment = {"PYTHONUNBUFFERED": "1"} | environment
    secrets, files = deployment.secrets, []
    key_file = f"secrets/{_key_file_name(deployment)}"  # the process starts in its own folder
    if secrets.api_key and deployment.engine.kind != "vllm":
        files.append(_key_file(deployment, secrets.api_key, key_file))
    if variables := _secret_variables(deployment):
        files.append(SecretFile("secrets/environment", "shell_environment", variables, _key_variable(deployment)))
    return Rendered(render_command(deployment, key_file), environment, None, None, tuple(files))


def _key_file_name(deployment: Deployment) -> str:
    return "sglang.yaml" if deployment.engine.kind == "sglang" else "api_keys"


def _key_file(deployment: Deployment, key: Secret, path: str) -> SecretFile:
    if deployment.engine.kind == "sglang":
        return SecretFile(path, "sglang_yaml", {"api-key": key}, "api-key")
    return SecretFile(path, "keys", {"api_key": key}, "api_key")


def _secret_variables(deployment: Deployment) -> dict[str, Secret]:
    variables = dict(deployment.secrets.env)
    if deployment.secrets.api_key and deployment.engine.kind == "vllm":
        variables[VLLM_KEY] = deployment.secrets.api_key
    return variables


def _key_variable(deployment: Deployment) -> str | None:
    """vLLM takes its key from the environment, the other engines from a file of their own."""
    return VLLM_KEY if deployment.secrets.api_key and deployment.engine.kind == "vllm" else None
