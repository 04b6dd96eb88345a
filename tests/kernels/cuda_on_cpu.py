"""CUDA kernels compiled for the CPU by g++, so that tests of them also run where there is no GPU."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import torch

from ddtree.kernels import cuda_module as real

_HEADER = Path(__file__).with_name("cuda_on_cpu.h")


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


class CpuModule:
    """Stands in for `ddtree.kernels.cuda_module.CudaModule`."""

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
                f'extern "C" void run_{name}(int gx, int gy, int gz, int threads, int shared_bytes, {parameters}) {{'
                f" run_grid({{gx, gy, gz}}, threads, shared_bytes, {size}, [&] {{ {name}({names}); }}); }}"
            )
        macros = "".join(f"#define {key} {value}\n" for key, value in defines.items())
        stem = "_".join([source_name.removesuffix(".cu"), *(f"{k}{v}" for k, v in sorted(defines.items()))])
        path, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
        path.write_text(f'#include "{_HEADER}"\n{macros}{source}\n' + "\n".join(entries))
        # -Bsymbolic: a kernel may be called as a function of the C library is ("advance").
        flags = ["-O1", "-std=c++17", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-Wl,-Bsymbolic"]
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
        values = [real._c_value(argument) for argument in arguments]
        getattr(self._library, f"run_{kernel}")(*grid, threads, shared_bytes, *values)
