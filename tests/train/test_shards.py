"""Shards hold what was put in, appear whole or not at all, and name the row that is damaged."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from ddtree.errors import UserError
from ddtree.train import durable
from ddtree.train.data_facts import DataAsked, DataFacts, ShardFacts, TargetIdentity
from ddtree.train.shards import Conversation, ShardWriter, locked, open_shards

TARGET = TargetIdentity(
    name="tiny", config_sha256="1" * 64, tokenizer_sha256="2" * 64, vocab_size=1000, eos_token_ids=[2]
)
ASKED = DataAsked(
    prompts=[], excluded=[], answer_tokens=9, greedy_share=0.5, self_prompt_share=1, temperature_low=0.7,
    temperature_high=1, max_answer_tokens=10, max_prompt_tokens=10, shard_draws=3, seed=0, dtype="float32",
)  # fmt: skip
FACTS = DataFacts(target=TARGET, asked=ASKED, sources=["given", "invented"])
FIRST = [
    Conversation(draw=0, source=1, tokens=[5, 6, 7, 2], answer_start=2, is_greedy=True),
    Conversation(draw=2, source=0, tokens=[999, 8, 9], answer_start=1, is_greedy=False),
]
SECOND = [Conversation(draw=4, source=0, tokens=np.array([1, 3]), answer_start=1, is_greedy=True)]


def shard_facts(conversations: list[Conversation]) -> ShardFacts:
    return ShardFacts(
        n_draws=3,
        n_conversations=len(conversations),
        n_greedy=sum(c.is_greedy for c in conversations),
        n_tokens=sum(len(c.tokens) for c in conversations),
        n_answer_tokens=sum(len(c.tokens) - c.answer_start for c in conversations),
        n_by_source={"given": 1},
        n_left_out={"loop": 1},
    )


def write(folder: Path) -> ShardWriter:
    writer = ShardWriter(folder, FACTS)
    writer.add(FIRST, shard_facts(FIRST))
    writer.add(SECOND, shard_facts(SECOND))
    return writer


def test_what_was_stored_is_read_back_over_shard_borders(tmp_path: Path) -> None:
    write(tmp_path).finish()
    found = open_shards(tmp_path)
    assert [found.tokens(i).tolist() for i in range(len(found))] == [[5, 6, 7, 2], [999, 8, 9], [1, 3]]
    assert [found.answer_start(i) for i in range(3)] == [2, 1, 1]
    assert [found.greedy(i) for i in range(3)] == [True, False, True]
    assert [found.source(i) for i in range(3)] == ["invented", "given", "given"]
    assert [found.draw(i) for i in range(3)] == [0, 2, 4]
    assert found.lengths.tolist() == [4, 3, 2]
    assert found.tokens(0).dtype == np.int64
    assert (found.facts.n_tokens, found.facts.n_answer_tokens, found.facts.n_greedy) == (9, 5, 2)
    assert found.facts.n_left_out == {"loop": 2} and found.facts.is_finished


def test_the_files_are_plain_little_endian_numbers(tmp_path: Path) -> None:
    write(tmp_path)
    assert (tmp_path / "shard-00000.tokens").read_bytes() == b"".join(
        n.to_bytes(4, "little") for n in (5, 6, 7, 2, 999, 8, 9)
    )
    index = np.fromfile(tmp_path / "shard-00000.index", "<i8").reshape(-1, 6)
    assert index.tolist() == [[0, 2, 4, 1, 1, 0], [4, 5, 7, 0, 0, 2]]


def test_a_shard_that_the_list_does_not_name_does_not_count(tmp_path: Path) -> None:
    """As a process leaves it that is killed between the files and `data.json`."""
    writer = ShardWriter(tmp_path, FACTS)
    writer.add(FIRST, shard_facts(FIRST))
    for name in ("shard-00001.tokens", "shard-00001.index", "shard-00002.tokens.unfinished"):
        (tmp_path / name).write_bytes(b"remains of a killed process")
    assert len(open_shards(tmp_path)) == 2
    again = ShardWriter(tmp_path, FACTS)
    again.add(SECOND, shard_facts(SECOND))
    assert [open_shards(tmp_path).draw(i) for i in range(3)] == [0, 2, 4]


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path, FACTS)
    writer.add(FIRST, shard_facts(FIRST))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", full)
        with pytest.raises(UserError, match=r"no space left for .*shard-00001.tokens: free some"):
            writer.add(SECOND, shard_facts(SECOND))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    writer.add(SECOND, shard_facts(SECOND))
    assert len(open_shards(tmp_path)) == 3


def damage(path: Path, dtype: str, at: int, value: int) -> None:
    numbers = np.fromfile(path, dtype)
    numbers[at] = value
    numbers.tofile(path)


@pytest.mark.parametrize(
    ("file", "dtype", "at", "value", "complaint"),
    [
        ("shard-00000.tokens", "<u4", 5, 1000, r"shard-00000.tokens, row 2: token 1000 lies beyond"),
        ("shard-00000.index", "<i8", 6, 3, r"shard-00000.index, row 2: the offsets"),
        ("shard-00000.index", "<i8", 1, 4, r"shard-00000.index, row 1: the offsets"),
        ("shard-00001.index", "<i8", 2, 3, r"shard-00001.index, row 1: the last conversation does not end"),
        ("shard-00000.index", "<i8", 4, 2, r"shard-00000.index, row 1: the offsets"),
    ],
)
def test_damage_is_named_by_file_and_row(
    tmp_path: Path, file: str, dtype: str, at: int, value: int, complaint: str
) -> None:
    write(tmp_path)
    damage(tmp_path / file, dtype, at, value)
    with pytest.raises(UserError, match=complaint):
        open_shards(tmp_path)


def test_a_cut_off_or_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    tokens = tmp_path / "shard-00001.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"shard-00001.tokens has 7 bytes where data.json tells of 8"):
        open_shards(tmp_path)
    tokens.unlink()
    with pytest.raises(UserError, match=r"shard-00001.tokens cannot be read"):
        open_shards(tmp_path)


def test_data_json_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no data.json: make the data with `ddtree train data`"):
        open_shards(tmp_path)
    write(tmp_path)
    facts = json.loads((tmp_path / "data.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps(facts | {"schema_version": "2"}))
    with pytest.raises(UserError, match=r"data.json is damaged \(schema_version"):
        open_shards(tmp_path)


@pytest.mark.parametrize("field", ["tokenizer_sha256", "config_sha256"])
def test_data_of_another_target_is_refused(tmp_path: Path, field: str) -> None:
    write(tmp_path)
    conversations = open_shards(tmp_path)
    conversations.require_target(TARGET)
    other = TARGET.model_copy(update={field: "3" * 64, "name": "other"})
    with pytest.raises(UserError, match=rf"written by tiny, whose {field} .* is not that of other"):
        conversations.require_target(other)


def test_a_folder_of_another_request_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    other = FACTS.model_copy(update={"asked": ASKED.model_copy(update={"seed": 1})})
    with pytest.raises(UserError, match=r"holds data of another request \(seed differ\)"):
        ShardWriter(tmp_path, other)
    assert len(open_shards(tmp_path)) == 3


def test_two_writers_are_kept_apart(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "new"),
        pytest.raises(UserError, match="another process writes to"),
        locked(tmp_path / "new"),
    ):
        pass
    with locked(tmp_path / "new"):
        pass
