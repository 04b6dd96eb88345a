"""CUDA C++ kernels, compiled on first use by NVRTC (which torch brings along) and kept in the user's cache folder.

A source file holds only ``extern "C"`` kernels and includes nothing but files beside it, so neither a compiler nor the
CUDA toolkit has to be installed. Launches go to torch's current stream and can be captured in a CUDA graph; the module
itself is loaded at the first launch, which therefore must not happen inside a capture.
"""

import ctypes
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from ddtree.disk import write_whole
from ddtree.errors import UserError
from ddtree.user_cache import cache_folder

Argument = torch.Tensor | ctypes.Structure | int | float | None
_SOURCES = Path(__file__).parent / "cuda"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_WIDTH = 11  # CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
_WIDE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute`: which one, and a union of 64 bytes from byte 8 on, here an int."""

    _fields_ = (
        ("id", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_int32), ("rest", ctypes.c_char * 60),
    )  # fmt: skip


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint32),
    )  # fmt: skip


class CudaError(UserError):
    """A kernel could not be compiled, loaded or launched."""


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(
            f"the CUDA driver could not be loaded ({error})", "run on a machine with an NVIDIA GPU"
        ) from error


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of the CUDA version that torch was built with: torch's own copy first, then the system's."""
    major = (torch.version.cuda or "").split(".")[0]
    spec = find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    found = [str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/libnvrtc.so.{major}"))]
    for name in (*found, f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("NVRTC was not found", f"install nvidia-cuda-nvrtc of CUDA {major or '13'} beside torch")


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    message = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(message))
    raise CudaError(f"{what} failed: {(message.value or b'unknown error').decode()} ({code})", "report this")


def _compile(source: str, name: str, options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    if code == 0:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = nvrtc.nvrtcCompileProgram(program, len(options), flags)
    if code != 0:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(size.value, 1))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"{name} does not compile:\n{log.value.decode()}", "report this with the CUDA version")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _compiled(source: str, name: str, options: tuple[str, ...]) -> bytes:
    """The machine code, from the cache where it is there; a cache that cannot be used is no error."""
    key = hashlib.sha256("\0".join((source, str(torch.version.cuda), *options)).encode()).hexdigest()[:32]
    try:
        path = cache_folder() / "cuda" / f"{name}-{key}.cubin"
        if path.is_file():
            return path.read_bytes()
    except (OSError, UserError):
        return _compile(source, name, options)
    image = _compile(source, name, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, image)
    except OSError:
        pass
    return image


def source_of(name: str) -> str:
    """A source file's text, the files beside it that it includes in place of the lines that say so."""
    text = (_SOURCES / name).read_text()
    return re.sub(r'^#include "([\w.]+)"$', lambda line: source_of(line[1]).rstrip("\n"), text, flags=re.MULTILINE)


Defines = tuple[tuple[str, str], ...]
"""Macros and their values, in order."""


def in_order(defines: Mapping[str, str | int]) -> Defines:
    """Macros as a kernel is kept by."""
    return tuple(sorted((name, str(value)) for name, value in defines.items()))


def machine_code(source_name: str, defines: Defines, capability: tuple[int, int]) -> bytes:
    """A source file compiled for a kind of device, which need not be there; kept in the cache."""
    arch = f"sm_{capability[0]}{capability[1]}" + ("a" if capability[0] == 9 else "")
    flags = (f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines))
    return _compiled(source_of(source_name), source_name, flags)


class CudaModule:
    """The kernels of one source file for the current device, with ``defines`` fixed at compile time."""

    def __init__(self, source_name: str, defines: Defines, capability: tuple[int, int]) -> None:
        image = machine_code(source_name, defines, capability)
        torch.cuda.current_stream()  # makes torch's context current
        self._module = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), image), f"loading {source_name}")
        self._functions: dict[str, tuple[ctypes.c_void_p, int]] = {}
        self._may_start_early = capability >= (9, 0)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        *arguments: Argument,
        early: bool = False,
    ) -> None:
        """Launch on torch's current stream. Tensors and None pass as pointers, int as int32, float as float32.

        Structures pass as they are.

        Args:
            early: the kernel may start while the one before it still runs (programmatic dependent launch); it must
                execute ``griddepcontrol.wait`` before it reads what earlier kernels wrote and before it writes.
        """
        function, allowed = self._functions.get(kernel, (None, 48 * 1024))
        if function is None:
            function = ctypes.c_void_p()
            _check(
                _driver().cuModuleGetFunction(ctypes.byref(function), self._module, kernel.encode()),
                f"finding {kernel}",
            )
            width = ctypes.c_int32(0)
            _driver().cuFuncGetAttribute(ctypes.byref(width), _CLUSTER_WIDTH, function)
            if width.value > 8:  # more than every device of its kind is sure to have
                _check(_driver().cuFuncSetAttribute(function, _WIDE_CLUSTERS, 1), f"preparing {kernel}")
        if shared_bytes > allowed:
            _check(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes), f"preparing {kernel}")
            allowed = shared_bytes
        self._functions[kernel] = function, allowed
        values = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if early and self._may_start_early:
            attribute = _LaunchAttribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)
            config = _LaunchConfig(grid, (threads, 1, 1), shared_bytes, stream, ctypes.pointer(attribute), 1)
            code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
        else:
            code = _driver().cuLaunchKernel(function, *grid, threads, 1, 1, shared_bytes, stream, pointers, None)
        _check(code, f"launching {kernel}")


def _c_value(argument: Argument) -> ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float | ctypes.Structure:
    if isinstance(argument, ctypes.Structure):
        return argument
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    return ctypes.c_float(argument)


@cache
def _module(source_name: str, defines: Defines, device: int) -> CudaModule:
    return CudaModule(source_name, defines, torch.cuda.get_device_capability(device))


def cuda_module(source_name: str, device: torch.device, **defines: str | int) -> CudaModule:
    """The module of ``source_name`` (in ``kernels/cuda``) on ``device``, compiled and loaded once."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _module(source_name, in_order(defines), index)
