"""Moving accepted tokens to their places in a paged cache, all layers in one launch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit
def _move_rows_kernel(
    cache, source, target, n, width, plane_stride, slot_stride, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr
):
    plane = cache + tl.program_id(0).to(tl.int64) * plane_stride
    token = tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (token < n)[:, None] & (column < width)[None, :]
    read_from = tl.load(source + token, mask=token < n, other=0)
    write_to = tl.load(target + token, mask=token < n, other=0)
    values = tl.load(plane + read_from[:, None] * slot_stride + column[None, :], mask=inside, other=0.0)
    tl.debug_barrier()  # a slot may be both read and written: all threads have read before any writes
    tl.store(plane + write_to[:, None] * slot_stride + column[None, :], values, mask=inside)


def move_rows(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `ddtree.kernels.paged.move_rows`."""
    layers, two, _, kv_heads, head_dim = cache.shape
    n, width = source.shape[0], kv_heads * head_dim
    planes = cache.view(layers * two, *cache.shape[2:])
    block_n = triton.next_power_of_2(n)
    # One program holds a strip of all tokens in registers; 16 thousand elements are 64 to 128 a thread.
    block_w = min(triton.next_power_of_2(width), max(16384 // block_n, 16), 256)
    _move_rows_kernel[(layers * two, triton.cdiv(width, block_w))](
        planes, source.contiguous(), target.contiguous(), n, width, planes.stride(0), planes.stride(1),
        BLOCK_N=block_n, BLOCK_W=block_w, num_warps=min(max(block_n * block_w // 1024, 1), 8),
    )  # fmt: skip
