"""Which engine answers at an address."""

from __future__ import annotations

from typing import Any

from ddtree.errors import UserError
from ddtree.verify.engines.adapter import Adapter
from ddtree.verify.engines.native import NativeAdapter
from ddtree.verify.engines.sglang import SglangAdapter
from ddtree.verify.engines.vllm import VllmAdapter
from ddtree.verify.http_client import CheckFailed, Garbled, HttpClient, Hung, KeyRefused, Refused, Unreachable

ENGINES: dict[str, type[Adapter]] = {each.engine: each for each in (NativeAdapter, SglangAdapter, VllmAdapter)}


def detect(
    http: HttpClient, engine: str | None, model_name: str | None, info_timeout_s: float, answer_timeout_s: float
) -> Adapter:
    """The adapter for the server.

    Args:
        engine: the engine that was declared; None finds it out by the pages that only it has.
        model_name: the name to ask for; None takes the server's first.

    Raises:
        CheckFailed: nothing answers, the key is refused, or it is none of the three engines.
    """
    if engine is not None and engine not in ENGINES:
        raise UserError(f"engine {engine!r} is not known", f"choose {', '.join(ENGINES)}")
    names = _model_names(http, info_timeout_s)
    kind = _kind(http, info_timeout_s)
    if kind is None:
        raise Garbled("neither /server_info nor /version tells an engine that ddtree knows")
    if engine is not None and kind != engine:
        raise WrongEngine(f"the pages are those of {kind}, declared is {engine}")
    return ENGINES[kind](http, model_name or names[0], info_timeout_s, answer_timeout_s)


class WrongEngine(CheckFailed):
    """Another engine answers than was declared."""


def _model_names(http: HttpClient, timeout_s: float) -> list[str]:
    told = http.get_json("/v1/models", timeout_s)
    try:
        names = [str(each["id"]) for each in told["data"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise Garbled("/v1/models lists no model")
    return names


def _kind(http: HttpClient, timeout_s: float) -> str | None:
    for path in ("/server_info", "/get_server_info"):
        info = _page(http, path, timeout_s)
        if isinstance(info, dict) and "effective" in info and "requested" in info:
            return NativeAdapter.engine
        if isinstance(info, dict) and ("speculative_algorithm" in info or "internal_states" in info):
            return SglangAdapter.engine
    version = _page(http, "/version", timeout_s)
    return VllmAdapter.engine if isinstance(version, dict) and "version" in version else None


def _page(http: HttpClient, path: str, timeout_s: float) -> Any:
    try:
        return http.get_json(path, timeout_s)
    except (KeyRefused, Hung, Unreachable):
        raise
    except (Refused, Garbled):
        return None
