"""Results on their way to the host: who may use which piece of its memory."""

import pytest

torch = pytest.importorskip("torch")

from ddtree.engine.flight import _LEFT_OVER, Flight, HostMemory  # noqa: E402
from ddtree.kernels.advance import hand_over  # noqa: E402
from ddtree.kernels.fast_set import FAST  # noqa: E402
from devices import DEVICE, GPU  # noqa: E402

PACKED = [[2, 7, 8, 9, 100, 101], [0, 5, 0, 0, 102, 103]]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """Of a GPU, or of plain memory where there is none, since only a GPU's driver pins."""
    if GPU:
        return HostMemory(FAST.hand_over)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **rest: empty(*size, **rest))
    return HostMemory(hand_over)


def packed(more: int = 0) -> "torch.Tensor":
    return torch.tensor(PACKED, device=DEVICE) + more


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def test_a_piece_is_used_again_only_when_it_was_given_back(memory: HostMemory) -> None:
    first, second = memory.fetch(packed()), memory.fetch(packed(1))
    wait()
    assert first.data_ptr() != second.data_ptr()
    assert first.tolist() == packed().tolist() and second.tolist() == packed(1).tolist()
    memory.give_back(first)
    third, fourth = memory.fetch(packed(2)), memory.fetch(packed(3))
    assert third.data_ptr() == first.data_ptr()
    assert fourth.data_ptr() not in (first.data_ptr(), second.data_ptr())
    small = memory.fetch(packed()[:1])
    wait()
    assert small.tolist() == PACKED[:1] and second.tolist() == packed(1).tolist()


def test_a_piece_that_nobody_gave_back_stays_out_of_use(memory: HostMemory) -> None:
    lost = memory.fetch(packed()).data_ptr()
    assert all(memory.fetch(packed()).data_ptr() != lost for _ in range(20))
    landed = memory.fetch(packed())
    memory.give_back(landed)
    before = len(_LEFT_OVER)
    memory.__del__()  # with its engine
    assert [each.data_ptr() for each in _LEFT_OVER[before:]].count(lost) == 1
    assert len(_LEFT_OVER) == before + 21 and landed.data_ptr() not in {each.data_ptr() for each in _LEFT_OVER[before:]}


def test_what_landed_stays_when_its_memory_is_used_again(memory: HostMemory) -> None:
    begun = None
    if GPU:
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()
    flight = Flight(packed(), 3, 0.0, memory, begun)
    landed = flight.land()
    assert not GPU or flight.device_ms() > 0
    Flight(packed(50), 3, 0.0, memory).land()
    assert sum(map(len, memory._free.values())) == 1 and not memory._in_use  # the second one used it again
    with pytest.raises(AssertionError, match="landed"):
        flight.land()
    assert [one.tokens for one in landed] == [[7, 8, 9], [5]]
    assert [one.accepted for one in landed] == [2, 0]
    assert [one.extra.tolist() for one in landed] == [[100, 101], [102, 103]]


def test_without_a_gpu_results_are_there_at_once() -> None:
    flight = Flight(torch.tensor(PACKED), 3, 0.0)
    assert [one.tokens for one in flight.land()] == [[7, 8, 9], [5]] and flight.device_ms() is None
