"""How far a drafter's distributions are sharpened before a request's tree is built."""

from typing import TypeVar

import torch

Number = TypeVar("Number", float, torch.Tensor)


def sharpness_of(draft_temperature: float, temperature: Number) -> Number:
    """What the drafter's logits are multiplied by: the reciprocal of the temperature at which trees are built.

    A greedy target takes its likeliest token for certain, and a drafter may foretell that with too little confidence,
    or too much: for that the draft temperature stands. Tokens sampled at temperature 1 follow the drafter's
    distributions as they are. In between the temperature changes in proportion; above 1 it stays at 1.

    Args:
        draft_temperature: for greedy requests.
        temperature: at which a request samples, or float64 ``[batch]`` of several; 0 for greedy ones.

    Returns:
        as many numbers. Rounded to float32 they are exact at 1, and one by one the same as together.
    """
    capped = temperature.clamp_max(1.0) if isinstance(temperature, torch.Tensor) else min(temperature, 1.0)
    return 1 / (draft_temperature + (1 - draft_temperature) * capped)
