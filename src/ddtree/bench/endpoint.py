"""The server that is measured: which engine it is, what it says about itself, how it counts tokens."""

from __future__ import annotations

import asyncio
import ipaddress
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from ddtree.bench.http_client import OK, HttpClient, HttpFailed, Reply, is_address
from ddtree.bench.told import at, count
from ddtree.errors import UserError
from ddtree.verify.exposition import Exposition

EngineName = Literal["native", "sglang", "vllm", "unknown"]
_FACTS_TIMEOUT_S, _OPEN_TIMEOUT_S, _COUNT_TIMEOUT_S = 30.0, 10.0, 300.0
_MOST_TOTAL = 2.0**63

_COUNTERS = {
    "native": {
        "rounds": "ddtree_rounds_total",
        "completion_tokens": "ddtree_completion_tokens_total",
        "first_tokens": "ddtree_time_to_first_token_seconds_count",
    },
    "sglang": {
        "rounds": "sglang:spec_verify_calls_total",
        "completion_tokens": "sglang:generation_tokens_total",
        "first_tokens": "sglang:num_requests_total",
    },
    "vllm": {
        "drafts": "vllm:spec_decode_num_drafts_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "completion_tokens": "vllm:generation_tokens_total",
    },
}


@dataclass
class Endpoint:
    """An OpenAI-compatible server.

    Attributes:
        url: without a path of the API.
        model: the name that requests carry.
        facts: what it says about itself, by path.
    """

    url: str
    client: HttpClient
    engine: EngineName
    model: str
    facts: dict[str, Any] = field(default_factory=dict)
    tokenizes: bool = False

    async def count_chat(self, text: str) -> int:
        """Tokens of a conversation with one user turn, template included."""
        messages = [{"role": "user", "content": text}]
        if self.engine in ("native", "vllm") and self.tokenizes:
            return await self._counted("/tokenize", self._named({"messages": messages}), "count")
        body = {"model": self.model, "messages": messages, "max_tokens": 1, "temperature": 0}
        return await self._counted("/v1/chat/completions", body, "usage", "prompt_tokens")

    async def count_text(self, text: str) -> int | None:
        """Tokens of bare text without special ones; None where the server has no such path."""
        if not self.tokenizes:
            return None
        body = {"text": text} if self.engine == "native" else {"prompt": text, "add_special_tokens": False}
        return await self._counted("/tokenize", self._named(body), "count")

    async def counters(self) -> dict[str, float]:
        """Totals of `/metrics` that tell rounds and tokens; empty where there are none."""
        names = _COUNTERS.get(self.engine)
        if not names:
            return {}
        try:
            answer = await self.client.get(f"{self.url}/metrics", _FACTS_TIMEOUT_S)
        except HttpFailed:
            return {}
        if answer.status != OK:
            return {}
        told = Exposition(answer.body.decode("utf-8", "replace"))
        found = {name: told.total(metric) for name, metric in names.items()}
        return {name: value for name, value in found.items() if value is not None and abs(value) < _MOST_TOTAL}

    async def open_connections(self, connections: int) -> None:
        """Have so many connections, with TLS where the server has it, for the requests that come next.

        The server is asked for its models as often at the same time; what it answers does not matter.
        """

        async def ask() -> None:
            with suppress(HttpFailed):
                await self.client.get(f"{self.url}/v1/models", _OPEN_TIMEOUT_S)

        await asyncio.gather(*(ask() for _ in range(connections)))

    async def _counted(self, path: str, body: dict[str, Any], *names: str) -> int:
        """The count that the answer holds under ``names``.

        Raises:
            UserError: none came.
        """
        told = await self._post(path, body)
        try:
            return count(at(told, *names))
        except ValueError as error:
            raise UserError(f"{self.url}{path} told no count of tokens", "see the server's log") from error

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self.client.post(f"{self.url}{path}", body, _COUNT_TIMEOUT_S)
            told = answer.json()
        except (HttpFailed, ValueError) as error:
            raise UserError(f"{self.url}{path} gave no answer ({error})", "see the server's log") from error
        if answer.status != OK or not isinstance(told, dict):
            why = self.client.words(error_words(told))
            raise UserError(f"{self.url}{path} answered {answer.status} ({why})", "see its log")
        return told

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        return body if self.engine == "native" else {"model": self.model} | body


