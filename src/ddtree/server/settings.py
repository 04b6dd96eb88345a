"""What a server is told at its start, checked once."""

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ddtree.errors import UserError

MIN_KEY_LENGTH = 8


@dataclass(frozen=True)
class ApiKeys:
    """Keys that clients may show; only their hashes are kept."""

    digests: tuple[bytes, ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __add__(self, others: "ApiKeys") -> "ApiKeys":
        return ApiKeys(self.digests + others.digests)

    def accept(self, shown: bytes) -> bool:
        """Whether ``shown`` is one of the keys, in a time that does not depend on how much of it fits."""
        digest = hashlib.sha256(shown).digest()
        fits = [hmac.compare_digest(digest, own) for own in self.digests]
        return any(fits)


def read_api_keys(file: Path) -> ApiKeys:
    """Keys from a file, one a line; empty lines and lines that begin with ``#`` do not count.

    Raises:
        UserError: the file cannot be read, holds no key, or one too short to be secret.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the key file {file} ({error.strerror})", "give --api-key-file a file") from None
    except UnicodeDecodeError:
        raise UserError(f"the key file {file} is not UTF-8 text", "write one key a line") from None
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise UserError(f"the key file {file} holds no key", "write one key a line")
    return _hashed(keys, f"a key in {file}")


def api_key(key: str) -> ApiKeys:
    """A single key.

    Raises:
        UserError: it is too short to be secret, or cannot be sent.
    """
    return _hashed([key.strip()], "the key")


def _hashed(keys: list[str], what: str) -> ApiKeys:
    if any(len(key) < MIN_KEY_LENGTH for key in keys):
        raise UserError(f"{what} is shorter than {MIN_KEY_LENGTH} characters", "make one with: openssl rand -hex 24")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UserError(f"{what} holds blanks or characters beyond ASCII", "make one with: openssl rand -hex 24")
    return ApiKeys(tuple(hashlib.sha256(key.encode()).digest() for key in keys))


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server listens and what it lets in.

    Attributes:
        model_name: the name that clients give in ``model``.
        host, port: where to listen; port 0 takes a free one.
        api_keys: keys of which every request must show one; empty lets everybody in.
        insecure: listen beyond this machine without a key.
        max_queue: requests that may wait beside those that run; more are refused with 429.
        queue_timeout_s: a request that has not begun to run by then is refused with 503.
        request_timeout_s: a request that is not done by then is given up.
        drain_s: after SIGTERM, running requests get so much time to end.
        stall_s: a round that takes longer makes the server not ready.
        max_body_bytes: larger bodies are refused with 413.
        client_timeout_s: a client must have sent its body, and taken each piece of its answer, within so much time.
        show_text: show the words of the last round's tree on the status page.

    Raises:
        UserError: a value is out of range, or the address is public and there is no key.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: ApiKeys = ApiKeys()
    insecure: bool = False
    max_queue: int = 64
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    drain_s: float = 30.0
    stall_s: float = 60.0
    max_body_bytes: int = 4 * 2**20
    client_timeout_s: float = 30.0
    show_text: bool = False

    def __post_init__(self) -> None:
        if not self.model_name or self.model_name != self.model_name.strip():
            raise UserError(f"the served model name is {self.model_name!r}", "choose one without blanks around it")
        if not 0 <= self.port <= 65535:
            raise UserError(f"port {self.port} is not possible", "choose 1 to 65535, or 0 for a free one")
        for name in ("queue_timeout_s", "request_timeout_s", "stall_s", "client_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} is {getattr(self, name)}", "choose a number of seconds above 0")
        if not 0 <= self.drain_s < float("inf"):
            raise UserError(f"drain_s is {self.drain_s}", "choose a number of seconds, at least 0")
        if self.max_queue < 0 or self.max_body_bytes < 1:
            raise UserError("max_queue or max_body_bytes is too small", "choose at least 0 and 1")
        if not self.api_keys and not self.insecure and not is_loopback(self.host):
            raise UserError(
                f"{self.host} can be reached from other machines, and there is no key",
                "add --api-key-file FILE or --api-key KEY, or say --insecure",
            )
        if self.api_keys and self.insecure:
            raise UserError("--insecure lets everybody in, and there is a key", "leave one of them out")

    def echo(self) -> dict[str, Any]:
        """The settings as they go into ``/server_info``; of the keys only how many there are."""
        told = {item.name: getattr(self, item.name) for item in fields(self)}
        return told | {"api_keys": len(self.api_keys.digests)}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
