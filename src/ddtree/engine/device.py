"""Where the engine runs, in which number format, and how much memory is there."""

import os

import torch

from ddtree.errors import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """`auto` takes the GPU if there is one.

    Raises:
        UserError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is not known", "choose auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported", "choose auto, cpu or cuda")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"device {name!r} is not there", "choose auto or cpu, or install a CUDA build of torch")
    return device


def choose_dtype(name: str, device: torch.device, checkpoint: str) -> torch.dtype:
    """`auto` takes the checkpoint's type on a GPU; on a CPU bfloat16 where the processor multiplies it, else float32.

    Raises:
        UserError: no such type.
    """
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if checkpoint != "float32" else torch.float32
        return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported", f"choose auto, {' or '.join(DTYPES)}")
    return DTYPES[name]


def cpu_multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16 products, so that they are faster than float32's."""
    flags = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free right now; on systems that do not say, all there is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
