"""The attention mask of a verify pass in SGLang's layout (slow twin)."""

import torch


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
