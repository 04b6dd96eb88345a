"""Tensor maps: what Hopper's copy engine has to know of a matrix, to bring boxes of it into shared memory."""

import ctypes
from functools import lru_cache

import torch

from ddtree.kernels import cuda_module

BOX_NUMBERS = 64
"""Numbers of a row in a box: 128 bytes, the width of the swizzle."""
_BYTES, _ALIGNMENT = 128, 64
_BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_FETCH = {128: 2, 256: 3}  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B, _256B


class TensorMap(ctypes.Structure):
    """`CUtensorMap`."""

    _fields_ = (("words", ctypes.c_uint64 * (_BYTES // 8)),)


@lru_cache(maxsize=4096)
def _encoded(pointer: int, rows: int, size: int, box_rows: int, fetch_bytes: int) -> TensorMap:
    storage = bytearray(_BYTES + _ALIGNMENT)
    start = ctypes.addressof(ctypes.c_char.from_buffer(storage))
    encoded = TensorMap.from_buffer(storage, -start % _ALIGNMENT)
    code = cuda_module._driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(encoded)),
        _BFLOAT16,
        2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(size, rows),
        (ctypes.c_uint64 * 1)(2 * size),
        (ctypes.c_uint32 * 2)(BOX_NUMBERS, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128B,
        _FETCH[fetch_bytes],
        0,
    )
    cuda_module._check(code, f"mapping a tensor of {rows} x {size}")
    return encoded


def tensor_map(matrix: torch.Tensor, box_rows: int, fetch_bytes: int) -> TensorMap:
    """The map of a contiguous bf16 ``[rows, size]`` whose boxes have ``box_rows`` rows (at most 256) of 64 numbers.

    Rows and numbers that are not there are copied as zeros; ``size`` is a multiple of 8.

    Args:
        fetch_bytes: what the L2 cache reads from memory at a time, 128 or 256.

    Raises:
        CudaError: the driver refuses it.
    """
    assert matrix.dtype == torch.bfloat16 and matrix.is_contiguous() and matrix.shape[1] % 8 == 0
    return _encoded(matrix.data_ptr(), *matrix.shape, box_rows, fetch_bytes)
