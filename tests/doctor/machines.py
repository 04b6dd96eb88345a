"""Machines as their commands describe them, in the formats of nvidia-smi 580, nvcc and util-linux.

Written after those formats, for the two machines that the product began on: eight PCIe cards over two CPUs, and eight
GPUs around an NVLink switch.
"""

from __future__ import annotations

import json
from typing import Any

from ddtree.doctor import Recording
from ddtree.doctor.recording import Output

_PCIE_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tNODE\tNODE\tSYS\tSYS\tSYS\tSYS\tNODE\t0-47,96-143\t0\t\tN/A
GPU1\tPHB\t X \tNODE\tNODE\tSYS\tSYS\tSYS\tSYS\tNODE\t0-47,96-143\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tPHB\tSYS\tSYS\tSYS\tSYS\tPHB\t0-47,96-143\t0\t\tN/A
GPU3\tNODE\tNODE\tPHB\t X \tSYS\tSYS\tSYS\tSYS\tPHB\t0-47,96-143\t0\t\tN/A
GPU4\tSYS\tSYS\tSYS\tSYS\t X \tPHB\tNODE\tNODE\tSYS\t48-95,144-191\t1\t\tN/A
GPU5\tSYS\tSYS\tSYS\tSYS\tPHB\t X \tNODE\tNODE\tSYS\t48-95,144-191\t1\t\tN/A
GPU6\tSYS\tSYS\tSYS\tSYS\tNODE\tNODE\t X \tPHB\tSYS\t48-95,144-191\t1\t\tN/A
GPU7\tSYS\tSYS\tSYS\tSYS\tNODE\tNODE\tPHB\t X \tSYS\t48-95,144-191\t1\t\tN/A
NIC0\tNODE\tNODE\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def _nvlink_topology(n: int, links: int) -> str:
    head = "\t" + "\t".join(f"GPU{i}" for i in range(n)) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    rows = [
        f"GPU{i}\t" + "\t".join(" X " if i == j else f"NV{links}" for j in range(n)) + f"\t0-63\t{2 * i // n}\t\tN/A"
        for i in range(n)
    ]
    return "\n".join([head, *rows, "", "Legend:", "", "  X    = Self", ""])


def _gpus(n: int, name: str, capability: str, mib: int, gen: int, used: int = 4, width: int = 16) -> str:
    row = "{i}, {name}, {capability}, 580.95.05, {mib}, {used}, {gen}, 16, {width}, Disabled"
    rows = [
        row.format(i=i, name=name, capability=capability, mib=mib, used=used, gen=gen, width=width) for i in range(n)
    ]
    return "\n".join(rows) + "\n"


def _smi(cuda: str) -> str:
    return (
        "+-----------------------------------------------------------------------------------------+\n"
        f"| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: {cuda}     |\n"
        "+-----------------------------------------+------------------------+----------------------+\n"
    )


def _nvcc(release: str) -> str:
    return (
        "nvcc: NVIDIA (R) Cuda compiler driver\nCopyright (c) 2005-2026 NVIDIA Corporation\n"
        f"Cuda compilation tools, release {release}, V{release}.88\n"
    )


def _engine(version: str = "2.11.0+cu130", cuda: str | None = "13.0", archs: str = "", **more: Any) -> str:
    told = {
        "python": "3.12.3",
        "executable": "/opt/sglang/bin/python",
        "packages": {"torch": version, "triton": "3.6.0", "sglang": "0.5.16", "sglang-kernel": "0.4.5"},
        "unmet": [],
        "torch": {
            "cuda": cuda,
            "archs": (archs or "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120").split(),
            "nccl": "2.28.9",
            "sees_gpus": 8,
        },
    }
    return "a warning of some package\n" + json.dumps(told | more) + "\n"


def _host(ram_gib: int = 1500, disk_gb: int = 3000, listening: int | None = None) -> dict[str, Output]:
    tcp = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   {n}: {at} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n"
    tcp += row.format(n=0, at="0100007F:0016")
    if listening:
        tcp += row.format(n=1, at=f"00000000:{listening:04X}")
    head = "Filesystem         1-blocks          Used      Available Capacity Mounted on\n"
    return {
        "meminfo": Output(
            0, f"MemTotal:       {ram_gib << 20} kB\nMemFree: 1 kB\nMemAvailable:   {ram_gib * 9 // 10 << 20} kB\n"
        ),
        "disk": Output(0, f"{head}/dev/nvme0n1p2 7000000000000 1000000000000 {disk_gb}000000000      15% /data\n"),
        "shm": Output(0, f"{head}tmpfs 800000000000 0 800000000000 0% /dev/shm\n"),
        "tcp": Output(0, tcp),
        "tcp6": Output(0, ""),
        "systemd": Output(0, "running\n"),
        "user": Output(0, "1000\n"),
        "sudo": Output(0, ""),
        "clock": Output(0, "Timezone=Etc/UTC\nNTP=yes\nNTPSynchronized=yes\n"),
        "limits": Output(0, "Max open files            1048576              1048576              files     \n"),
        "cmdline": Output(0, "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 iommu=pt\n"),
        "environment": Output(0, "{}"),
    }


def pcie_box(**changes: Output) -> Recording:
    """8x RTX PRO 6000 over two CPUs."""
    return Recording(
        {
            "gpus": Output(0, _gpus(8, "NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", 97887, 5)),
            "smi": Output(0, _smi("13.0")),
            "topology": Output(0, _PCIE_TOPOLOGY),
            "nvlink": Output(0, ""),
            "nvcc": Output(0, _nvcc("13.0")),
            "fabricmanager": Output(3, "inactive\n"),
            "engine": Output(0, _engine()),
            **_host(),
            **changes,
        }
    )


def nvlink_box(**changes: Output) -> Recording:
    """8x B300 around an NVLink switch."""
    return Recording(
        {
            "gpus": Output(0, _gpus(8, "NVIDIA B300 SXM6 AC", "10.3", 275040, 6)),
            "smi": Output(0, _smi("13.0")),
            "topology": Output(0, _nvlink_topology(8, 18)),
            "nvlink": Output(
                0, "GPU 0: NVIDIA B300 SXM6 AC (UUID: GPU-0)\n\t Link 0: 53.125 GB/s\n\t Link 1: 53.125 GB/s\n"
            ),
            "nvcc": Output(0, _nvcc("13.0")),
            "fabricmanager": Output(0, "active\n"),
            "engine": Output(0, _engine()),
            **_host(ram_gib=3000),
            **changes,
        }
    )


engine, gpus, host, nvcc, smi, nvlink_topology = _engine, _gpus, _host, _nvcc, _smi, _nvlink_topology
