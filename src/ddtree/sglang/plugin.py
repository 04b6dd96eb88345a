"""The entry point: registers DDTREE with the SGLang that loads it, or says in one line why not."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

NAME, SECOND_NAME = "DDTREE", "DDTREE_PLUGIN"


def register() -> None:
    """Called by SGLang in every process that loads plugins; safe to call again."""
    from ddtree.sglang.signatures import RELEASES, check_installed

    version, release, differences = check_installed()
    if release is None:
        logger.error(
            "ddtree does not know SGLang %s and registers nothing: %s; use one of %s",
            version, "; ".join(differences), ", ".join(RELEASES),
        )  # fmt: skip
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from ddtree.sglang import flags, hooks
    from ddtree.sglang.algorithm import DDTreeAlgorithm, worker_class
    from ddtree.sglang.child_server import end_with_starter

    name = NAME
    if NAME in SpeculativeAlgorithm.__members__:
        name = SECOND_NAME
        logger.warning("SGLang %s has a DDTREE of its own: ours is --speculative-algorithm %s", version, name)
    if get_spec(name) is not None:
        return
    end_with_starter()
    SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=DDTreeAlgorithm)(worker_class)
    HookRegistry.register(hooks.CAPTURE, hooks.mask_in_capture, HookType.AFTER)
    HookRegistry.register(hooks.DUMMY, hooks.mask_in_dummy, HookType.AFTER)
    HookRegistry.register(hooks.REQUEST, hooks.refuse_request, HookType.AFTER)
    if release == "0.5.23":
        HookRegistry.register(hooks.STATE, hooks.tell_shape, HookType.AFTER)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", flags.add_flags, HookType.AFTER)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.from_cli_args", flags.take_flags, HookType.AROUND)
