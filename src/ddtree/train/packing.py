"""Conversations packed into rows of equal length, epoch after epoch, each a function of seed and number alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ddtree.errors import UserError
from ddtree.train.shards import Conversations

SHORTEST_ANSWER = 2  # an anchor and one token after it
OPEN_ROWS = 16


@dataclass(frozen=True)
class PackedRows:
    """A micro-batch of rows that hold whole conversations; what is left over is filled with conversations of one token.

    Attributes:
        tokens: int64 ``[rows, row_tokens]``.
        starts: int64 ``[rows, row_tokens]``, index in the row at which the token's conversation begins.
        answers: int64 ``[rows, row_tokens]``, index in the row at which the answer of the token's conversation begins.
        ends: int64 ``[rows, row_tokens]``, index in the row after the last token of the conversation.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    answers: torch.Tensor
    ends: torch.Tensor

    def to(self, device: torch.device) -> PackedRows:
        """On ``device``, without waiting for the copy."""
        if device.type != "cuda":
            return self
        parts = (self.tokens, self.starts, self.answers, self.ends)
        return PackedRows(*(part.pin_memory().to(device, non_blocking=True) for part in parts))


@dataclass(frozen=True)
class Piece:
    """A conversation as it is trained on."""

    folder: int
    number: int
    length: int


class Corpus:
    """The conversations of several folders that fit rows of ``row_tokens``, less those held out.

    Args:
        too_long: `cut` uses the beginning of a conversation beyond the row, `skip` leaves it out, `refuse` raises.
        n_held_out: conversations kept out of training, drawn by the seed.
        mask_token_id: must not occur.

    Raises:
        UserError: nothing is left, a row is too long and that is refused, or a row holds the mask token.
    """

    def __init__(
        self,
        folders: Sequence[Conversations],
        row_tokens: int,
        too_long: Literal["cut", "skip", "refuse"],
        n_held_out: int,
        seed: int,
        mask_token_id: int,
    ) -> None:
        self._folders, self.row_tokens = folders, row_tokens
        self.n_cut = self.n_skipped = 0
        pieces = [piece for f in range(len(folders)) for piece in self._pieces(f, too_long)]
        _refuse_mask_token(folders, mask_token_id)
        if len(pieces) <= n_held_out:
            raise UserError(
                f"{len(pieces)} conversations can be trained on, {n_held_out} of them are to be held out",
                "make more data, or hold out fewer",
            )
        order = np.random.default_rng([seed, 0]).permutation(len(pieces))
        self.held_out = [pieces[i] for i in order[:n_held_out]]
        self.training = [pieces[i] for i in sorted(order[n_held_out:])]

    def _pieces(self, f: int, too_long: str) -> Iterator[Piece]:
        folder = self._folders[f]
        lengths = folder.lengths
        for number, length in enumerate(lengths.tolist()):
            usable = min(length, self.row_tokens)
            if length > self.row_tokens:
                if too_long == "refuse":
                    raise UserError(
                        f"{folder.place(number)}: {length} tokens do not fit a row of {self.row_tokens}",
                        "raise --row-tokens, or choose --too-long cut or skip",
                    )
                if too_long == "skip":
                    self.n_skipped += 1
                    continue
            if usable - folder.answer_start(number) < SHORTEST_ANSWER:
                self.n_skipped += 1
                continue
            self.n_cut += usable < length
            yield Piece(f, number, usable)

    def pack(self, rows: Sequence[Sequence[Piece]]) -> PackedRows:
        """Tensors of some rows."""
        shape = (len(rows), self.row_tokens)
        tokens = np.zeros(shape, np.int64)
        here = np.tile(np.arange(self.row_tokens), (len(rows), 1))
        starts, answers, ends = here.copy(), here + 1, here + 1
        for r, pieces in enumerate(rows):
            at = 0
            for piece in pieces:
                folder, end = self._folders[piece.folder], at + piece.length
                tokens[r, at:end] = folder.tokens(piece.number)[: piece.length]
                starts[r, at:end] = at
                answers[r, at:end] = at + folder.answer_start(piece.number)
                ends[r, at:end] = end
                at = end
        return PackedRows(*(torch.from_numpy(part) for part in (tokens, starts, answers, ends)))

    def epoch(self, number: int, seed: int) -> list[list[Piece]]:
        """All training conversations in rows, in the order of one epoch."""
        order = np.random.default_rng([seed, 1, number]).permutation(len(self.training))
        return fill_rows([self.training[i] for i in order], self.row_tokens)


def fill_rows(pieces: Sequence[Piece], row_tokens: int) -> list[list[Piece]]:
    """Put pieces into rows as they come, each into the first of a few open rows that has room."""
    rows: list[list[Piece]] = []
    still_open: list[tuple[int, list[Piece]]] = []  # room left
    for piece in pieces:
        for i, (room, row) in enumerate(still_open):
            if piece.length <= room:
                row.append(piece)
                still_open[i] = (room - piece.length, row)
                break
        else:
            row = [piece]
            rows.append(row)
            still_open.append((row_tokens - piece.length, row))
            if len(still_open) > OPEN_ROWS:
                still_open.remove(min(still_open, key=lambda entry: entry[0]))
    return rows


def _refuse_mask_token(folders: Sequence[Conversations], mask_token_id: int) -> None:
    for folder in folders:
        found = folder.first_with(mask_token_id)
        if found is not None:
            raise UserError(
                f"{folder.place(found)}: the text holds the mask token {mask_token_id}",
                "name another with --mask-token, one that text does not contain",
            )


class RowStream:
    """Micro-batch after micro-batch without end: rows of epoch 0, epoch 1, ..., across the border of epochs.

    Micro-batch ``m`` is the same whoever asks for it, in whatever order. Not for several threads at once.

    Attributes:
        rows_per_epoch: of epoch 0; the others have about as many.
    """

    def __init__(self, corpus: Corpus, rows: int, seed: int) -> None:
        self._corpus, self._rows, self._seed = corpus, rows, seed
        self._last_epoch = (0, corpus.epoch(0, seed))
        self.rows_per_epoch = len(self._last_epoch[1])
        self._first = [0, self.rows_per_epoch]  # number of each epoch's first row

    def batch(self, number: int) -> PackedRows:
        """Micro-batch ``number``, on the CPU."""
        return self._corpus.pack([self._row(number * self._rows + i) for i in range(self._rows)])

    def _row(self, number: int) -> list[Piece]:
        while self._first[-1] <= number:
            self._first.append(self._first[-1] + len(self._rows_of(len(self._first) - 1)))
        epoch = int(np.searchsorted(self._first, number, side="right")) - 1
        return self._rows_of(epoch)[number - self._first[epoch]]

    def _rows_of(self, epoch: int) -> list[list[Piece]]:
        if self._last_epoch[0] != epoch:
            self._last_epoch = (epoch, self._corpus.epoch(epoch, self._seed))
        return self._last_epoch[1]


def held_out_batches(corpus: Corpus, rows: int) -> list[PackedRows]:
    """The held-out conversations, in as many micro-batches as they fill; the last one is filled up with empty rows."""
    packed = fill_rows(corpus.held_out, corpus.row_tokens)
    packed += [[] for _ in range(-len(packed) % rows)]
    return [corpus.pack(packed[i : i + rows]) for i in range(0, len(packed), rows)]
