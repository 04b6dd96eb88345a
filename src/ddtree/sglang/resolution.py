"""Resolving SGLang's arguments for DDTREE: refusals first, then the fields that SGLang's core reads."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from ddtree.sglang.budget_choice import BudgetChoice, command_line
from ddtree.sglang.refusals import why_backend_refused, why_refused
from ddtree.sglang.settings import AUTO, Asked, SettingsError, TreeSettings, resolve

logger = logging.getLogger(__name__)

TREE_TOPK = 2
"""Any ``speculative_eagle_topk`` above 1 turns the attention backends to trees; our cap is kept in our own settings."""

CHAIN_TOPK = 1
"""Leaves the attention backends with the causal verify pass of SGLang's DFLASH."""

MAX_RUNNING_REQUESTS = 48


def resolve_server_args(server_args: Any) -> None:
    """Check and complete ``server_args`` in place.

    Raises:
        SettingsError: something asked for cannot be; one line says what and what to do instead.
    """
    view = resolved_view(server_args)
    if server_args.speculative_eagle_topk not in (None, CHAIN_TOPK, TREE_TOPK):
        raise SettingsError("DDTREE: --speculative-eagle-topk is EAGLE's: use --speculative-ddtree-topk-cap")
    asked = Asked.from_environment()
    block, temperature = server_args.speculative_dflash_block_size, None
    choice = None
    if asked.budget != 0 and not _is_off(server_args):
        if reason := why_refused(view):
            raise SettingsError(f"DDTREE: {reason}")
        _check_backends(view, server_args)
        own_block, temperature = drafters_own(server_args)
        block = own_block if block is None else int(block)
        choice = BudgetChoice(view, model_config(server_args).hf_config, asked, command_line())
        if asked.budget == AUTO:
            asked = replace(asked, budget=choice.auto())
    settings = resolve(asked, server_args.speculative_num_draft_tokens, block, temperature)
    if settings is None or choice is None:
        _turn_off(server_args)
        return
    settings = _that_starts(settings, choice, server_args)
    window = server_args.speculative_draft_window_size
    if window is not None and window < settings.block_size:
        raise SettingsError(
            f"DDTREE: --speculative-draft-window-size {window} is below the block size {settings.block_size}: raise it"
        )
    server_args.speculative_num_draft_tokens = settings.width
    server_args.speculative_dflash_block_size = settings.block_size
    topk = CHAIN_TOPK if settings.is_chain else TREE_TOPK
    server_args.speculative_eagle_topk = topk
    # SGLang counts on 2 * max(steps * topk, width) slots a request; a block wider than the tree needs more of them.
    enough = settings.reserve_tokens <= 2 * settings.width
    server_args.speculative_num_steps = 1 if enough else -(-settings.reserve_tokens // (2 * topk))
    _resolve_draft_backend(server_args)
    if server_args.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
        logger.info(
            "DDTREE: max_running_requests is set to %d; --max-running-requests changes it", MAX_RUNNING_REQUESTS
        )
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        logger.warning("DDTREE: mixed chunked prefill is turned off, a verify batch holds trees only")
    settings.to_environment()
    _show(settings, server_args)
    logger.info("DDTREE: %s", settings.one_line())


def _show(settings: TreeSettings, server_args: Any) -> None:
    """Name the shape in ``/server_info``: its ``internal_states`` are all attributes of these arguments.

    They are no declared fields, so SGLang's own handling of its dataclass does not see them. SGLang 0.5.23 tells of
    declared fields only: there `ddtree.sglang.hooks.tell_shape` adds them.
    """
    for name, value in settings.told().items():
        setattr(server_args, name, value)


def _is_off(server_args: Any) -> bool:
    return server_args.speculative_num_draft_tokens == 1


def _that_starts(settings: TreeSettings, choice: BudgetChoice, server_args: Any) -> TreeSettings:
    """The settings, or what takes their place where the verify graph cannot be captured on this device."""
    budget = choice.checked(settings.budget)
    if budget == settings.budget:
        return settings
    if budget is None:
        server_args.cuda_graph_config.decode.backend = "disabled"
        logger.warning(
            "DDTREE: CUDA graph capture of the verify pass dies at every width on this device: running without decode "
            "graphs, several times slower; --speculative-algorithm DFLASH may be faster here"
        )
        return settings
    logger.warning(
        "DDTREE: CUDA graph capture dies at budget %d on this device, the widest that works is %d: using that",
        settings.budget, budget,
    )  # fmt: skip
    return replace(settings, budget=budget, topk_cap=min(settings.topk_cap, budget))


def resolved_view(server_args: Any) -> Any:
    """SGLang's arguments with the defaults that it has declared so far."""
    from sglang.srt.arg_groups import overrides

    # What 0.5.23 gives to a plugin reads through its view already, and what is written to it is declared.
    if type(server_args).__name__ == "_ForeignDefaults" or not hasattr(overrides, "resolved_view"):
        return server_args
    return overrides.resolved_view(server_args)


def model_config(server_args: Any) -> Any:
    """The target's, as SGLang reads it."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(object.__getattribute__(server_args, "_cfg"))  # 0.5.23


def drafters_own(server_args: Any) -> tuple[int | None, Any]:
    """Block size and draft temperature in the drafter's config, the latter as it stands there; None where it does not
    say."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = server_args.speculative_draft_model_path
    if path is None:
        return None, None
    config = get_config(
        path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )
    size = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    own = getattr(config, "dflash_config", None)
    temperature = own.get("draft_temperature") if isinstance(own, dict) else None
    return None if size is None else int(size), temperature


def _turn_off(server_args: Any) -> None:
    logger.warning("DDTREE: budget 0 is plain decoding; the drafter is not loaded")
    server_args.speculative_algorithm = None
    server_args.speculative_draft_model_path = None
    server_args.speculative_draft_model_revision = None
    server_args.speculative_num_draft_tokens = None
    server_args.speculative_eagle_topk = None


def _check_backends(view: Any, server_args: Any) -> None:
    prefill = view.prefill_attention_backend or view.attention_backend
    decode = view.decode_attention_backend or view.attention_backend
    mla = model_config(server_args).attention_arch.name == "MLA"
    for backend in dict.fromkeys((prefill, decode)):  # a verify pass may go to either: speculative_attention_mode
        if reason := why_backend_refused(backend, mla, view.page_size):
            raise SettingsError(f"DDTREE: {reason}")


def _resolve_draft_backend(server_args: Any) -> None:
    """As for DFLASH: the drafter's block attends both ways, which not every backend can."""
    from sglang.srt.arg_groups.speculative_hook import _resolve_dflash_draft_attention_backend

    _resolve_dflash_draft_attention_backend(server_args)
