"""Tau of a drafter in the making, through the real engine."""

from __future__ import annotations

from pathlib import Path

import torch

from ddtree.models.target_config import read_target_config
from ddtree.train.acceptance import EvaluationRequest, Plan, check_prompts, evaluate_drafter
from ddtree.train.settings import TrainSettings

PLANS: tuple[Plan, ...] = ("chain", 64)
LONGEST_ANSWER = 256


def check_tau_prompts(settings: TrainSettings) -> None:
    """Refuse prompts that would end the run when tau is measured.

    Raises:
        UserError: a file or one of its first rows is no use.
    """
    if settings.held_out.tau_prompts:
        check_prompts(_request(settings, Path(), "auto"))


def quick_tau(settings: TrainSettings, drafter: Path, device: torch.device) -> dict[str, float]:
    """Committed tokens per round over the first prompts of each file, by file and draft; greedy."""
    evaluation = evaluate_drafter(_request(settings, drafter, str(device)), lambda stage, fraction: None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {f"{row.data_set}, {row.plan}": row.tau for row in evaluation.rows}


def _request(settings: TrainSettings, drafter: Path, device: str) -> EvaluationRequest:
    context = read_target_config(settings.target).max_positions
    return EvaluationRequest(
        model=settings.target,
        draft=drafter,
        prompts=settings.held_out.tau_prompts,
        plans=PLANS,
        max_new_tokens=min(LONGEST_ANSWER, context // 2),
        count=settings.held_out.tau_count,
        device=device,
        dtype=settings.dtype,
    )
