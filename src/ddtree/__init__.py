"""ddtree: lossless, several times faster decoding of large language models with draft trees.

The engine is imported at the first use of one of its names, so ``import ddtree`` is quick and works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.engine import Completion as Completion
    from ddtree.engine import Engine as Engine
    from ddtree.engine import RoundStats as RoundStats
    from ddtree.engine import SamplingParams as SamplingParams
    from ddtree.engine import Speculation as Speculation

__version__ = "0.1.0"

_ENGINE_NAMES = ("Completion", "Engine", "RoundStats", "SamplingParams", "Speculation")

__all__ = ["__version__", *_ENGINE_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _ENGINE_NAMES:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    from ddtree.extras import require_extra

    require_extra("engine", f"ddtree.{name}")
    from ddtree import engine

    return getattr(engine, name)


def __dir__() -> list[str]:
    return sorted(__all__)
