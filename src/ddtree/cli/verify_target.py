"""What ``ddtree verify`` is pointed at, and what it is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from ddtree.cli.options import Mode as DecodeMode
from ddtree.cli.options import draft_temperature_option, parse_budget
from ddtree.errors import UserError
from ddtree.verify import Expectation, checked_url, from_deployment
from ddtree.verify.revision import ReadFile

if TYPE_CHECKING:
    from ddtree.deploy.sections import Host, Secret


class Speculation(StrEnum):
    """Whether tokens are drafted."""

    yes = "speculation"
    none = "none"


class OnOff(StrEnum):
    """A switch."""

    on = "on"
    off = "off"


class EngineName(StrEnum):
    """Engines whose pages are known."""

    native = "native"
    sglang = "sglang"
    vllm = "vllm"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a bare address is held to; a deployment file declares all of it by itself."""

    expect: Annotated[
        Speculation | None, typer.Option(help="Whether speculation must be active. Default: speculation.")
    ] = None
    engine: Annotated[EngineName | None, typer.Option(help="The engine that must answer. Default: any.")] = None
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model to ask for. Default: the server's first.")
    ] = None
    algorithm: Annotated[str | None, typer.Option(metavar="NAME", help="ddtree, dflash, or an engine's own.")] = None
    budget: Annotated[str | None, typer.Option(metavar="N|auto", help="Nodes of a draft tree.")] = None
    top_k_cap: Annotated[int | None, typer.Option(min=1, metavar="K", help="Candidates a position.")] = None
    block_size: Annotated[int | None, typer.Option(min=2, metavar="N", help="Tokens of a drafted block.")] = None
    draft_window: Annotated[
        str | None, typer.Option(metavar="N|all", help="Context tokens that the drafter attends to.")
    ] = None
    draft_temperature: Annotated[
        float | None,
        draft_temperature_option("Temperature of the drafter's probabilities for trees."),
    ] = None
    context_length: Annotated[int | None, typer.Option(min=2, metavar="N", help="Longest context in tokens.")] = None
    model: Annotated[str | None, typer.Option(metavar="DIR|ID", help="Where the target comes from.")] = None
    draft: Annotated[str | None, typer.Option(metavar="DIR|ID", help="Where the drafter comes from.")] = None
    attention_backend: Annotated[str | None, typer.Option(metavar="NAME", help="The attention backend.")] = None
    graphs: Annotated[OnOff | None, typer.Option(help="Whether CUDA graphs must be replayed.")] = None
    tau_floor: Annotated[float | None, typer.Option(min=1, help="Least committed tokens per round.")] = None
    tok_s_floor: Annotated[float | None, typer.Option(min=0, help="Least decode speed of one request.")] = None


@dataclass(frozen=True)
class Way:
    """How a server is reached.

    Attributes:
        url: this end's address.
        read: files of its machine, where they can be had.
    """

    url: str
    read: ReadFile | None = None


@dataclass(frozen=True)
class Target:
    """Attributes:
    url: where the server answers, as people know it.
    secret: where the deployment file says that the key is.
    unit: systemd unit of the service, where its journal may be read here.
    tunnel: opens a way to a server on another machine.
    read: files of the server's machine, where it is this one.
    """

    url: str
    expectation: Expectation
    secret: Secret | None = None
    unit: str | None = None
    tunnel: Callable[[], AbstractContextManager[Way]] | None = None
    read: ReadFile | None = None

    def way(self) -> AbstractContextManager[Way]:
        """Raises HostError where its machine is not reached."""
        return self.tunnel() if self.tunnel else nullcontext(Way(self.url, self.read))

    def key(self, file: Path | None) -> str | None:
        """The key from ``file``, else from where the deployment file says.

        Raises:
            UserError: it is not there.
        """
        if file is not None:
            return read_key(file)
        if self.secret is None:
            return None
        from ddtree.deploy.secret_file import fetch_secret

        return fetch_secret(self.secret, "api_key")

    def exposes(self, key: str | None) -> bool:
        """Whether the key would cross a network that others may listen on."""
        from ddtree.deploy.combinations import is_loopback

        parts = urlsplit(self.url)
        return key is not None and not self.tunnel and parts.scheme == "http" and not is_loopback(parts.hostname or "")


