"""What `data.json` says of a folder of conversations: whose they are, what was asked, what each shard holds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddtree.errors import UserError

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class Record(BaseModel):
    """Unknown fields are refused, so that a reader of another version says so."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetIdentity(Record):
    """Which target wrote the answers, as far as token ids depend on it.

    Attributes:
        name: of its folder.
        config_sha256: of `config.json`.
        tokenizer_sha256: of the tokenizer's files.
        vocab_size: every token id lies below it.
        eos_token_ids: tokens that end an answer.
    """

    name: str
    config_sha256: Sha256
    tokenizer_sha256: Sha256
    vocab_size: Annotated[int, Field(gt=0)]
    eos_token_ids: list[int]


class PromptFile(Record):
    """A file of prompts. ``weight`` is its share among the files, ``n_rows`` what could be used of it."""

    name: str
    sha256: Sha256
    weight: float
    n_rows: Count


class EvaluationFile(Record):
    """A file of prompts that no conversation may share a 13-gram with."""

    name: str
    sha256: Sha256
    n_rows: Count


class DataAsked(Record):
    """What the conversations were asked to be: equal requests draw equal conversations.

    Attributes:
        allowed: sentences that prompts may share with evaluation prompts.
        answer_tokens: wanted in all.
        greedy_share: of the conversations, those whose answer is greedy.
        self_prompt_share: of the conversations, those whose user turn the target completes or invents.
        temperature_low: with ``temperature_high`` the range of what is not greedy.
        max_prompt_tokens, max_answer_tokens: of one conversation.
        shard_draws: conversations begun for one shard; those that a filter takes out count.
        chat: turns went through the target's chat template.
        loops: what became of answers that go round in circles.
    """

    prompts: list[PromptFile]
    excluded: list[EvaluationFile]
    allowed: list[str] = []
    answer_tokens: Annotated[int, Field(gt=0)]
    greedy_share: Annotated[float, Field(ge=0, le=1)]
    self_prompt_share: Annotated[float, Field(ge=0, le=1)]
    temperature_low: Annotated[float, Field(ge=0.001, le=100)]
    temperature_high: Annotated[float, Field(ge=0.001, le=100)]
    max_prompt_tokens: Annotated[int, Field(gt=0)]
    max_answer_tokens: Annotated[int, Field(gt=0)]
    shard_draws: Annotated[int, Field(gt=0)]
    chat: bool = True
    loops: Literal["cut", "drop", "keep"] = "cut"
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    dtype: str


class ShardFacts(Record):
    """What one shard holds.

    Attributes:
        n_draws: conversations that were begun for it.
        n_by_source: conversations by where their prompts came from.
        n_cut: answers that were cut where they had gone round in circles.
        n_left_out: conversations by the filter that took them out.
    """

    n_draws: Count
    n_conversations: Count
    n_greedy: Count
    n_tokens: Count
    n_answer_tokens: Count
    n_by_source: dict[str, Count]
    n_cut: Count = 0
    n_left_out: dict[str, Count]


class DataFacts(Record):
    """All of `data.json`.

    Attributes:
        sources: where prompts come from; a conversation names its own by the place in this list.
        shards: those that are whole, in order; files beyond them are remains.
        bad_rows: the first rows of prompt files that could not be used, each with its file, number and fault.
        n_bad_rows: all of them.
        n_evaluation_prompts: prompts that were not used because they share 13 words with an evaluation prompt.
    """

    schema_version: Literal["1"] = "1"
    target: TargetIdentity
    asked: DataAsked
    sources: list[str]
    shards: list[ShardFacts] = []
    bad_rows: list[str] = []
    n_bad_rows: Count = 0
    n_evaluation_prompts: Count = 0
    is_finished: bool = False

    @property
    def n_conversations(self) -> int:
        return sum(shard.n_conversations for shard in self.shards)

    @property
    def n_greedy(self) -> int:
        return sum(shard.n_greedy for shard in self.shards)

    @property
    def n_tokens(self) -> int:
        return sum(shard.n_tokens for shard in self.shards)

    @property
    def n_answer_tokens(self) -> int:
        return sum(shard.n_answer_tokens for shard in self.shards)

    @property
    def n_cut(self) -> int:
        return sum(shard.n_cut for shard in self.shards)

    @property
    def n_by_source(self) -> dict[str, int]:
        return _summed([shard.n_by_source for shard in self.shards])

    @property
    def n_left_out(self) -> dict[str, int]:
        return _summed([shard.n_left_out for shard in self.shards])


def _summed(counts: list[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for count in counts for name in count})
    return {name: sum(count.get(name, 0) for count in counts) for name in names}


def identify_target(folder: Path) -> TargetIdentity:
    """The identity of a target in a Hugging Face folder.

    Raises:
        UserError: the folder holds no model of the known families, or no tokenizer.
    """
    from ddtree.models.target_config import read_target_config

    config = read_target_config(folder)
    tokenizer = hashlib.sha256()
    present = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise UserError(f"{folder} has no tokenizer", f"add one of {', '.join(_TOKENIZER_FILES)}")
    for path in present:
        tokenizer.update(path.read_bytes())
    return TargetIdentity(
        name=folder.resolve().name,
        config_sha256=file_sha256(folder / "config.json"),
        tokenizer_sha256=tokenizer.hexdigest(),
        vocab_size=config.vocab_size,
        eos_token_ids=list(config.eos_token_ids),
    )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})", "check the path") from error