def make_client(url: str, api_key: str | None) -> HttpClient:
    """A client for the server at ``url``; a proxy, where the environment names one, is not for this machine itself."""
    return HttpClient(url, api_key, uses_proxies=not is_loopback(url))


def clean_url(url: str) -> str:
    """``url`` as the other functions want it: with a scheme, without a slash or ``/v1`` at its end.

    Raises:
        UserError: it is no address, or holds a password, which would be written into results.
    """
    if not is_address(url) or urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url!r} is no server's address", "write it as http://127.0.0.1:8000")
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError("the server's address holds more than an address", "give keys with --api-key-file")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine, by its address."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def connect(url: str, client: HttpClient, model: str | None) -> Endpoint:
    """Find out what answers at ``url``.

    Raises:
        UserError: nothing answers, a key is wanted, or it has several models and none is named.
    """
    try:
        listed = await client.get(f"{url}/v1/models", _FACTS_TIMEOUT_S)
    except HttpFailed as error:
        raise UserError(f"nothing answers at {url} ({error})", "start the server, or name another") from error
    if listed.status in (401, 403):
        raise UserError(f"{url} wants a key", "give --api-key-file FILE")
    names = _model_names(listed)
    if model is None:
        if len(names) != 1:
            known = f" ({', '.join(names)})" if names else ""
            raise UserError(f"{url} serves {len(names)} models{known}", "name one with --model")
        model = names[0]
    elif names and model not in names:
        raise UserError(f"{url} has no model {model!r}", f"choose {' or '.join(names)}")
    facts: dict[str, Any] = {"/v1/models": names}
    for path in ("/server_info", "/get_server_info", "/version"):
        if (told := await _facts(client, url + path)) is not None:
            facts[path] = without_secrets(told)
            if path == "/server_info":
                break
    endpoint = Endpoint(url, client, _engine(facts), model, facts)
    endpoint.tokenizes = await _tokenizes(endpoint)
    return endpoint


def error_words(told: Any) -> str:
    """What an error's body says."""
    error = told.get("error", told) if isinstance(told, dict) else told
    return str(error.get("message", error) if isinstance(error, dict) else error)


def without_secrets(value: Any) -> Any:
    """Facts as they may be written into results: what is named like a key is left out."""
    if isinstance(value, dict):
        return {
            name: "(left out)" if _is_secret(name) and item else without_secrets(item) for name, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _is_secret(name: str) -> bool:
    words = name.lower().replace("-", "_").split("_")
    if words[0] == "ignored" or words == ["by", "key"]:  # names of settings
        return False
    return words[-1] in ("key", "keys", "token", "secret", "password")


def _model_names(listed: Reply) -> list[str]:
    try:
        return [model["id"] for model in listed.json()["data"] if isinstance(model["id"], str)]
    except (ValueError, KeyError, TypeError):
        return []


async def _facts(client: HttpClient, url: str) -> dict[str, Any] | None:
    try:
        answer = await client.get(url, _FACTS_TIMEOUT_S)
        told = answer.json()
    except (HttpFailed, ValueError):
        return None
    return told if answer.status == OK and isinstance(told, dict) else None


def _engine(facts: dict[str, Any]) -> EngineName:
    info = facts.get("/server_info") or facts.get("/get_server_info") or {}
    if "effective" in info and "ddtree" in (info.get("versions") or {}):
        return "native"
    if "internal_states" in info or "speculative_algorithm" in info:
        return "sglang"
    return "vllm" if "/version" in facts else "unknown"


async def _tokenizes(endpoint: Endpoint) -> bool:
    endpoint.tokenizes = True
    try:
        return bool(await endpoint.count_text("one two three"))
    except UserError:
        return False
