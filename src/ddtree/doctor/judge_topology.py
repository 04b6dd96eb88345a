"""How GPUs reach each other, the parallelism that suits that, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from ddtree.doctor.condition import Condition, fault, good, hint, unknown
from ddtree.doctor.gpu_facts import Gpu, read_inactive_nvlinks, read_topology
from ddtree.doctor.needs import Needs
from ddtree.doctor.recording import Recording

_WITH_NVLINK = ("SXM", "NVL", "HGX", "B200", "B300", "GB200", "GB300", "H100 80GB HBM3", "H200", "H800", "A100-SXM")
_SWITCHED_LINKS = 4
"""So many links between all pairs of more than 4 GPUs can only come from an NVSwitch."""

_WORDS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe root",
    "NODE": "PCIe roots of one CPU",
    "SYS": "the link between two CPUs",
}


def judge_topology(recording: Recording, gpus: list[Gpu], needs: Needs) -> Iterator[Condition]:
    """Nothing where there are not two GPUs."""
    if len(gpus) < 2:
        return
    topology = read_topology(recording)
    if not topology.links:
        yield unknown("topology", "the ways between GPUs are known", "nvidia-smi topo -m tells none")
        return
    kinds = Counter(topology.links.values())
    told = ", ".join(f"{count} pairs by {_way(kind)}" for kind, count in kinds.most_common())
    yield good("topology", "the ways between GPUs are known", told)
    yield from _nvlink_health(recording, gpus, topology.is_all_nvlink)
    is_switched = topology.is_all_nvlink and (len(gpus) > 4 and topology.most_nvlinks >= _SWITCHED_LINKS)
    yield _suggestion(gpus, needs, topology.is_all_nvlink, is_switched, topology.islands(len(gpus)), kinds)
    yield from _declared(needs, topology.is_all_nvlink, is_switched)
    yield from _nccl(recording, needs, kinds, topology.is_all_nvlink)


def _way(kind: str) -> str:
    return f"NVLink ({kind[2:]} links)" if kind.startswith("NV") else _WORDS.get(kind, kind)


def _nvlink_health(recording: Recording, gpus: list[Gpu], is_all_nvlink: bool) -> Iterator[Condition]:
    expects = any(mark in gpu.name for gpu in gpus for mark in _WITH_NVLINK)
    down = read_inactive_nvlinks(recording)
    manager = recording["fabricmanager"].text.split()
    if expects and not is_all_nvlink:
        why = f"; nvidia-fabricmanager is {manager[0]}" if manager else ""
        yield fault(
            "topology",
            "NVLink joins the GPUs",
            f"{gpus[0].name} has NVLink, but pairs of GPUs reach each other by PCIe{why}",
            "start nvidia-fabricmanager in the driver's version, then look at nvidia-smi nvlink --status",
        )
    elif down:
        yield hint(
            "topology", "all NVLinks are up", f"{down} links are inactive", "look at nvidia-smi nvlink --errorcounters"
        )
    elif is_all_nvlink:
        yield good("topology", "all NVLinks are up")


def _suggestion(
    gpus: list[Gpu], needs: Needs, is_all_nvlink: bool, is_switched: bool, islands: list[list[int]], kinds: Counter[str]
) -> Condition:
    """The parallelism to begin with; others are to be measured against it."""
    n, what = len(gpus), "suggested parallelism"
    if is_all_nvlink:
        nvls = (
            " with NVLS (runtime.nvls = true): the NVLink switch adds, which halves the traffic" if is_switched else ""
        )
        return good(
            "topology", f"{what}: tensor parallelism, tp = {n}{nvls}",
            "NVLink carries the two all-reduces of every layer; each GPU reads 1/"
            f"{n} of the weights for every token, which is what decoding waits for",
        )  # fmt: skip
    speed = gpus[0].pcie_gb_s
    pcie = f"{speed:.0f} GB/s each way" if speed else "PCIe"
    worst = "SYS" if "SYS" in kinds else next(iter(kinds))
    if len(islands) < n and all(len(island) > 1 for island in islands):
        size = min(map(len, islands))
        return good(
            "topology", f"{what}: tp = {size} inside each NVLink island, and copies or pipeline stages between them",
            f"NVLink joins {', '.join(str(island) for island in islands)}; between them there is only {_way(worst)}",
        )  # fmt: skip
    why = f"every all-reduce crosses PCIe ({pcie}, the worst pair through {_way(worst)})"
    if needs.has_experts is False:
        return good(
            "topology", f"{what}: the smallest tp that holds the model, and copies (dp) for the other GPUs",
            f"{why}, two of them in every layer; a dense model has no experts to keep apart",
        )  # fmt: skip
    return good(
        "topology", f"{what}: expert parallelism, tp = {n} and ep = {n}",
        f"{why}; with whole experts on each GPU, layers of experts send tokens to their experts instead of adding up "
        "parts of every expert. For a dense model: the smallest tp that holds it",
    )  # fmt: skip


def _declared(needs: Needs, is_all_nvlink: bool, is_switched: bool) -> Iterator[Condition]:
    if needs.nvls and not is_switched:
        yield fault(
            "topology",
            "NVLS can be had",
            "it is declared, and there is no NVLink switch between these GPUs",
            "leave runtime.nvls out",
        )
    if not is_all_nvlink and (needs.tp or 1) > 1 and needs.ep == 1 and needs.has_experts:
        yield hint(
            "topology",
            "the declared parallelism suits the wires",
            f"tp = {needs.tp} without expert parallelism adds up every layer of experts across PCIe",
            f"try parallelism.ep = {needs.tp}, and measure both",
        )
    if is_switched and (needs.tp or 1) > 1 and not needs.nvls:
        yield hint(
            "topology",
            "the NVLink switch adds up",
            "NVLS is not declared",
            "try runtime.nvls = true (SGLang: --enable-nccl-nvls), and measure both",
        )


def _nccl(recording: Recording, needs: Needs, kinds: Counter[str], is_all_nvlink: bool) -> Iterator[Condition]:
    try:
        variables: dict[str, str] = json.loads(recording["environment"].text or "{}")
    except ValueError:
        variables = {}
    if variables.get("NCCL_P2P_DISABLE") == "1":
        yield hint(
            "topology", "NCCL goes the short way", "NCCL_P2P_DISABLE=1 sends all through host memory", "unset it"
        )
    if needs.nvls and variables.get("NCCL_NVLS_ENABLE") == "0":
        yield fault(
            "topology", "NVLS can be had", "NCCL_NVLS_ENABLE=0 contradicts the declared NVLS", "unset NCCL_NVLS_ENABLE"
        )
    if is_all_nvlink:
        return
    shm = recording["shm"].text.split()
    free = int(shm[-3]) if recording["shm"].is_good and len(shm) > 6 and shm[-3].isdigit() else None
    if free is not None and free < 1 << 30:
        yield hint(
            "topology",
            "NCCL has shared memory",
            f"/dev/shm has {free / 2**20:.0f} MiB free, and across PCIe NCCL goes through it",
            "make it 16 GiB or more (containers: --shm-size)",
        )
    if "SYS" in kinds and "NCCL_P2P_LEVEL" not in variables:
        yield hint(
            "topology",
            "NCCL's choice across CPUs is known",
            "some pairs reach each other through two CPUs; there NCCL takes host memory unless it is told otherwise",
            "try NCCL_P2P_LEVEL=SYS, and measure both",
        )
    boot = recording["cmdline"].text
    if recording["cmdline"].is_good and "iommu=pt" not in boot and "iommu=off" not in boot and "_iommu=on" in boot:
        yield hint(
            "topology",
            "PCIe peers reach each other past the IOMMU",
            "it translates every transfer",
            "boot with iommu=pt",
        )
