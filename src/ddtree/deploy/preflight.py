"""What must be on a host before anything on it is touched."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ddtree.deploy.combinations import TREE_BACKENDS_MLA
from ddtree.deploy.deployment import Deployment
from ddtree.deploy.host import Host, HostError
from ddtree.deploy.render import Rendered
from ddtree.deploy.supervisor import Supervisor
from ddtree.deploy.unit_check import check_unit
from ddtree.errors import UserError

# Arguments: what must be, and where. Prints what is not; privileged, so that nothing is hidden.
_LOOK = """
while [ $# -gt 1 ]; do
    case $1 in
        program) [ -f "$2" ] && [ -x "$2" ] ;;
        folder) [ -d "$2" ] ;;
        weights) [ -f "$2/config.json" ] ;;
        user) id -u -- "$2" >/dev/null 2>&1 ;;
    esac || printf '%s %s\\n' "$1" "$2"
    shift 2
done
"""
_REMEDIES = {
    "program": ("there is no program {}", "install the engine there, or correct engine.venv"),
    "folder": ("there is no folder {}", "make it, or correct the deployment file"),
    "weights": ("{} holds no config.json", "put the weights there, for example with: ddtree fetch"),
    "user": ("there is no user {}", "make it (useradd --system), or leave service.user out"),
}


def check_host(deployment: Deployment, rendered: Rendered, host: Host, supervisor: Supervisor) -> None:
    """Refuse where the service could not run.

    Raises:
        UserError: what is missing, and what to do.
    """
    if deployment.parallelism.nodes > 1:
        raise UserError(
            f"parallelism.nodes = {deployment.parallelism.nodes}: services of several machines are not applied",
            "render the unit of each node, put it in place yourself, and start them together",
        )
    supervisor.refuse_foreign()
    _require(host, _needs(deployment, rendered))
    _check_attention(deployment, host)
    _check_port(deployment, host, supervisor)
    if rendered.unit and rendered.unit_name:
        check = check_unit(host, rendered.unit_name, rendered.unit, is_its_host=True)
        if check.complaints:
            raise HostError(f"systemd on {host.name} does not take the unit ({check.complaints[0]})", "see: render")


def _needs(deployment: Deployment, rendered: Rendered) -> list[tuple[str, str]]:
    service = deployment.service
    needs = [("program", rendered.command[0])]
    needs += [("weights", one.path) for one in (deployment.model, deployment.drafter) if one and one.path]
    needs += [("folder", path) for path in service.read_write_paths]
    if service.log not in (None, "journal"):
        needs.append(("folder", str(service.log).rsplit("/", 1)[0] or "/"))
    if service.user:
        needs.append(("user", service.user))
    return needs


def _require(host: Host, needs: Sequence[tuple[str, str]]) -> None:
    told = host.run(_LOOK, *[word for need in needs for word in need], privileged=True)
    missing = told.stdout.splitlines()
    if told.exit_code or missing:
        kind, _, what = (missing or [" "])[0].partition(" ")
        cause, remedy = _REMEDIES.get(kind, (f"looking around failed ({told.trouble})", "look after it"))
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise HostError(f"on {host.name} {cause.format(what)}{more}", remedy)


def _check_attention(deployment: Deployment, host: Host) -> None:
    """A target that turns out to be MLA must be declared so: it decides which attention backends see the tree."""
    path, backend = deployment.model.path, deployment.runtime.attention_backend
    if deployment.engine.kind != "sglang" or deployment.speculation.algorithm != "ddtree" or not path:
        return
    try:
        config = json.loads(host.read(f"{path}/config.json", privileged=True) or b"{}")
        inner = config.get("text_config", config)
        is_mla = any(isinstance(part, dict) and part.get("kv_lora_rank") for part in (config, inner))
    except (ValueError, AttributeError, RecursionError):
        raise HostError(f"{path}/config.json on {host.name} is no JSON object", "fetch the weights anew") from None
    if is_mla and backend not in TREE_BACKENDS_MLA:
        raise UserError(
            f"the target attends by MLA, and runtime.attention_backend is {backend or 'missing'}",
            'set model.attention = "mla" and runtime.attention_backend = "triton", or "fa3" on Hopper',
        )
    if deployment.model.attention is not None and is_mla != (deployment.model.attention == "mla"):
        is_now = "mla" if is_mla else "mha"
        raise UserError(
            f'model.attention = "{deployment.model.attention}", but it is {is_now}', f'set it to "{is_now}"'
        )


def _check_port(deployment: Deployment, host: Host, supervisor: Supervisor) -> None:
    service = deployment.service
    if any(not one.is_ours and one.serves(service.address) for one in supervisor.listeners(service.port)):
        raise HostError(
            f"another process on {host.name} listens on port {service.port}", "choose another service.port, or stop it"
        )
