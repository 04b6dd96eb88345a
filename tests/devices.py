"""Where tests of fast kernels run: on a GPU, or on the CPU in Triton's interpreter and by g++."""

import os
from importlib.util import find_spec

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]  # the interpreter's bfloat16 products are wrong
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def _patch_interpreter() -> None:
    """NumPy 2.4 refuses what Triton 3.6's interpreter does to turn a tensor into a loop bound."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
        scope.set_attr(tensor, "__bool__", lambda self: bool(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched


if not GPU and find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _patch_interpreter()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the rounding of their type."""
    tolerance = 2e-5 if want.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def poison_memory() -> None:
    """Fill memory that the kernels' outputs will be taken from with what no kernel writes."""
    if GPU:
        blocks = [torch.full((n,), -1, dtype=torch.uint8, device=DEVICE) for n in (1 << 12, 1 << 16, 1 << 20, 1 << 24)]
        del blocks
