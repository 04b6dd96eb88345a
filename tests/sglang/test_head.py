"""The tree head: one rank or several give the trees of the whole vocabulary, and fast kernels those of the twins."""

import threading
from dataclasses import dataclass, replace

import pytest
import torch

from ddtree.kernels.kernel_set import TWINS
from ddtree.kernels.top_log_probs import top_log_probs
from ddtree.kernels.tree_build import build_tree
from ddtree.sglang.head import HeadShard, TreeHead
from ddtree.sglang.kernel_choice import WorkerKernels, choose_kernels
from ddtree.sglang.settings import TreeSettings
from devices import DEVICE, GPU

SETTINGS = TreeSettings(budget=12, topk_cap=5, block_size=7, draft_temperature=0.5)
CONTEXT = 64


class Ranks:
    """All-gather between threads that stand for ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.parts: list[torch.Tensor | None] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)

    def member(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.ranks.parts[self.rank] = input.clone()
        self.ranks.barrier.wait()
        output.copy_(torch.cat([part for part in self.ranks.parts if part is not None]))
        self.ranks.barrier.wait()


def twins() -> WorkerKernels:
    return replace(choose_kernels(torch.device("cpu")), name="torch")


def inputs(batch: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(batch)
    block = SETTINGS.block_size
    states = torch.randint(-3, 4, (batch * block, hidden)).float()  # integers: sums are exact, ties are many
    committed = torch.tensor([CONTEXT - 3, 5, CONTEXT, 20])[:batch]
    positions = (committed[:, None] + torch.arange(block)).flatten()
    return states, torch.randint(0, 90, (batch * block,)), positions


@dataclass
class Sampling:
    """As SGLang tells of a batch: a greedy request among sampled ones has temperature 1 and takes one token."""

    is_all_greedy: bool
    temperatures: torch.Tensor
    top_ks: torch.Tensor


MIXED = Sampling(False, torch.tensor([[1.0], [0.6], [1.0], [2.0]]), torch.tensor([1, 1 << 30, 50, 1 << 30]))
GREEDY = Sampling(True, torch.ones(4, 1), torch.ones(4))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("rounds", "temperatures"),
    [
        ([None], [0.5] * 4),
        ([MIXED], [0.5, 0.8, 1.0, 1.0]),
        ([MIXED, GREEDY], [0.5] * 4),
        ([GREEDY, None, MIXED], [0.5, 0.8, 1.0, 1.0]),
    ],
    ids=["greedy", "mixed", "greedy again", "mixed again"],
)
def test_ranks_build_the_tree_of_the_whole_vocabulary(
    batch: int, ranks: int, rounds: list[Sampling | None], temperatures: list[float]
) -> None:
    torch.manual_seed(0)
    hidden, per_rank = 6, 30
    weight = torch.randint(-2, 3, (ranks * per_rank, hidden)).float()
    states, ids, positions = inputs(batch, hidden)
    gathering, heads = Ranks(ranks), []
    for rank in range(ranks):
        part = torch.cat((weight[rank * per_rank : (rank + 1) * per_rank], torch.full((4, hidden), 9.0)))  # padding
        shard = HeadShard(part, per_rank, rank * per_rank, gathering.member(rank) if ranks > 1 else None)
        heads.append(TreeHead(shard, SETTINGS, 5, CONTEXT, twins()))
    for head in heads:
        for sampling in rounds:
            cut = sampling and Sampling(sampling.is_all_greedy, sampling.temperatures[:batch], sampling.top_ks[:batch])
            head.take_temperatures(cut, batch)
    threads = [threading.Thread(target=head, args=(states, ids, positions)) for head in heads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    block, depths = SETTINGS.block_size, SETTINGS.depths
    logits = states.view(batch, block, hidden)[:, 1 : 1 + depths] @ weight.T
    log_probs, tokens = top_log_probs(logits / torch.tensor(temperatures[:batch])[:, None, None], SETTINGS.topk_cap)
    room = (CONTEXT - 1 - positions.view(batch, block)[:, 0]).clamp_min(0)
    want = build_tree(log_probs, tokens, ids.view(batch, block)[:, 0], SETTINGS.budget, room)
    for head in heads:
        got = head.trees(batch)
        for name in ("tokens", "parents", "depths", "ancestors"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        torch.testing.assert_close(got.scores, want.scores)
    assert int(heads[0].trees(batch).depths[0].max()) <= 2, "no node stands behind the context's end"


@pytest.mark.skipif(not GPU, reason="the fast kernels need a GPU here")
@pytest.mark.parametrize("batch", [1, 3])
def test_fast_kernels_build_the_twins_tree(batch: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(49152, 64, device=DEVICE).bfloat16()
    states = torch.randn(batch * SETTINGS.block_size, 64, device=DEVICE).bfloat16()
    ids = torch.arange(batch * SETTINGS.block_size, device=DEVICE)
    positions = torch.arange(SETTINGS.block_size, device=DEVICE).repeat(batch)
    shard = HeadShard(weight, len(weight), 0, None)
    fast = TreeHead(shard, SETTINGS, 4, CONTEXT, choose_kernels(DEVICE))
    slow = TreeHead(shard, SETTINGS, 4, CONTEXT, replace(twins(), top_log_probs=TWINS.top_log_probs))
    fast(states, ids, positions)
    slow(states, ids, positions)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(fast.trees(batch), name), getattr(slow.trees(batch), name)), name
