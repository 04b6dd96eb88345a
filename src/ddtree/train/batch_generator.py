"""Many conversations at once, on a static cache, without the host in between.

The engine serves requests: every sequence has its own budget, stops, stream and penalties, which costs the host about
25 microseconds a token in plain decoding and bounds it to some tens of thousands of tokens a second. Training data is
one thing only, the target's plain answers, by the million. Here every step is one CUDA graph over a fixed batch of
seats; a seat whose conversation ends takes the next one from a ring on the device, in the same step. The host fills
the ring ahead and picks up what is finished, both while the device works.

The passes are the engine's (`ddtree.models`, `ddtree.kernels`), and so is the sampling noise: in float32 an answer
equals what `Engine.generate` gives for that prompt, temperature and seed, token for token, which the tests hold it to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.errors import UserError
from ddtree.kernels.choose import SamplingTensors
from ddtree.kernels.kernel_set import TWINS
from ddtree.kernels.noise import seed_key
from ddtree.kernels.tree_tensors import root_only
from ddtree.models.layer import Pass
from ddtree.models.target import Target
from ddtree.train.draws import Draw, Written
from ddtree.train.generation_limits import PAGE_TOKENS, Limits

_RING_TURNS = 6
"""Conversations in the ring for each seat: those that run, those that wait, those that are done but not picked up."""
_WARM_UP_STEPS = 3
_START = 3
"""So many tokens of an ending, written by the target itself, end its turn: the rest of the ending follows."""


@dataclass(frozen=True)
class _Snapshot:
    """Lengths ``[ring rows]`` of finished conversations after a run, 0 where one is not finished.

    Attributes:
        n_given: conversations in the ring so far; what later ones find in their row is not theirs.
        taken: recorded behind the copy; None where steps are not captured, and so nothing runs ahead of the host.
    """

    length: torch.Tensor
    n_given: int
    taken: torch.cuda.Event | None


class BatchGenerator:
    """A target that writes ``seats`` conversations at a time.

    Args:
        endings: token lists, each of which can follow a user's turn that the target completed.

    Raises:
        UserError: prompts so long that this target would rotate them by their length, which a turn that is still being
            written does not have yet.
    """

    def __init__(self, target: Target, limits: Limits, endings: Sequence[Sequence[int]], seats: int) -> None:
        if target.rope.length_kind(limits.prompt_tokens):
            raise UserError(
                f"prompts of {limits.prompt_tokens} tokens are beyond the length that the target was first trained for",
                f"choose at most {target.rope.settings.original_max_positions}",
            )
        self._target, self._limits, self.seats = target, limits, seats
        self._ring_rows = seats * _RING_TURNS
        config, device = target.config, target.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        pages = limits.pages
        n_slots = (1 + seats * pages) * PAGE_TOKENS  # page 0 is the one that takes what must not be kept
        self._cache = zeros(
            config.n_layers, 2, n_slots, config.layer.n_kv_heads, config.layer.head_dim, dtype=target.dtype
        )
        self._block_table = torch.arange(1, 1 + seats * pages, device=device).view(seats, pages)
        self._origin, self._sees_itself = zeros(seats, 1), torch.ones(seats, 1, 1, dtype=torch.bool, device=device)
        # The ring: one row a conversation, in the order of their numbers, and one row more for seats that are empty.
        rows = self._ring_rows + 1
        self._tokens = zeros(rows, limits.tokens)
        self._given, self._ending, self._length, self._answer_start = (zeros(rows) for _ in range(4))
        self._temperature, self._turn_temperature = (zeros(rows, dtype=torch.float32) for _ in range(2))
        self._seed_keys = zeros(rows, dtype=torch.int32)
        # The seats.
        self._row = torch.full((seats,), self._ring_rows, dtype=torch.int64, device=device)
        self._position, self._ending_at, self._answered = (zeros(seats) for _ in range(3))
        self._dealt, self._filled = zeros(1), zeros(1)
        width = max((len(ending) for ending in endings), default=0) + 1
        self._endings = zeros(len(endings) + 1, width)
        self._ending_length = zeros(len(endings) + 1)
        self._ending_starts = zeros(len(endings) + 1, _START) - 1
        for i, ending in enumerate(endings, 1):  # ending 0 is the lack of one
            self._endings[i, : len(ending)] = torch.tensor(ending)
            self._ending_length[i] = len(ending)
            if len(ending) >= _START:
                self._ending_starts[i] = torch.tensor(ending[:_START])
        self._ends_turn, self._ends_answer = zeros(2, config.vocab_size, dtype=torch.bool)
        for flags, enders in ((self._ends_turn, limits.turn_enders), (self._ends_answer, limits.answer_enders)):
            flags[torch.tensor(sorted(enders), dtype=torch.int64, device=device)] = True
        self._graph: torch.cuda.CUDAGraph | None = None
        # The plain kernels ask the host in every step; they cannot be captured.
        self._copies = torch.cuda.Stream() if device.type == "cuda" and target.kernels is not TWINS else None
        self._snapshots: list[_Snapshot] = []
        self._in_ring: dict[int, Draw] = {}
        self._n_given = 0

    @property
    def room(self) -> int:
        """Conversations that `give` takes now. The oldest that is not picked up yet holds its place in the ring."""
        oldest = next(iter(self._in_ring), self._n_given)
        return oldest + self._ring_rows - self._n_given

    @property
    def pending(self) -> int:
        """Conversations given and not picked up yet."""
        return len(self._in_ring)

    def give(self, draws: Sequence[Draw]) -> None:
        """Put conversations in the ring, at most `room` of them, each with a prompt within the limits."""
        if not draws:
            return
        assert len(draws) <= self.room
        numbers = range(self._n_given, self._n_given + len(draws))
        rows = self._sent(torch.tensor([number % self._ring_rows for number in numbers]))
        tokens = torch.zeros(len(draws), self._limits.tokens, dtype=torch.int64)
        for i, draw in enumerate(draws):
            assert 0 < len(draw.tokens) <= self._limits.prompt_tokens
            tokens[i, : len(draw.tokens)] = torch.as_tensor(draw.tokens)
        for ring, values in (
            (self._tokens, tokens),
            (self._given, torch.tensor([len(draw.tokens) for draw in draws])),
            (self._ending, torch.tensor([0 if draw.ending is None else draw.ending + 1 for draw in draws])),
            (self._length, torch.zeros(len(draws), dtype=torch.int64)),
            (self._temperature, torch.tensor([draw.temperature for draw in draws])),
            (self._turn_temperature, torch.tensor([draw.turn_temperature for draw in draws])),
            (self._seed_keys, torch.tensor([seed_key(draw.seed) for draw in draws], dtype=torch.int32)),
        ):
            ring[rows] = self._sent(values)
        self._in_ring.update(zip(numbers, draws, strict=True))
        self._n_given += len(draws)
        self._filled.fill_(self._n_given)

    def run(self, steps: int) -> None:
        """Take steps; captured ones are still to be taken when this returns."""
        if self._copies is None:
            for _ in range(steps):
                self._step(int(self._position.max()) + 1)
            self._snapshots.append(_Snapshot(self._length, self._n_given, None))
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        for _ in range(steps):
            self._graph.replay()
        snapshot = _Snapshot(self._length.clone(), self._n_given, torch.cuda.Event())
        assert snapshot.taken is not None
        snapshot.taken.record()
        self._snapshots.append(snapshot)

    def collect(self, keep_running: int = 0) -> list[Written]:
        """Conversations that were finished when a run ended, in the order of their numbers, each given out once.

        Args:
            keep_running: so many of the last runs are left to work on; what they finish comes later.
        """
        due = len(self._snapshots) - keep_running
        if due <= 0:
            return []
        snapshot = self._snapshots[due - 1]
        del self._snapshots[:due]
        if self._copies is None or snapshot.taken is None:
            return self._read(snapshot)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(snapshot.taken)
            return self._read(snapshot)

    def _read(self, snapshot: _Snapshot) -> list[Written]:
        lengths = snapshot.length.cpu().numpy()
        known = (number for number in self._in_ring if number < snapshot.n_given)
        numbers = [number for number in known if lengths[number % self._ring_rows]]
        if not numbers:
            return []
        rows = np.array(numbers) % self._ring_rows
        place = torch.as_tensor(rows, device=self._tokens.device)
        longest = int(lengths[rows].max())
        tokens = self._tokens[place, :longest].cpu().numpy()
        starts = self._answer_start[place].cpu().tolist()
        return [
            Written(self._in_ring.pop(number), tokens[i, : lengths[row]], starts[i])
            for i, (number, row) in enumerate(zip(numbers, rows, strict=True))
        ]

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        if self._copies is None:
            return values.to(self._tokens.device)
        return values.pin_memory().to(self._tokens.device, non_blocking=True)

    def _step(self, context_bound: int) -> None:
        """Every seat takes in one token, and learns the next: from its prompt, from an ending, or from the target."""
        limits, row, position = self._limits, self._row, self._position
        ending, given = self._ending[row], self._given[row]
        is_empty = row == self._ring_rows
        in_prompt = position + 1 < given
        completes = ~in_prompt & (ending > 0) & (self._ending_at == 0)
        temperature = torch.where(completes, self._turn_temperature[row], self._temperature[row])
        drawn = self._draw(self._tokens[row, position], position, temperature, self._seed_keys[row], context_bound)

        n_ending = self._ending_length[ending]
        is_full = position + 1 + n_ending >= limits.prompt_tokens
        before = self._tokens[row, (position - 1).clamp_min(0)]
        last = torch.stack((before, self._tokens[row, position], drawn), dim=1)
        begins_ending = completes & (position > 0) & (last == self._ending_starts[ending]).all(1)
        turn_ends = completes & ~begins_ending & (self._ends_turn[drawn] | is_full)
        in_ending = turn_ends | (~in_prompt & (self._ending_at > 0) & (self._ending_at < n_ending))
        answers = ~(in_prompt | in_ending | (completes & ~turn_ends))
        after = (position + 1).clamp_max(limits.tokens - 1)
        fixed = torch.where(in_ending, self._endings[ending, self._ending_at], self._tokens[row, after])
        token = torch.where(in_prompt | in_ending, fixed, drawn)
        self._tokens[row, after] = torch.where(is_empty, 0, token)

        self._answer_start[row] = torch.where(answers & (self._answered == 0), after, self._answer_start[row])
        self._ending_at += in_ending + _START * begins_ending
        self._answered += answers
        ends = answers & ~is_empty & (self._ends_answer[drawn] | (self._answered >= limits.answer_tokens))
        self._length[row] = torch.where(ends, after + 1, self._length[row])
        self._position += 1
        self._deal(ends | is_empty)

    def _draw(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        temperature: torch.Tensor,
        seed_keys: torch.Tensor,
        context_bound: int,
    ) -> torch.Tensor:
        """The target's choice ``[seats]`` for the place after ``position``."""
        target, kernels = self._target, self._target.kernels
        frequencies = target.rope.frequencies(lambda: position[:, None], torch.zeros_like(position))
        placement = kernels.place_rows(
            position, self._origin, None, self._block_table, PAGE_TOKENS, frequencies, target.rope.scale
        )
        attention = kernels.tree_attention(
            self._block_table, position, self._origin, self._sees_itself, PAGE_TOKENS, context_bound, None, target.dtype
        )
        hidden = target.forward(token[:, None], Pass(placement, attention), self._cache)
        nothing = torch.zeros_like(temperature)
        sampling = SamplingTensors(
            temperature=temperature,
            top_k=torch.zeros_like(position),
            top_p=nothing + 1,
            min_p=nothing,
            repetition=nothing + 1,
            presence=nothing,
            frequency=nothing,
            seed_keys=seed_keys,
            output_counts=None,
            in_prompt=None,
            any_sampled=True,
            any_filtered=False,
        )
        chosen: torch.Tensor = kernels.choose(target.logits(hidden.last), sampling, root_only(token), position)[:, 0]
        return chosen

    def _deal(self, is_free: torch.Tensor) -> None:
        """Give free seats the next conversations of the ring, as far as it is filled."""
        number = self._dealt + is_free.cumsum(0) - 1
        gets = is_free & (number < self._filled)
        self._dealt += gets.sum()
        row = torch.where(gets, number % self._ring_rows, torch.where(is_free, self._ring_rows, self._row))
        self._row.copy_(row)
        for of_seat in (self._position, self._ending_at, self._answered):
            of_seat.masked_fill_(is_free, 0)

    def _capture(self) -> None:
        """Record a step. The steps before it are idle ones: the ring is filled for none of them."""
        filled = self._filled.clone()
        self._filled.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._step(self._limits.tokens)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(self._limits.tokens)
        self._filled.copy_(filled)
