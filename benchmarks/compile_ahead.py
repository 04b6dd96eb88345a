"""CUDA kernels compiled for Hopper on all cores into the cache of `cuda_module`, before a benchmark uses the GPU."""

import multiprocessing
import time
from collections.abc import Iterable, Mapping

from ddtree.kernels import cuda_module

HOPPER = (9, 0)


def compile_ahead(source: str, all_defines: Iterable[Mapping[str, int]]) -> None:
    """Every variant of a source file, told apart by its macros; to be called before this process touches the GPU."""
    start = time.monotonic()
    tasks = sorted({(source, cuda_module.in_order(defines), HOPPER) for defines in all_defines})
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.starmap(cuda_module.machine_code, tasks, chunksize=1)
    print(f"{len(tasks)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
