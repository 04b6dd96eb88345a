"""CUDA kernels compiled for the CPU by g++, so that tests of them also run where there is no GPU."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from ddtree.kernels import cuda_module as real

_HEADER, _COPY_ENGINE = (Path(__file__).with_name(name) for name in ("cuda_on_cpu.h", "copy_engine_on_cpu.h"))


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


class CpuDriver:
    """Stands in for the CUDA driver where tensor maps are made: as `TensorMap` in copy_engine_on_cpu.h."""

    def cuTensorMapEncodeTiled(
        self,
        place: ctypes.c_void_p,
        kind: int,
        rank: int,
        start: ctypes.c_void_p,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        steps: Sequence[int],
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        bf16, inner_steps = 9, list(steps)
        assert (kind, rank, inner_steps, interleave, fill) == (bf16, 2, [1, 1], 0, 0)
        assert place.value is not None and place.value % 64 == 0
        layout = struct.pack("QQQQIIII", start.value, *sizes, strides[0], *box, swizzle, 0)
        ctypes.memset(place.value, 0, 128)
        ctypes.memmove(place.value, layout, len(layout))
        return 0


class CpuModule:
    """Stands in for `ddtree.kernels.cuda_module.CudaModule`.

    Attributes:
        seed: of what decides in which order threads go on and copies arrive.
        late_inputs: floating-point tensors that the kernel before writes: NaN to one that is started early, until a
            thread has waited for its inputs.
    """

    seed = int(os.environ.get("CUDA_ON_CPU_SEED", "0"))
    late_inputs: ClassVar[Sequence[torch.Tensor]] = ()

    def __init__(self, folder: Path, source_name: str, defines: dict[str, str | int]) -> None:
        source = real.source_of(source_name)
        source = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
            r"\1* \2 = (\1*)dynamic_shared.data();",
            source,
        )
        entries = []
        for attributes, name, parameters in re.findall(
            r'extern "C" __global__ void\s+((?:__\w+__\([^)]*\)\s+)*)(\w+)\((.*?)\)\s*{', source, re.S
        ):
            cluster = re.search(r"__cluster_dims__\((\w+), 1, 1\)", attributes)
            size = cluster[1] if cluster else 1
            names = ", ".join(part.split()[-1].lstrip("*") for part in parameters.split(","))
            entries.append(
                f'extern "C" const char* run_{name}(int gx, int gy, int gz, int threads, int shared_bytes, int seed,'
                f" {parameters}) {{ return run_grid({{gx, gy, gz}}, threads, shared_bytes, {size}, seed,"
                f" [&] {{ {name}({names}); }}); }}"
            )
        macros = "".join(f"#define {key} {value}\n" for key, value in defines.items())
        stem = "_".join([source_name.removesuffix(".cu"), *(f"{k}{v}" for k, v in sorted(defines.items()))])
        path, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
        needed = [_HEADER, _COPY_ENGINE] if "TensorMap" in source else [_HEADER]
        headers = "".join(f'#include "{header}"\n' for header in needed)
        path.write_text(f"{headers}{macros}{source}\n" + "\n".join(entries))
        # -Bsymbolic: a kernel may be called as a function of the C library is ("advance").
        # -U_FORTIFY_SOURCE: its longjmp takes a jump to another fiber's stack for an error.
        flags = [
            "-O1",
            "-std=c++17",
            "-w",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-Wl,-Bsymbolic",
            "-U_FORTIFY_SOURCE",
        ]
        command = ["g++", *flags, str(path), "-o", str(library)]
        subprocess.run(command, check=True, timeout=120)
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        *arguments: real.Argument,
        early: bool = False,
    ) -> None:
        assert all(not isinstance(a, torch.Tensor) or a.stride(-1) == 1 for a in arguments)
        if early:
            for late in self.late_inputs:
                assert late.is_floating_point() and late.is_contiguous()
                self._library.hold_back(ctypes.c_void_p(late.data_ptr()), ctypes.c_size_t(late.nbytes))
        values = [real._c_value(argument) for argument in arguments]
        run = getattr(self._library, f"run_{kernel}")
        run.restype = ctypes.c_char_p
        fault = run(*grid, threads, shared_bytes, self.seed, *values)
        if fault is not None:
            raise AssertionError(f"{kernel}: {fault.decode()}")
