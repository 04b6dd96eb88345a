"""What the server said of itself, as lines that a reader can take in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ddtree.bench.record import SessionRecord

_OWN = ("versions", "commit", "requested", "effective")
# Of an engine that tells hundreds of settings, those that decide speed and memory.
_DECISIVE = re.compile(
    r"^(version|dtype|quantization|page_size|sleep_on_idle|schedule_policy|max_model_len|max_num_seqs)$|"
    r"^(speculative_(?!ngram|eagle|moe)|attention_backend|sampling_backend|cuda_graph_bs|disable_.*(graph|radix|overlap)|"
    r"[tpde]p_size|mem_fraction|max_running_requests|context_length|max_total|kv_cache_dtype|chunked_prefill)"
)
_LONGEST = 120


def server_facts(sessions: Sequence[SessionRecord]) -> list[str]:
    """``name = value`` of the last session whose server told something; what is not set is left out."""
    for session in sorted(sessions, key=lambda each: -each.started_at):
        info = session.server_facts.get("/server_info") or session.server_facts.get("/get_server_info")
        if info:
            own = {name: info[name] for name in _OWN if name in info}
            lines = _lines(own) if own else (line for line in _lines(info) if _is_decisive(line))
            return sorted(dict.fromkeys(lines))
    return []


def _is_decisive(line: str) -> bool:
    name = line.split(" = ")[0]
    return bool(_DECISIVE.search(name))


def _lines(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value and all(str(key).isdecimal() for key in value) and not _nested(value.values()):
        yield f"{name} = {', '.join(f'{key}: {_told(value[key])}' for key in sorted(value, key=int))}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _lines(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        text = ", ".join(map(_told, value))
        is_short = len(text) <= _LONGEST and not _nested(value)
        if value:
            yield f"{name} = {text if is_short else f'({len(value)} entries)'}"
    elif value not in (None, False, ""):
        yield f"{name} = {_told(value)}"


def _nested(values: Iterable[Any]) -> bool:
    return any(isinstance(item, (dict, list)) for item in values)


def _told(value: Any) -> str:
    """One line; of a path, the end, since the rest is of one machine."""
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(str(value).split())
    if text.startswith("/") and text.count("/") > 2:
        text = "..." + "/".join(["", *text.rstrip("/").split("/")[-2:]])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
