"""A target with its drafter, in the package and in plain, and how their answers are held against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from ddtree import Completion, Engine, SamplingParams
from ddtree.demo import drafter_folder, target_folder
from ddtree.engine.completion import TracedTree
from plain_dflash import PlainDrafter
from plain_round import PlainAnswer, PlainEngine, PlainTree
from tiny_models import make_drafter, make_target, reference_model

VOCAB = 12  # so few tokens that random drafters are often right
NEAR = 1e-3  # log-scores that float32 and float64 may order differently


@dataclass
class Pair:
    """A target and a drafter, in the package and in plain."""

    target: Path
    drafter: Path
    model: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = reference_model(self.target)

    def engine(self, max_model_len: int = 128, **options: Any) -> Engine:
        return Engine.load(
            self.target, self.drafter, device="cpu", dtype="float32", max_model_len=max_model_len, **options
        )

    def plain(self, max_model_len: int = 128, **options: Any) -> PlainEngine:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        drafter = PlainDrafter(self.drafter, embedding.weight.detach(), head.weight.detach(), **options)
        return PlainEngine(self.model, drafter, max_model_len)


def make_pair(folder: Path, family: str = "llama", seed: int = 0, **drafter: Any) -> Pair:
    target = make_target(folder / "target", family, seed=seed, vocab_size=VOCAB, num_hidden_layers=4)
    return Pair(target, make_drafter(folder / "drafter", target, seed=seed + 10, **{"taps": [0, 2], **drafter}))


def real_pair() -> Pair:
    """SmolLM2 and the drafter that comes with the package."""
    return Pair(target_folder(), drafter_folder())


def chat_tokens(pair: Pair, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids


def greedy(n_new: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=n_new, ignore_eos=True, **others)


def assert_same(ours: Completion, wanted: PlainAnswer) -> None:
    assert ours.token_ids == wanted.tokens
    assert ours.stats.accepted_lengths == wanted.accepted_lengths
    assert ours.finish_reason == wanted.finish_reason
    if ours.trees:
        for ours_tree, plain_tree in zip(ours.trees, wanted.trees, strict=True):
            assert_same_tree(ours_tree, plain_tree)


def assert_same_tree(ours: TracedTree, wanted: PlainTree) -> None:
    nodes = {tuple(ours.tree.tokens_to(i)): score for i, score in enumerate(ours.tree.log_scores.tolist())}
    assert len(nodes) == len(wanted.scores)
    for prefix, score in nodes.items():
        assert abs(score - wanted.score(prefix)) < NEAR
    for prefix in nodes.keys() ^ wanted.scores.keys():  # either may stand at the end of the budget
        assert abs(wanted.score(prefix) - min(wanted.scores.values())) < NEAR
