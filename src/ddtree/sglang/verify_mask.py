"""The attention mask of a verify pass in SGLang's layout (slow twin), and the buffer that a worker keeps it in."""

from collections.abc import Callable

import torch

from ddtree.kernels.tree_tensors import TreeTensors


def mask_elements(width: int, committed_sum: int, batch: int) -> int:
    """Elements of the mask of ``batch`` sequences of ``width`` rows with ``committed_sum`` cached tokens together."""
    return width * (committed_sum + batch * width)


def write_verify_mask(ancestors: torch.Tensor, committed: torch.Tensor, out: torch.Tensor) -> None:
    """Write what each row may attend to.

    Sequences follow each other without gaps; each is ``[rows, committed + rows]``: all cached tokens, then the row's
    own ancestors and itself.

    Args:
        ancestors: bool ``[batch, rows, rows]`` as in `ddtree.kernels.tree_tensors.TreeTensors`.
        committed: int64 ``[batch]``, cached tokens.
        out: bool, one-dimensional, at least `mask_elements` long; what lies behind the mask stays as it is.
    """
    rows = ancestors.shape[1]
    start = 0
    for tree, length in zip(ancestors, committed.tolist(), strict=True):
        end = start + rows * (length + rows)
        part = out[start:end].view(rows, length + rows)
        part[:, :length] = True
        part[:, length:] = tree
        start = end


class MaskBuffer:
    """Grows with the batch and its context; handed out as views.

    Args:
        write: `write_verify_mask` or its fast twin.
        device: where the masks lie.
    """

    def __init__(self, write: Callable[..., None], device: torch.device) -> None:
        self._write, self._device = write, device
        self._elements = torch.ones(0, dtype=torch.bool, device=device)

    def of(self, tree: TreeTensors, committed: torch.Tensor, committed_bound: int, most: int | None) -> torch.Tensor:
        """The mask of a batch, long enough whatever the lengths on the device.

        Args:
            tree: the trees to verify.
            committed: int64 ``[batch]``.
            committed_bound: what the host knows of the sum of ``committed``; never too low.
            most: elements that the backend can copy; None for any number.
        """
        batch, width = tree.tokens.shape
        needed = mask_elements(width, committed_bound, batch)
        if self._elements.numel() < needed:
            self._elements = torch.ones(max(2 * needed, 1 << 20), dtype=torch.bool, device=self._device)
        self._write(tree.ancestors, committed, self._elements)
        return self._elements[: needed if most is None else min(needed, most)]
