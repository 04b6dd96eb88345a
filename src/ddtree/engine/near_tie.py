"""Is an answer the target's own? Every token against the target decoding one token a step over the same prefix.

In bfloat16 a pass over many rows and a pass over one round differently, so two tokens whose logits almost agree can
swap. Such a near-tie is told apart from a fault by its gap: at most `MAX_STEPS` steps of bfloat16 at that logit's
magnitude.
"""

import math
from dataclasses import dataclass

import torch

from ddtree.engine.prefill import prefill_chunk
from ddtree.engine.round import verify
from ddtree.engine.sampling_params import SamplingParams
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.kernels.kernel_set import TWINS
from ddtree.kernels.tree_tensors import root_only
from ddtree.models.target import Target

MAX_STEPS = 4.0


@dataclass(frozen=True)
class NearTie:
    """A token that is not the target's argmax.

    Attributes:
        index: place in the answer, from 0.
        token_id: the answer's token.
        top_token_id: the argmax.
        gap: its logit less the answer's token's.
        bf16_steps: the gap in steps of bfloat16 at the magnitude of the token's logit.
    """

    index: int
    token_id: int
    top_token_id: int
    gap: float
    bf16_steps: float

    @property
    def is_fault(self) -> bool:
        return self.bf16_steps > MAX_STEPS


@dataclass(frozen=True)
class LosslessReport:
    """All tokens of an answer that are not the argmax of the teacher-forced target.

    Attributes:
        tokens: tokens checked.
        differing: those that are not the argmax, in order.
    """

    tokens: int
    differing: list[NearTie]

    @property
    def near_ties(self) -> list[NearTie]:
        return [tie for tie in self.differing if not tie.is_fault]

    @property
    def faults(self) -> int:
        return sum(tie.is_fault for tie in self.differing)

    @property
    def first_divergence(self) -> NearTie | None:
        return self.differing[0] if self.differing else None


def bf16_step(value: float) -> float:
    """Distance between neighbouring bfloat16 numbers at the magnitude of ``value``."""
    exponent = math.floor(math.log2(abs(value))) if value else -126
    return 2.0 ** (max(exponent, -126) - 7)


def check_lossless(
    state: DeviceState,
    slot: int,
    pages: list[int],
    target: Target,
    prompt: list[int],
    token_ids: list[int],
    prefill_tokens: int,
) -> LosslessReport:
    """Teacher-force an answer through one-row passes and hold each token against the argmax.

    Args:
        slot, pages: a free slot and pages for prompt and answer.
        prefill_tokens: as the engine prefills, so that the prefix is cached by the same products.
    """
    state.seat(slot, prompt, pages, SamplingParams(), 0)
    slots = state.on_device([slot])
    for begin in range(0, len(prompt) - 1, prefill_tokens):
        chunk = state.on_device([prompt[begin : min(begin + prefill_tokens, len(prompt) - 1)]])
        prefill_chunk(state, state.select(slots, SamplingFlags(), begin), target, None, chunk, is_last=False)
    forced = state.on_device([prompt[-1], *token_ids])
    first = len(prompt) - 1
    tops, gaps, logits = _force(state, slots, target, forced, first)
    differing = [
        NearTie(index, token, top, gap, gap / bf16_step(logit))
        for index, (token, top, gap, logit) in enumerate(
            zip(token_ids, tops.tolist(), gaps.tolist(), logits.tolist(), strict=True)
        )
        if top != token
    ]
    return LosslessReport(len(token_ids), differing)


def _force(
    state: DeviceState, slots: torch.Tensor, target: Target, forced: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode along ``forced`` one token a step, as one graph replayed on a GPU with fast kernels.

    Args:
        slots: int64 ``[1]``, a sequence that has committed ``first`` tokens.
        forced: int64 ``[n + 1]``, the root and the tokens that follow it.

    Returns:
        for each of the n tokens: the argmax, its logit less the token's, and the token's logit.
    """
    n = forced.shape[0] - 1
    tops = torch.zeros(n, dtype=torch.int64, device=forced.device)
    gaps, token_logits = (torch.zeros(n, device=forced.device) for _ in range(2))

    def step(context_bound: int) -> None:
        batch = state.select(slots, SamplingFlags(), context_bound)
        index = batch.committed - first
        seen = verify(state, batch, target, root_only(forced[index]), ())
        logits = seen.logits[0, 0].float()
        top, token = logits.argmax(-1, keepdim=True), forced[index + 1]
        tops[index] = top
        token_logits[index] = logits[token]
        gaps[index] = logits[top] - logits[token]
        state.committed[slots] = batch.committed + 1

    if target.device.type != "cuda" or target.kernels is TWINS:
        for index in range(n):
            step(first + index)
        return tops, gaps, token_logits
    bound = first + n
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(bound)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(bound)
    for _ in range(n - 1):
        graph.replay()
    return tops, gaps, token_logits