def resolve(target: str, url: str | None, declared: Declared) -> Target:
    """An address with its flags, or a deployment file.

    Raises:
        UserError: neither, or flags beside a file.
    """
    if target.endswith(".toml") or Path(target).is_file():
        return _from_file(Path(target), url, declared)
    if url is not None:
        raise UserError("--url beside an address", "leave one of them out")
    return Target(checked_url(target), _from_flags(declared))


def _from_flags(declared: Declared) -> Expectation:
    if declared.expect is Speculation.none:
        for flag, value in {
            "--algorithm": declared.algorithm,
            "--budget": declared.budget,
            "--top-k-cap": declared.top_k_cap,
            "--block-size": declared.block_size,
            "--draft-window": declared.draft_window,
            "--draft-temperature": declared.draft_temperature,
            "--tau-floor": declared.tau_floor,
            "--draft": declared.draft,
        }.items():
            if value is not None:
                raise UserError(f"{flag} has no meaning with --expect none", "leave one of them out")
    settings: dict[str, Any] = {
        "algorithm": declared.algorithm.lower() if declared.algorithm else None,
        "budget": parse_budget(declared.budget, DecodeMode.tree),
        "top_k_cap": declared.top_k_cap,
        "block_size": declared.block_size,
        "draft_temperature": declared.draft_temperature,
        "context_length": declared.context_length,
        "model": declared.model,
        "drafter": declared.draft,
        "attention_backend": declared.attention_backend,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if declared.draft_window is not None:
        settings["draft_window"] = _window(declared.draft_window)
    expectation = Expectation(
        engine=declared.engine.value if declared.engine else None,
        model_name=declared.served_model_name,
        speculates="none" if declared.expect is Speculation.none else "yes",
        settings=settings,
        tok_s_floor=declared.tok_s_floor,
        graphs=None if declared.graphs is None else declared.graphs is OnOff.on,
    )
    if declared.tau_floor is None:
        return expectation
    return replace(expectation, tau_floor=declared.tau_floor, is_tau_floor_declared=True)


def _window(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise UserError(f"--draft-window is {text!r}", "write a number of tokens, or all")
    return int(text)


def _from_file(file: Path, url: str | None, declared: Declared) -> Target:
    if given := [name for name, value in vars(declared).items() if value is not None]:
        flag = "--" + given[0].replace("_", "-")
        raise UserError(f"{flag} beside a deployment file, which declares that itself", f"leave {flag} out")
    from ddtree.deploy.deployment import load_deployment
    from ddtree.deploy.host import in_url
    from ddtree.deploy.ready import connect_address
    from ddtree.deploy.render import render

    deployment = load_deployment(file)
    service, host, expectation = deployment.service, deployment.host, from_deployment(deployment, str(file))
    secret, at = deployment.secrets.api_key, connect_address(deployment)
    if url is None and host.kind == "ssh":  # whatever it listens on: key and answers go through the SSH connection
        told = f"http://{in_url(at)}:{service.port} on {host.address}"
        return Target(told, expectation, secret, tunnel=partial(_tunnel, host, at, service.port))
    is_here = host.kind == "local"
    unit = f"{service.name}.service" if is_here and service.supervisor == "systemd" else None
    if unit is not None:
        expectation = replace(expectation, unit=unit, command=render(deployment).command[1:])
    return Target(
        checked_url(url or f"http://{in_url(at)}:{service.port}"),
        expectation,
        secret,
        unit if service.log in (None, "journal") else None,
        read=_read_here if is_here else None,
    )


def _read_here(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "verify as a user who can") from None


@contextmanager
def _tunnel(section: Host, address: str, port: int) -> Iterator[Way]:
    """Raises HostError where the machine is not reached."""
    from ddtree.deploy.ssh_host import SshHost

    host = SshHost(section, "none")
    try:
        with host.reach(address, port) as url:
            yield Way(url, host.read)
    finally:
        host.close()


def read_key(file: Path) -> str:
    """The first line of a file that is no remark.

    Raises:
        UserError: there is none, or the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the key file {file} ({why})", "give --api-key-file a file") from None
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys or not keys[0].isascii() or not keys[0].isprintable():
        raise UserError(f"the key file {file} holds no key", "write the key on a line of its own")
    return keys[0]
