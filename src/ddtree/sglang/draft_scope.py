"""The drafter's own settings: its verify mode is as wide as a block and knows no tree, while the target's is a tree's.

SGLang has one set of speculative settings a process. Up to 0.5.16 a runner reads them from the arguments that it was
made with, since 0.5.18 from the process's configuration, in 0.5.17 from both; so the drafter gets arguments of its own
where those are read, and is made and run within a scope of the configuration.
"""

import contextlib
import dataclasses
from copy import deepcopy
from typing import Any

from sglang.srt import runtime_context


class DraftScope:
    """What the drafter is made with and within.

    Args:
        server_args: SGLang's, of the whole server.
        block_size: tokens that the drafter sees at once.
    """

    def __init__(self, server_args: Any, block_size: int) -> None:
        self._settings = {
            "speculative_num_draft_tokens": block_size, "speculative_eagle_topk": 1, "speculative_num_steps": 1,
        }  # fmt: skip
        self.arguments = self._own(server_args)
        self._has_configuration = hasattr(runtime_context, "get_spec")

    def _own(self, server_args: Any) -> Any:
        if not dataclasses.is_dataclass(server_args):
            return server_args  # 0.5.23 reads nothing of this from there
        own: Any = deepcopy(server_args)
        vars(own).pop("max_speculative_num_draft_tokens", None)  # cached from the target's width
        if hasattr(own, "override"):
            own.override("ddtree.draft", **self._settings)
        else:  # 0.5.18 seals its arguments; this copy is nobody else's
            vars(own).update(self._settings)
        return own

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which SGLang's configuration is the drafter's."""
        if not self._has_configuration:
            return contextlib.nullcontext()
        scope: contextlib.AbstractContextManager[Any] = runtime_context.get_spec().override(**self._settings)
        return scope
