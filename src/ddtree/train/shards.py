"""Conversations as token ids on disk: a folder of shards, written one whole shard at a time, read by memory map.

A shard is two files. `shard-00000.tokens` holds the token ids (little-endian uint32) of its conversations, one after
another; `shard-00000.index` one `INDEX_DTYPE` row a conversation. `data.json` lists the shards that count: it is
replaced last, so that a shard is there whole or not at all, whatever ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ddtree.errors import UserError
from ddtree.train.data_facts import DataFacts, ShardFacts, TargetIdentity
from ddtree.train.durable import replacing

DATA_FILE = "data.json"
TOKEN_DTYPE = np.dtype("<u4")
# Offsets count tokens of the shard: [start, end) is the conversation, [answer_start, end) what is learnt from.
# `flags` bit 0: the answer is greedy. `source`: place in `DataFacts.sources`. `draw`: number of the conversation in
# the whole folder, counted from 0 and with those that a filter took out.
INDEX_DTYPE = np.dtype([(name, "<i8") for name in ("start", "answer_start", "end", "flags", "source", "draw")])
GREEDY = 1


@dataclass(frozen=True)
class Conversation:
    """One conversation to store.

    Attributes:
        tokens: prompt and answer, the token that ends the answer included where there is one.
        answer_start: index of the answer's first token.
    """

    draw: int
    source: int
    tokens: Sequence[int] | npt.NDArray[np.integer]
    answer_start: int
    is_greedy: bool


class Conversations:
    """The conversations of a folder, read as they are asked for.

    Args:
        folder: holds `data.json` and the shards that it lists.

    Raises:
        UserError: no such folder, a damaged or missing file, or a row that contradicts the facts, by file and row.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = read_facts(folder)
        self._tokens: list[npt.NDArray[np.uint32]] = []
        indices = []
        for number, shard in enumerate(self.facts.shards):
            tokens, index = self._open_shard(number, shard)
            self._tokens.append(tokens)
            indices.append(index)
        self._index = np.concatenate(indices) if indices else np.empty(0, INDEX_DTYPE)
        self._shard = np.repeat(np.arange(len(indices)), [len(index) for index in indices])

    def __len__(self) -> int:
        return len(self._index)

    def tokens(self, i: int) -> npt.NDArray[np.int64]:
        """Token ids (length,) of prompt and answer."""
        row = self._index[i]
        return self._tokens[self._shard[i]][row["start"] : row["end"]].astype(np.int64)

    def answer_start(self, i: int) -> int:
        """Index of the answer's first token in `tokens(i)`."""
        return int(self._index[i]["answer_start"] - self._index[i]["start"])

    def greedy(self, i: int) -> bool:
        """Whether every token of the answer is the target's argmax."""
        return bool(self._index[i]["flags"] & GREEDY)

    def source(self, i: int) -> str:
        """Where the prompt came from."""
        return self.facts.sources[self._index[i]["source"]]

    def draw(self, i: int) -> int:
        """Number of the conversation in its folder, those that were filtered out counted."""
        return int(self._index[i]["draw"])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every conversation (n,)."""
        return np.asarray(self._index["end"] - self._index["start"])

    def place(self, i: int) -> str:
        """File and row of a conversation, for messages."""
        shard = self._shard[i]
        return f"{shard_paths(self.folder, int(shard))[0]}, row {i + 1 - int(np.searchsorted(self._shard, shard))}"

    def first_with(self, token: int) -> int | None:
        """Number of the first conversation that holds ``token``; None where none does."""
        before = 0
        for number, tokens in enumerate(self._tokens):
            (places,) = np.nonzero(tokens == token)
            if len(places):
                index = self._index[self._shard == number]
                return before + int(np.searchsorted(index["end"], places[0], side="right"))
            before += int((self._shard == number).sum())
        return None

    def require_target(self, target: TargetIdentity) -> None:
        """Refuse to train another target with these token ids.

        Raises:
            UserError: another tokenizer, vocabulary or configuration.
        """
        for field in ("tokenizer_sha256", "vocab_size", "config_sha256"):
            wanted, found = getattr(target, field), getattr(self.facts.target, field)
            if wanted != found:
                raise UserError(
                    f"{self.folder / DATA_FILE} was written by {self.facts.target.name}, whose "
                    f"{field} {str(found)[:12]} is not that of {target.name} ({str(wanted)[:12]})",
                    "generate data with the target that you train for",
                )

    def _open_shard(self, number: int, facts: ShardFacts) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.void]]:
        tokens_path, index_path = shard_paths(self.folder, number)
        tokens = _map(tokens_path, TOKEN_DTYPE, facts.n_tokens)
        index = _map(index_path, INDEX_DTYPE, facts.n_conversations)
        ends = np.concatenate([[0], index["end"]])
        is_bad = (
            (index["start"] != ends[:-1])
            | (index["answer_start"] <= index["start"])
            | (index["end"] <= index["answer_start"])
            | (index["source"] < 0)
            | (index["source"] >= len(self.facts.sources))
        )
        if is_bad.any():
            _refuse(f"{index_path}, row {int(is_bad.argmax()) + 1}: the offsets do not fit together")
        if ends[-1] != len(tokens):
            _refuse(f"{index_path}, row {len(index)}: the last conversation does not end with {tokens_path.name}")
        is_foreign = tokens >= self.facts.target.vocab_size
        if is_foreign.any():
            row = int(np.searchsorted(index["end"], is_foreign.argmax(), side="right"))
            _refuse(
                f"{tokens_path}, row {row + 1}: token {int(tokens[is_foreign.argmax()])} lies beyond the vocabulary "
                f"of {self.facts.target.vocab_size}"
            )
        return tokens, index


def open_shards(folder: Path) -> Conversations:
    """The conversations of a folder, finished or not; raises like `Conversations`."""
    return Conversations(folder)


class ShardWriter:
    """Adds shards to a folder, one at a time.

    Args:
        folder: made where it is missing.
        facts: what `data.json` says where the folder is new; an older one must agree but for its shards.

    Raises:
        UserError: the folder holds other data.
    """

    def __init__(self, folder: Path, facts: DataFacts) -> None:
        self.folder = folder
        self.facts = facts
        if (folder / DATA_FILE).exists():
            before = read_facts(folder)
            _require_same_request(folder, before, facts)
            self.facts = before
        else:
            _make(folder)
            self._keep(facts)

    def add(self, conversations: Sequence[Conversation], facts: ShardFacts) -> None:
        """Store one shard; it counts when this returns.

        Raises:
            UserError: the disk is full or cannot be written; the folder is as it was.
        """
        tokens_path, index_path = shard_paths(self.folder, len(self.facts.shards))
        lengths = np.array([len(c.tokens) for c in conversations], np.int64)
        ends = lengths.cumsum()
        index = np.zeros(len(conversations), INDEX_DTYPE)
        index["start"], index["end"] = ends - lengths, ends
        index["answer_start"] = index["start"] + [c.answer_start for c in conversations]
        index["flags"] = [GREEDY * c.is_greedy for c in conversations]
        index["source"] = [c.source for c in conversations]
        index["draw"] = [c.draw for c in conversations]
        with replacing(tokens_path) as file:
            for conversation in conversations:
                file.write(np.asarray(conversation.tokens).astype(TOKEN_DTYPE).tobytes())
        with replacing(index_path) as file:
            file.write(index.tobytes())
        self._keep(self.facts.model_copy(update={"shards": [*self.facts.shards, facts]}))

    def finish(self) -> None:
        """Say that all that was asked for is there."""
        self._keep(self.facts.model_copy(update={"is_finished": True}))

    def _keep(self, facts: DataFacts) -> None:
        with replacing(self.folder / DATA_FILE) as file:
            file.write(facts.model_dump_json(indent=1).encode())
        self.facts = facts


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder, which is made where it is missing; a lock goes with its process.

    Raises:
        UserError: another process writes there.
    """
    _make(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"another process writes to {folder}", "wait for it, or give another folder") from None
    finally:
        os.close(handle)


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Files of one shard: tokens and index."""
    return folder / f"shard-{number:05}.tokens", folder / f"shard-{number:05}.index"


def read_facts(folder: Path) -> DataFacts:
    """What `data.json` of a folder says.

    Raises:
        UserError: no such file, or one that was not written by this version.
    """
    path = folder / DATA_FILE
    try:
        return DataFacts.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} holds no {DATA_FILE}", "make the data with `ddtree train data`") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})", "check the path") from error
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise UserError(f"{path} is damaged ({place}: {fault['msg']})", "make the data again") from None


def _require_same_request(folder: Path, before: DataFacts, now: DataFacts) -> None:
    for name in ("target", "asked", "sources"):
        old, new = getattr(before, name), getattr(now, name)
        if old == new:
            continue
        fields = old.model_fields_set if hasattr(old, "model_fields_set") else ()
        which = [field for field in sorted(fields) if getattr(old, field) != getattr(new, field)] or [name]
        raise UserError(
            f"{folder} holds data of another request ({', '.join(which)} differ)",
            "give another folder, or ask for the same to go on with it",
        )


def _map(path: Path, dtype: np.dtype, n_rows: int) -> npt.NDArray:
    """Entries of a file that must hold exactly ``n_rows``."""
    try:
        size = path.stat().st_size
        if size != n_rows * dtype.itemsize:
            _refuse(f"{path} has {size} bytes where {DATA_FILE} tells of {n_rows * dtype.itemsize}")
        return np.memmap(path, dtype, "r", shape=(n_rows,)) if n_rows else np.empty(0, dtype)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})", "make the data again") from error


def _refuse(cause: str) -> None:
    raise UserError(cause, "make the data again")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror or error})", "give another folder") from error
