"""Rows hold whole conversations, anchors stand in answers, and all of it follows from seed and number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree.errors import UserError
from ddtree.train.anchors import draw_anchors, draw_looks, plan_depths
from ddtree.train.data_facts import DataAsked, DataFacts, ShardFacts, TargetIdentity
from ddtree.train.packing import Corpus, RowStream, held_out_batches
from ddtree.train.parallel import Group
from ddtree.train.shards import Conversation, Conversations, ShardWriter, open_shards
from ddtree.train.trainer import Prefetched, micro_batches

ROW_TOKENS, COUNT, MASK = 64, 50, 3


def write(folder: Path, conversations: list[Conversation], per_shard: int) -> Conversations:
    identity = TargetIdentity(
        name="tiny", config_sha256="1" * 64, tokenizer_sha256="2" * 64, vocab_size=1000, eos_token_ids=[2]
    )
    asked = DataAsked(
        prompts=[], excluded=[], answer_tokens=9, greedy_share=1, self_prompt_share=1, temperature_low=1,
        temperature_high=1, max_prompt_tokens=20, max_answer_tokens=10, shard_draws=3, seed=0, dtype="float32",
    )  # fmt: skip
    writer = ShardWriter(folder, DataFacts(target=identity, asked=asked, sources=["words"]))
    for first in range(0, len(conversations), per_shard):
        some = conversations[first : first + per_shard]
        facts = ShardFacts(
            n_draws=len(some), n_conversations=len(some), n_greedy=len(some), n_tokens=sum(len(c.tokens) for c in some),
            n_answer_tokens=sum(len(c.tokens) - c.answer_start for c in some), n_by_source={}, n_left_out={},
        )  # fmt: skip
        writer.add(some, facts)
    return open_shards(folder)


def numbered(count: int = COUNT, longest: int = 40) -> list[Conversation]:
    """Conversation i says nothing but 10 + i, in some length."""
    draw = np.random.default_rng(1)
    return [
        Conversation(draw=i, source=0, tokens=[10 + i] * int(draw.integers(8, longest)), answer_start=5, is_greedy=True)
        for i in range(count)
    ]


def corpus(
    folder: Path, conversations: list[Conversation], n_held_out: int = 10, too_long: str = "cut", per_shard: int = 20
) -> Corpus:
    text = write(folder, conversations, per_shard)
    return Corpus([text], ROW_TOKENS, too_long, n_held_out, 0, MASK)  # type: ignore[arg-type]


def test_an_epoch_holds_every_training_conversation_once_and_no_held_out_one(tmp_path: Path) -> None:
    conversations = numbered()
    made = corpus(tmp_path, conversations)
    rows = made.pack(made.epoch(0, seed=7))
    held_out = {10 + piece.number for piece in made.held_out}
    assert len(held_out) == 10
    found = []
    for row in range(len(rows.tokens)):
        at = 0
        while at < ROW_TOKENS and rows.ends[row, at] > at + 1:
            end, said = int(rows.ends[row, at]), int(rows.tokens[row, at])
            assert (rows.tokens[row, at:end] == said).all() and (rows.starts[row, at:end] == at).all()
            assert (rows.answers[row, at:end] == at + 5).all()
            assert end - at == len(conversations[said - 10].tokens)
            found.append(said)
            at = end
        assert (rows.ends[row, at:] == torch.arange(at, ROW_TOKENS) + 1).all()
    assert sorted(found) == sorted({10 + i for i in range(COUNT)} - held_out)
    assert sum(piece.length for row in made.epoch(0, 7) for piece in row) > 0.75 * rows.tokens.numel()


def test_every_epoch_has_another_order_and_batches_go_on_over_its_border(tmp_path: Path) -> None:
    made = corpus(tmp_path, numbered())
    first, second = made.epoch(0, 7), made.epoch(1, 7)
    assert first != second
    stream = RowStream(made, rows=3, seed=7)
    wanted = made.pack((first + second)[: 3 * (len(first) // 3 + 2)]).tokens
    last = len(first) // 3 + 1
    got = torch.cat([stream.batch(number).tokens for number in range(last + 1)])
    assert torch.equal(got, wanted)
    again = RowStream(made, rows=3, seed=7)  # asked for in another order
    assert torch.equal(again.batch(last).tokens, wanted[-3:])
    assert torch.equal(again.batch(0).tokens, wanted[:3])
    assert stream.rows_per_epoch == len(first)


def test_batches_packed_ahead_are_those_of_the_process(tmp_path: Path) -> None:
    stream = RowStream(corpus(tmp_path, numbered()), rows=2, seed=0)
    second_of_two = Group(rank=1, size=2)
    with Prefetched(stream, first_step=3, accumulation=2, group=second_of_two) as batches:
        got = [next(batches).tokens for _ in range(4)]
    assert list(micro_batches(3, 2, second_of_two)) == [13, 15]
    for tokens, number in zip(got, (13, 15, 17, 19), strict=True):
        assert torch.equal(tokens, stream.batch(number).tokens)


def test_held_out_rows_are_always_the_same(tmp_path: Path) -> None:
    made = corpus(tmp_path, numbered())
    batches = held_out_batches(made, rows=4)
    said = {int(token) for batch in batches for token in batch.tokens.unique()} - {0}
    assert said == {10 + piece.number for piece in made.held_out}


@pytest.mark.parametrize(("too_long", "kept"), [("cut", 3), ("skip", 2)])
def test_what_is_beyond_a_row_is_cut_or_left_out(too_long: str, kept: int, tmp_path: Path) -> None:
    long = Conversation(draw=9, source=0, tokens=[99] * 70, answer_start=5, is_greedy=True)
    made = corpus(tmp_path, [*numbered(2), long], n_held_out=0, too_long=too_long)
    assert len(made.training) == kept
    assert (made.n_cut, made.n_skipped) == ((1, 0) if too_long == "cut" else (0, 1))
    assert max(piece.length for piece in made.training) <= ROW_TOKENS


def test_what_is_beyond_a_row_can_be_refused_by_number(tmp_path: Path) -> None:
    long = Conversation(draw=9, source=0, tokens=[99] * 70, answer_start=5, is_greedy=True)
    with pytest.raises(UserError, match=r"shard-00000\.tokens, row 3: 70 tokens do not fit a row of 64"):
        corpus(tmp_path, [*numbered(2), long], n_held_out=0, too_long="refuse")


def test_an_answer_that_a_row_does_not_reach_is_left_out(tmp_path: Path) -> None:
    late = Conversation(draw=9, source=0, tokens=[99] * 70, answer_start=63, is_greedy=True)
    made = corpus(tmp_path, [*numbered(2), late], n_held_out=0)
    assert len(made.training) == 2 and made.n_skipped == 1


def test_text_with_the_mask_token_is_named(tmp_path: Path) -> None:
    bad = Conversation(draw=9, source=0, tokens=[9, 9, 9, MASK, 9], answer_start=1, is_greedy=True)
    with pytest.raises(UserError, match=r"shard-00001\.tokens, row 1: the text holds the mask token 3"):
        corpus(tmp_path, [*numbered(2), bad, *numbered(1)], n_held_out=0, per_shard=2)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 conversations can be trained on, 2 of them are to be held out"):
        corpus(tmp_path, numbered(2), n_held_out=2)


def test_anchors_are_answer_tokens_that_the_answer_follows(tmp_path: Path) -> None:
    made = corpus(tmp_path, numbered(longest=20))
    rows = RowStream(made, rows=6, seed=0).batch(0)
    anchors = draw_anchors(rows, 10, 4, torch.Generator().manual_seed(1))
    assert anchors.valid.all()
    assert (anchors.index.diff() > 0).all(), "ascending, none twice"
    for row in range(6):
        for n, root in enumerate(anchors.index[row].tolist()):
            assert rows.answers[row, root] <= root < rows.ends[row, root] - 1
            for depth in range(1, 5):
                in_answer = root + depth < rows.ends[row, root]
                assert bool(anchors.label_valid[row, n, depth - 1]) == bool(in_answer)
                if in_answer:
                    assert anchors.labels[row, n, depth - 1] == rows.tokens[row, root + depth]
                    assert anchors.teacher[row, n, depth - 1] == root + depth - 1
    other = draw_anchors(rows, 10, 4, torch.Generator().manual_seed(2))
    assert not torch.equal(anchors.index, other.index)


def test_rows_with_too_few_places_have_anchors_that_do_not_count(tmp_path: Path) -> None:
    short = [Conversation(draw=0, source=0, tokens=[9] * 8, answer_start=5, is_greedy=True)]
    made = corpus(tmp_path, short, n_held_out=0)
    anchors = draw_anchors(made.pack([made.training]), 6, 3, torch.Generator())
    assert anchors.valid.sum() == 2  # tokens 5 and 6; none follows 7
    assert anchors.label_valid.sum() == 3


def test_looks_go_from_depth_one_to_each_anchors_own() -> None:
    plan = plan_depths(8, 5, 0.5)
    looks = draw_looks(plan, 3, 5, torch.Generator().manual_seed(0))
    assert looks.anchor.shape == (3, plan.rows)
    for row in range(3):
        places = list(zip(looks.anchor[row].tolist(), looks.depth[row].tolist(), strict=True))
        reach = [max((d for a, d in places if a == anchor), default=-1) + 1 for anchor in range(8)]
        assert places == [(anchor, depth) for anchor in range(8) for depth in range(reach[anchor])]
        assert sorted(reach, reverse=True) == plan.reach.tolist()
