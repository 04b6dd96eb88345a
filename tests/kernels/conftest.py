"""CUDA C++ kernels for tests: on the GPU as they are, without one compiled for the CPU by g++."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

KERNELS = (
    "tree_attention_cuda",
    "tree_build_cuda",
    "tree_walk_cuda",
    "top_log_probs_cuda",
    "choose_cuda",
    "placement_cuda",
    "advance_cuda",
    "forecast_cuda",
    "seats_cuda",
    "embedding_cuda",
)


@pytest.fixture(scope="session")
def emulator() -> ModuleType:
    """`cuda_on_cpu`."""
    spec = importlib.util.spec_from_file_location("cuda_on_cpu", Path(__file__).with_name("cuda_on_cpu.py"))
    assert spec is not None and spec.loader is not None
    emulator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulator)
    if emulator.compiler() is None:
        pytest.skip("no GPU, and no g++ to compile CUDA kernels for the CPU")
    return emulator


@pytest.fixture(scope="session")
def cpu_modules(emulator: ModuleType, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    return functools.cache(lambda source, device, **defines: emulator.CpuModule(folder, source, defines))


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """CUDA C++ kernels run on the GPU, or compiled for the CPU."""
    if not torch.cuda.is_available():
        modules = request.getfixturevalue("cpu_modules")
        for name in KERNELS:
            monkeypatch.setattr(f"ddtree.kernels.{name}.cuda_module", modules)
    yield


@pytest.fixture
def wide_products(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Products of large weights in CUDA C++ run on the GPU, or compiled for the CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("ddtree.kernels.wide_products_cuda.cuda_module", request.getfixturevalue("cpu_modules"))
        driver = request.getfixturevalue("emulator").CpuDriver
        monkeypatch.setattr("ddtree.kernels.cuda_module._driver", driver)


@pytest.fixture
def written_before(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Says which floating-point tensors the kernel before the next ones writes: `CpuModule.late_inputs`.

    Nothing is done on a GPU.
    """
    if torch.cuda.is_available():
        return lambda *tensors: None
    module = request.getfixturevalue("emulator").CpuModule
    return lambda *tensors: monkeypatch.setattr(module, "late_inputs", tensors)
