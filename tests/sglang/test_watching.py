"""What looks at a round beside the work: trees of all ranks, and experts that the rows of a tree pick."""

import logging
import threading
from typing import Any, NamedTuple

import pytest
import torch

from ddtree.kernels.tree_build import build_tree
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.expert_count import ExpertCount
from ddtree.sglang.rank_check import TELL_EVERY_ROUNDS, RankCheck


class Ranks:
    """All-gather between threads that stand for ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.parts: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(world_size, timeout=20)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.parts[int(threading.current_thread().name)] = input.clone()
        self.barrier.wait()
        output.copy_(torch.cat([self.parts[rank] for rank in range(self.world_size)]))
        self.barrier.wait()

    def run(self, work: Any) -> list[str]:
        """``work(rank)`` on every rank; what each raised, or "alike"."""
        told = [""] * self.world_size

        def attempt(rank: int) -> None:
            try:
                work(rank)
                told[rank] = "alike"
            except RuntimeError as error:
                told[rank] = str(error)

        threads = [threading.Thread(target=attempt, args=(rank,), name=str(rank)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told


def a_tree(seed: int = 0) -> TreeTensors:
    torch.manual_seed(seed)
    log_probs = torch.randn(2, 4, 3).log_softmax(-1).sort(-1, descending=True).values
    return build_tree(log_probs, torch.randint(0, 90, (2, 4, 3)), torch.tensor([1, 2]), 6, torch.tensor([4, 4]))


def test_ranks_with_the_same_trees_go_on_and_say_so(caplog) -> None:
    group, rounds = Ranks(2), TELL_EVERY_ROUNDS
    checks = [RankCheck(group, is_teller=rank == 0) for rank in range(2)]
    trees = [a_tree(turn) for turn in range(rounds)]
    with caplog.at_level(logging.INFO):
        told = group.run(lambda rank: [checks[rank](tree) for tree in trees])
    assert told == ["alike", "alike"]
    assert [record.message for record in caplog.records] == [f"DDTREE: trees of {rounds} rounds alike on 2 ranks"]


@pytest.mark.parametrize("field", ["tokens", "parents"])
def test_one_other_node_ends_all_ranks_by_name(field: str) -> None:
    group, trees = Ranks(3), [a_tree() for _ in range(3)]
    getattr(trees[2], field)[1, 5] += 1
    told = group.run(lambda rank: RankCheck(group, is_teller=False)(trees[rank]))
    assert all("ranks [2] built other trees than rank 0 in round 0" in line for line in told), told


class RouterOutput(NamedTuple):
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class Router(torch.nn.Module):
    def forward(self, ids: torch.Tensor, experts: int) -> RouterOutput:
        return RouterOutput(ids, torch.zeros(len(ids), experts))


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.topk, self.experts = Router(), torch.nn.Module()
        self.experts.w13_weight = torch.nn.Parameter(torch.zeros(10, 8, 4, dtype=torch.bfloat16))
        self.experts.w2_weight = torch.nn.Parameter(torch.zeros(10, 4, 4, dtype=torch.bfloat16))


def test_distinct_experts_of_every_smaller_tree_are_counted() -> None:
    """Against Python sets, over layers and passes; other passes and slots that are no routed experts do not count."""
    torch.manual_seed(0)
    width, experts, layers, passes = 9, 10, 2, 7
    model = torch.nn.ModuleList(Mixture() for _ in range(layers))
    count = ExpertCount(width, ranks_an_expert=2, device=torch.device("cpu"))
    count.attach(model)
    model[0].topk(torch.zeros(width, 3, dtype=torch.int32), experts)  # of graph capture
    count.after_round(1)
    sizes = dict.fromkeys((0, 1, 2, 4, 8), 0.0)
    for _ in range(passes):
        for layer in model:
            ids = torch.stack([torch.randperm(experts)[:3] for _ in range(width)]).int()
            for budget in sizes:
                sizes[budget] += len(set(ids[: budget + 1].flatten().tolist())) / (layers * passes)
            shared_and_padding = torch.tensor([[experts, -1]]).expand(width, 2).int()
            layer.topk(torch.cat((ids, shared_and_padding), dim=1), experts)
            layer.topk(ids[:4], experts)  # a pass of another width
        count.is_paused = True
        model[0].topk(torch.zeros(width, 3, dtype=torch.int32), experts)  # a prompt as long as a tree
        count.is_paused = False
        count.after_round(1)
    told = count.rows()
    assert [budget for budget, _ in told] == list(sizes)
    assert [mean for _, mean in told] == pytest.approx(list(sizes.values()))
    assert told[0][1] == 3
    table = count.table().splitlines()
    assert "7 passes of one sequence, 2 layers" in table[0]
    # One expert: (8 * 4 + 4 * 4) numbers of 2 bytes on each of 2 ranks; 3 experts in 2 layers.
    assert table[3] == f"| 0 | 3.0 | 1.00 | {(8 * 4 + 4 * 4) * 2 * 2 * 3 * 2 / 1e6:.1f} |"


def test_counting_is_refused_where_there_is_nothing_to_count() -> None:
    with pytest.raises(ValueError, match="mixtures of experts"):
        ExpertCount(9, 1, torch.device("cpu")).attach(torch.nn.Linear(2, 2))
