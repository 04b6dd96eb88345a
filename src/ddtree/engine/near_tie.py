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
    differing: list[NearTie] = []

    def hold(index: int, logits: torch.Tensor) -> None:
        token = token_ids[index]
        top = int(logits.argmax())
        if top != token:
            gap = float(logits[top] - logits[token])
            differing.append(NearTie(index, token, top, gap, gap / bf16_step(float(logits[token]))))

    for begin in range(0, len(prompt) - 1, prefill_tokens):
        chunk = torch.tensor([prompt[begin : min(begin + prefill_tokens, len(prompt) - 1)]], device=target.device)
        prefill_chunk(state, state.select(slots, SamplingFlags(), begin), target, None, chunk, is_last=False)
    for index, token in enumerate([prompt[-1], *token_ids[:-1]]):
        batch = state.select(slots, SamplingFlags(), len(prompt) - 1 + index)
        seen = verify(state, batch, target, root_only(torch.tensor([token], device=target.device)), ())
        hold(index, seen.logits[0, 0].float())
        state.committed[slot] += 1
    return LosslessReport(len(token_ids), differing)
