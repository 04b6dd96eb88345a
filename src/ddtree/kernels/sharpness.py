"""How far a drafter's distributions are sharpened before a request's tree is built."""

import torch


def sharpness_of(draft_temperature: float, temperatures: torch.Tensor) -> torch.Tensor:
    """What the drafter's logits are multiplied by: the reciprocal of the temperature at which trees are built.

    A greedy target takes its likeliest token for certain, and a drafter may foretell that with too little confidence,
    or too much: for that the draft temperature stands. Tokens sampled at temperature 1 follow the drafter's
    distributions as they are. In between the temperature changes in proportion; above 1 it stays at 1.

    Args:
        draft_temperature: for greedy requests.
        temperatures: float32 ``[batch]``, at which the requests sample; 0 for greedy ones.

    Returns:
        float32 ``[batch]``.
    """
    own, one = torch.full_like(temperatures, draft_temperature), torch.ones_like(temperatures)
    return own.lerp(one, temperatures.clamp_max(1.0)).reciprocal()
