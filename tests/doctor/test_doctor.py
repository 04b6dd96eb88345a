"""Machines of every kind, judged from their words; and this machine, whatever it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machines import engine, gpus, host, nvcc, nvlink_box, nvlink_topology, pcie_box, smi

from ddtree.cli.main import run
from ddtree.doctor import Condition, Grade, Needs, Recording, examine, read_recording, take_recording
from ddtree.doctor.gpu_facts import read_gpus, read_topology
from ddtree.doctor.judge_build import runs_on
from ddtree.doctor.recording import Output, write_recording
from ddtree.errors import UserError

KIMI = Needs(590 * 10**9, on_gpu=True, has_experts=True, tp=8, ep=8, port=30000, needs_systemd=True)


def find(recording: Recording, needs: Needs, grade: Grade) -> list[Condition]:
    found = [each for each in examine(recording, needs).conditions if each.grade is grade]
    assert all(each.remedy for each in found if grade in (Grade.hint, Grade.fault))
    return found


def words(conditions: list[Condition]) -> str:
    return " | ".join(f"{each.what}: {each.evidence} -> {each.remedy}" for each in conditions)


def test_pcie_cards_are_read():
    cards = read_gpus(pcie_box())
    assert len(cards) == 8 and cards[0].capability == (12, 0) and cards[7].memory_mib == 97887
    assert cards[0].pcie_gb_s == pytest.approx(63, abs=1)
    topology = read_topology(pcie_box())
    assert len(topology.links) == 28 and topology.between(0, 1) == "PHB" and topology.between(6, 1) == "SYS"
    assert not topology.is_all_nvlink and len(topology.islands(8)) == 8


def test_pcie_suggests_expert_parallelism_and_says_why():
    good = words(find(pcie_box(), KIMI, Grade.good))
    assert "suggested parallelism: expert parallelism, tp = 8 and ep = 8" in good
    assert "every all-reduce crosses PCIe (63 GB/s each way" in good and "the link between two CPUs" in good
    assert not find(pcie_box(), KIMI, Grade.fault)
    assert "NCCL_P2P_LEVEL=SYS" in words(find(pcie_box(), KIMI, Grade.hint))


def test_nvlink_suggests_tensor_parallelism_with_nvls_and_says_why():
    needs = Needs(590 * 10**9, on_gpu=True, has_experts=True, tp=8, ep=1, nvls=True)
    good = words(find(nvlink_box(), needs, Grade.good))
    assert "tensor parallelism, tp = 8 with NVLS" in good and "NVLink carries the two all-reduces" in good
    assert not find(nvlink_box(), needs, Grade.fault) and not find(nvlink_box(), needs, Grade.hint)
    without = Needs(tp=8, ep=1)
    assert "--enable-nccl-nvls" in words(find(nvlink_box(), without, Grade.hint))


def test_four_gpus_without_a_switch_get_no_nvls():
    box = nvlink_box(
        topology=Output(0, nvlink_topology(4, 4)), gpus=Output(0, gpus(4, "NVIDIA A100-SXM4-80GB", "8.0", 81920, 4))
    )
    good = words(find(box, Needs(), Grade.good))
    assert "tensor parallelism, tp = 4" in good and "NVLS" not in good


def test_nvlink_bridges_make_islands():
    rows = ["\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity"]
    rows += ["GPU0\t X \tNV12\tSYS\tSYS\t0", "GPU1\tNV12\t X \tSYS\tSYS\t0"]
    rows += ["GPU2\tSYS\tSYS\t X \tNV12\t0", "GPU3\tSYS\tSYS\tNV12\t X \t0"]
    box = pcie_box(topology=Output(0, "\n".join(rows)), gpus=Output(0, gpus(4, "NVIDIA H100 PCIe", "9.0", 81559, 5)))
    good = words(find(box, Needs(), Grade.good))
    assert "tp = 2 inside each NVLink island" in good and "[0, 1], [2, 3]" in good


def test_a_dense_model_across_pcie():
    good = words(find(pcie_box(), Needs(has_experts=False), Grade.good))
    assert "the smallest tp that holds the model, and copies (dp)" in good


@pytest.mark.parametrize(
    ("box", "needs", "told"),
    [
        (pcie_box, Needs(nvls=True), "there is no NVLink switch"),
        (pcie_box, Needs(2 * 10**12, tp=8), "spread the model over more GPUs"),
        (pcie_box, Needs(tp=16, weights_bytes=10), "there are 8 GPUs"),
        (pcie_box, Needs(3500 * 10**9), "the weights have 3500 GB -> free some"),
    ],
)
def test_what_does_not_fit_the_machine(box, needs, told):
    assert told in words(find(box(), needs, Grade.fault))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engine": engine(archs="sm_80 sm_90 sm_100 compute_100a")}, "no kernel image for sm_120"),
        ({"engine": engine(version="2.11.0+cpu", cuda=None)}, "is a CPU build"),
        ({"engine": engine(unmet=[["sglang", "torch==2.9.1", "2.11.0"]])}, "sglang wants torch==2.9.1"),
        ({"engine": engine(torch_error="ImportError: libcudart.so.13", torch=None)}, "libcudart.so.13"),
        ({"nvcc": nvcc("12.6")}, "nvcc 12.6 does not know sm_120"),
        ({"nvcc": nvcc("12.9")}, "nvcc is 12.9, torch is built with CUDA 13.0"),
        ({"smi": smi("12.8")}, "it ends at CUDA 12.8 -> install a driver for CUDA 13"),
    ],
)  # fmt: skip
def test_builds_that_do_not_fit(changes, told):
    box = pcie_box(**{name: Output(0, text) for name, text in changes.items()})
    assert told in words(find(box, Needs(), Grade.fault))


def test_sm_103_needs_its_own_toolkit():
    box = nvlink_box(engine=Output(0, engine(archs="sm_90 sm_120", cuda="12.8")), nvcc=Output(0, nvcc("12.8")))
    told = words(find(box, Needs(), Grade.fault))
    assert "no kernel image for sm_103" in told and "built with CUDA 12.9 or newer" in told
    assert "nvcc 12.8 does not know sm_103" in told


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_100", (10, 3), True),
        ("sm_103", (10, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_90a", (9, 0), True),
        ("sm_90", (10, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_90a", (12, 0), False),
        ("compute_120", (10, 3), False),
        ("sm_80", (8, 9), True),
        ("nonsense", (8, 0), False),
    ],
)
def test_which_binaries_run_where(arch, capability, runs):
    assert runs_on(arch, capability) is runs


@pytest.mark.parametrize(
    ("changes", "needs", "grade", "told"),
    [
        ({"nvcc": Output(None, "")}, Needs(), Grade.hint, "there is no nvcc on the path"),
        ({"smi": Output(0, smi("12.8")), "engine": Output(0, engine(cuda="12.9"))}, Needs(), Grade.hint, "from PTX"),
        ({"gpus": Output(0, gpus(8, "X", "12.0", 97887, 5, used=60000))}, Needs(), Grade.hint, "in use: GPU 0: 59 GiB"),
        ({"gpus": Output(0, gpus(8, "X", "12.0", 97887, 5, width=8))}, Needs(), Grade.hint, "x8 of x16"),
        ({"gpus": Output(9, "NVIDIA-SMI has failed")}, Needs(on_gpu=True), Grade.fault, "NVIDIA-SMI has failed"),
        ({"engine": Output(127, "no such file")}, Needs(), Grade.fault, "name it with --python"),
        ({"topology": Output(255, "")}, Needs(), Grade.unknown, "topo -m tells none"),
        ({"environment": Output(0, '{"NCCL_P2P_DISABLE": "1"}')}, Needs(), Grade.hint, "NCCL_P2P_DISABLE=1"),
        ({"shm": Output(0, "h\ntmpfs 67108864 0 67108864 0% /dev/shm")}, Needs(), Grade.hint, "/dev/shm has 64 MiB"),
        ({"cmdline": Output(0, "root=/dev/sda intel_iommu=on")}, Needs(), Grade.hint, "boot with iommu=pt"),
        (host(ram_gib=8), Needs(on_gpu=True), Grade.fault, "16 GB are the least"),
        (host(ram_gib=300), Needs(590 * 10**9), Grade.hint, "the page cache cannot hold the weights"),
        (host(disk_gb=100), Needs(590 * 10**9), Grade.fault, "the weights have 590 GB"),
        (host(listening=30000), Needs(port=30000), Grade.hint, "somebody listens on it"),
        ({"sudo": Output(1, "sudo: a password is required")}, Needs(needs_systemd=True), Grade.fault, "sudo asks"),
        ({"systemd": Output(1, "offline")}, Needs(needs_systemd=True), Grade.fault, "it is offline"),
        ({"clock": Output(0, "NTPSynchronized=no")}, Needs(), Grade.hint, "not synchronised"),
        ({"limits": Output(0, "Max open files            1024      524288     files")}, Needs(), Grade.hint, "1024"),
    ],
)  # fmt: skip
def test_what_else_is_found(changes, needs, grade, told):
    assert told in words(find(pcie_box(**changes), needs, grade))


def test_missing_nvlink_is_a_fault():
    box = nvlink_box(
        topology=Output(0, pcie_box()["topology"].text), fabricmanager=Output(3, "inactive\n"), nvlink=Output(0, "")
    )
    told = words(find(box, Needs(), Grade.fault))
    assert "pairs of GPUs reach each other by PCIe; nvidia-fabricmanager is inactive" in told


def test_nvls_switched_off_by_the_environment():
    box = nvlink_box(environment=Output(0, '{"NCCL_NVLS_ENABLE": "0"}'))
    assert "NCCL_NVLS_ENABLE=0 contradicts" in words(find(box, Needs(nvls=True), Grade.fault))


def test_experts_without_expert_parallelism_across_pcie():
    needs = Needs(has_experts=True, tp=8, ep=1)
    assert "parallelism.ep = 8" in words(find(pcie_box(), needs, Grade.hint))


def test_a_machine_without_a_gpu_is_no_fault_unless_one_is_needed():
    bare = Recording({"engine": Output(0, engine(version="2.13.0+cpu", cuda=None)), **host()})
    assert not find(bare, Needs(), Grade.fault)
    assert "there is no nvidia-smi" in words(find(bare, Needs(on_gpu=True), Grade.fault))
    nothing = examine(Recording({}), Needs())
    assert nothing.has_faults  # not even an interpreter
    assert {each.grade for each in nothing.conditions} == {Grade.hint, Grade.fault, Grade.unknown}


def test_recordings_are_kept_and_replayed(tmp_path):
    file = tmp_path / "box.json"
    write_recording(file, pcie_box())
    again = read_recording(file)
    assert examine(again, KIMI) == examine(pcie_box(), KIMI)
    for wrong in (
        "",
        "[]",
        '{"format": 2, "outputs": {}}',
        '{"format": 1, "outputs": {"a": {"code": "0", "text": 1}}}',
    ):
        file.write_text(wrong)
        with pytest.raises(UserError, match="is no recording"):
            read_recording(file)


def test_this_machine_can_be_asked():
    here = take_recording()
    assert here["meminfo"].is_good and json.loads(here["environment"].text) is not None
    engine_line = next(each for each in examine(here, Needs()).conditions if each.what.startswith("Python 3."))
    assert "torch" in engine_line.evidence and sys.executable in engine_line.what


def test_the_command(tmp_path, capsys):
    file = tmp_path / "box.json"
    write_recording(file, pcie_box())
    assert run(["doctor", "--replay", str(file)]) == 0
    assert "expert parallelism" in capsys.readouterr().out
    assert run(["doctor", "--replay", str(file), "--model-gb", "5000", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False and {"area", "grade", "what", "evidence", "remedy"} == told["conditions"][0].keys()
    assert run(["doctor", "--replay", str(file), "--record", "x"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
