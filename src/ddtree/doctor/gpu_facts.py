"""GPUs and the wires between them, from the words of nvidia-smi and nvcc."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree.doctor.recording import Recording

Version = tuple[int, ...]

_PCIE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
"""Gigabytes a second of one PCIe lane, each way, by generation."""


@dataclass(frozen=True)
class Gpu:
    """Attributes:
    capability: compute capability, such as (10, 3).
    link_gen, link_width: of PCIe, the most that card and slot can; width_now is what they agreed on.
    """

    index: int
    name: str
    capability: Version
    driver: str
    memory_mib: int
    used_mib: int
    link_gen: int | None
    link_width: int | None
    width_now: int | None
    mig: bool

    @property
    def pcie_gb_s(self) -> float | None:
        """Of its slot, each way."""
        if self.link_gen is None or self.link_width is None:
            return None
        return _PCIE_GB_S.get(self.link_gen, 0.0) * self.link_width or None


@dataclass(frozen=True)
class Topology:
    """How GPUs reach each other.

    Attributes:
        links: for each pair of indices, `NV18` and the like for NVLink, else PCIe's way: PIX, PXB, PHB, NODE or SYS.
    """

    links: dict[tuple[int, int], str]

    def between(self, a: int, b: int) -> str:
        return self.links.get((min(a, b), max(a, b)), "?")

    @property
    def nvlink_pairs(self) -> int:
        return sum(link.startswith("NV") for link in self.links.values())

    @property
    def is_all_nvlink(self) -> bool:
        return bool(self.links) and self.nvlink_pairs == len(self.links)

    @property
    def most_nvlinks(self) -> int:
        """Links of the best pair."""
        return max((int(link[2:] or 0) for link in self.links.values() if link.startswith("NV")), default=0)

    def islands(self, n: int) -> list[list[int]]:
        """GPUs that NVLink joins, directly or through others."""
        left, found = set(range(n)), []
        while left:
            island = [left.pop()]
            for member in island:
                for other in sorted(left):
                    if self.between(member, other).startswith("NV"):
                        island.append(other)
                        left.discard(other)
            found.append(sorted(island))
        return found


def read_gpus(recording: Recording) -> list[Gpu]:
    """Empty where there is no NVIDIA driver, or no GPU."""
    output = recording["gpus"]
    if not output.is_good:
        return []
    gpus = []
    for line in output.text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 10 or not fields[0].isdigit():
            continue
        gpus.append(
            Gpu(
                int(fields[0]),
                fields[1],
                version(fields[2]),
                fields[3],
                _number(fields[4]) or 0,
                _number(fields[5]) or 0,
                _number(fields[6]),
                _number(fields[7]),
                _number(fields[8]),
                fields[9] == "Enabled",
            )
        )
    return gpus


def read_topology(recording: Recording) -> Topology:
    """From the matrix of ``nvidia-smi topo -m``; its colours are left out."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in recording["topology"].text.splitlines()]
    head = next((line.split() for line in lines if re.match(r"\s+GPU0\b", line)), [])
    columns = [int(word[3:]) for word in head if re.fullmatch(r"GPU\d+", word)]
    links: dict[tuple[int, int], str] = {}
    for line in lines:
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]) or line[:1].isspace():
            continue
        row = int(words[0][3:])
        for column, link in zip(columns, words[1:], strict=False):
            if row < column:
                links[row, column] = link
    return Topology(links)


def read_driver_cuda(recording: Recording) -> Version | None:
    """The newest CUDA that the driver can run."""
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", recording["smi"].text)
    return version(found[1]) if found else None


def read_nvcc(recording: Recording) -> Version | None:
    """The toolkit that kernels are compiled with at run time."""
    found = re.search(r"release (\d+\.\d+)", recording["nvcc"].text) if recording["nvcc"].is_good else None
    return version(found[1]) if found else None


def read_inactive_nvlinks(recording: Recording) -> int:
    """Links that are there and down."""
    return len(re.findall(r"Link \d+:\s*<?inactive>?", recording["nvlink"].text))


def version(text: str) -> Version:
    """Leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def dotted(number: Version) -> str:
    return ".".join(map(str, number))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
