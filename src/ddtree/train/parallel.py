"""The processes of one host that train together, as torchrun starts them; one alone where it did not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddtree.errors import UserError


@dataclass(frozen=True)
class Group:
    """This process among its like.

    Attributes:
        rank: 0 for the one that writes files.
        size: number of processes.
    """

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up the gradients of all processes, in one message."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def agree(self, values: list[float], device: torch.device) -> list[float]:
        """What the first process says; waits for it."""
        if self.size == 1:
            return values
        told = torch.tensor(values, dtype=torch.float64, device=device)
        dist.broadcast(told, 0)
        return [float(value) for value in told.tolist()]

    def leave(self) -> None:
        """Say goodbye to the others."""
        if self.size > 1:
            dist.destroy_process_group()


def join_group(device: str) -> tuple[Group, str]:
    """The group that torchrun's environment names, and the device of this process.

    Args:
        device: `auto`, `cpu` or `cuda`; on GPUs each process takes its own.

    Raises:
        UserError: processes of several hosts, or fewer GPUs than processes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group(0, 1), device
    if os.environ.get("LOCAL_WORLD_SIZE", str(size)) != str(size):
        raise UserError("processes of several hosts cannot train together", "use torchrun on one host")
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if torch.cuda.device_count() < size:
            raise UserError(
                f"{size} processes for {torch.cuda.device_count()} GPUs", "start one process a GPU (--nproc-per-node)"
            )
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    elif device != "cpu":
        raise UserError(f"device {device!r} for {size} processes", "give cuda or cpu: each process takes its own GPU")
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Group(rank, size), device
