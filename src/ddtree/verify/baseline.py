"""What the last proven verification of an address measured: its speed, and what the model said."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree.disk import write_whole
from ddtree.errors import UserError
from ddtree.user_cache import cache_folder

_FORMAT = 1


@dataclass(frozen=True)
class Baseline:
    """Attributes:
    target, model_name: what was verified.
    settings_digest: of the effective settings; another digest makes speeds incomparable.
    decode_tok_s: of one request; None where it was not measured.
    fingerprint: per fingerprint prompt, the likeliest next tokens with their log-probabilities; with one entry of
        log-probability 0 where the engine tells texts only.
    prompt_tokens: per fingerprint prompt, its length in tokens.
    verified_unix_s: when.
    """

    target: str
    model_name: str
    settings_digest: str
    decode_tok_s: float | None
    fingerprint: dict[str, dict[str, float]]
    prompt_tokens: dict[str, int]
    verified_unix_s: float

    @property
    def verified_at(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.verified_unix_s))


def digest(settings: Mapping[str, Any], version: str | None) -> str:
    """Of settings and engine version."""
    told = json.dumps([dict(sorted(settings.items())), version], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def baseline_file(target: str, model_name: str) -> Path:
    """Where the baseline of a served model is kept."""
    name = hashlib.sha256(f"{target}\n{model_name}".encode()).hexdigest()[:24]
    return cache_folder() / "verify" / f"{name}.json"


def load_baseline(target: str, model_name: str) -> Baseline | None:
    """None where there is none, or one that this version cannot read."""
    try:
        told = json.loads(baseline_file(target, model_name).read_text(encoding="utf-8"))
        if told.pop("format") != _FORMAT:
            return None
        return Baseline(**told)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def save_baseline(baseline: Baseline) -> Path:
    """Write it in whole or not at all.

    Raises:
        UserError: the cache folder cannot be written.
    """
    path = baseline_file(baseline.target, baseline.model_name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"format": _FORMAT} | asdict(baseline), indent=1))
    except OSError as error:
        raise UserError(
            f"the baseline cannot be kept in {path.parent} ({error.strerror})", "set DDTREE_CACHE, or --no-baseline"
        ) from error
    return path
