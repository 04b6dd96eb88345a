"""Load the pair that the options name, the demo's where they name none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ddtree.cli.options import Mode, PairOptions
from ddtree.cli.output import ProgressLine
from ddtree.demo import drafter_folder, target_folder
from ddtree.extras import require_extra

if TYPE_CHECKING:
    from ddtree.engine import Engine, Speculation


def load_engine(
    options: PairOptions,
    mode: Mode,
    speculation: Speculation,
    progress: Callable[[str, float], None],
    *,
    prefix_cache: bool = False,
) -> Engine:
    """The engine for ``mode``; a drafter that is named is loaded even where ``mode`` does without it."""
    model, draft = options.model, options.draft
    if model is None:
        model = target_folder(progress)
        if draft is None and mode is not Mode.ar:
            draft = drafter_folder()
    from ddtree import Engine

    return Engine.load(
        model,
        draft,
        device=options.device,
        dtype=options.dtype.value,
        speculation=speculation,
        block_size=options.block_size,
        draft_window=options.draft_window,
        draft_temperature=options.draft_temperature,
        max_model_len=options.max_model_len,
        memory_fraction=options.memory_fraction,
        max_batch=options.max_batch,
        threads=options.threads,
        exact=options.exact,
        prefix_cache=prefix_cache,
        on_progress=progress,
    )


def import_engine(verb: str, progress: ProgressLine) -> None:
    """Import torch and the engine, which takes seconds, or say which extra is missing."""
    require_extra("engine", f"ddtree {verb}")
    progress("starting torch", 0.0)
    import ddtree.engine  # noqa: F401
