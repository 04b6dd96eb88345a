"""Optional dependencies: which packages an extra brings, and the message where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from ddtree.errors import UserError

_ENGINE = ("torch", "transformers", "safetensors", "tokenizers", "jinja2")
_PACKAGES = {
    "fetch": ("huggingface_hub",),
    "kit": ("bagit", "rocrate", "detect_secrets", "zstandard"),
    "engine": _ENGINE,
    "search": ("optuna",),
    "server": (*_ENGINE, "fastapi", "uvicorn", "prometheus_client", "llguidance"),
}


def require_extra(extra: str, user: str) -> None:
    """Raise :class:`UserError` unless every package of ``extra`` is installed; ``user`` is what needs it."""
    if any(find_spec(package) is None for package in _PACKAGES[extra]):
        raise UserError(f"{user} needs ddtree[{extra}]", f"pip install 'ddtree[{extra}]'")
