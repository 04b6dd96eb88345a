"""Device-resident state of all sequences in flight."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ddtree.engine.sampling_params import SamplingParams
from ddtree.engine.speculation import MAX_BUDGET
from ddtree.kernels.choose import SamplingTensors
from ddtree.kernels.noise import seed_key
from ddtree.kernels.paged import TRASH_PAGE
from ddtree.kernels.seats import Seats
from ddtree.kernels.sharpness import sharpness_of
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target
from ddtree.models.target_config import LayerShape

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_MORE_NUMBERS = 2
"""The sharpness of a request's drafts, and nothing: pairs of float32 travel as int64."""


@dataclass(frozen=True)
class SamplingFlags:
    """What the sequences of a round need of sampling; picks the work that is done at all."""

    any_sampled: bool = False
    any_filtered: bool = False
    any_penalised: bool = False
    any_biased: bool = False
    any_logprobs: bool = False

    @property
    def any_chosen_otherwise(self) -> bool:
        """Whether some sequence chooses otherwise than by the plain argmax."""
        return self.any_sampled or self.any_penalised or self.any_biased

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> "SamplingFlags":
        all_params = list(params)
        return cls(
            any_sampled=any(p.temperature > 0 for p in all_params),
            any_filtered=any(p.temperature > 0 and p.filters for p in all_params),
            any_penalised=any(p.penalises for p in all_params),
            any_biased=any(p.logit_bias for p in all_params),
            any_logprobs=any(p.logprobs is not None for p in all_params),
        )


@dataclass(frozen=True)
class Batch(Seats):
    """The sequences of one round, as rows of the state.

    Attributes:
        slots: int64 ``[batch]``, rows of `DeviceState`.
        sampling: how each sequence chooses; None where all take the argmax.
        tells_logprobs: the host wants log-probabilities along with the tokens.
        context_bound: no sequence has committed more than this (known to the host).
    """

    slots: torch.Tensor
    sampling: SamplingTensors | None
    tells_logprobs: bool
    context_bound: int


class DeviceState:
    """Tensors with one row per slot; a slot is a sequence's seat in the engine.

    Args:
        target: the target model.
        drafter: its drafter, or None.
        slots: sequences that can be seated.
        n_pages: pages of the cache, the trash page included.
        page_tokens: tokens a page holds.
        table_pages: pages that one sequence can own.
        max_model_len: a sequence has at most so many tokens.
        draft_window: the drafter sees only so many of the last committed tokens; None for all.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        slots: int,
        n_pages: int,
        page_tokens: int,
        table_pages: int,
        max_model_len: int,
        draft_window: int | None,
    ) -> None:
        device, self._take_seats = target.device, target.kernels.take_seats
        self.page_tokens, self.max_model_len, self.vocab_size = page_tokens, max_model_len, target.config.vocab_size
        self.draft_window = draft_window
        self.target_cache = _cache(target.config.n_layers, n_pages * page_tokens, target.config.layer, target)

        def per_slot(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self._row_numbers = torch.arange(max(table_pages * page_tokens, MAX_BUDGET + 1), device=device)
        self.block_table = per_slot(torch.int64, table_pages)
        self.roots = per_slot(torch.int64)
        self._counts = torch.zeros(4, slots, dtype=torch.int64, device=device)
        self.committed, self.prompt_tokens, self.pending_taps, self.top_k = self._counts.unbind()
        self._draft_temperature = drafter.config.draft_temperature if drafter is not None else 1.0
        self._numbers = torch.zeros(len(_NUMBERS) + _MORE_NUMBERS, slots, device=device)
        self._sampling_numbers, self._sharpness = self._numbers[: len(_NUMBERS)], self._numbers[len(_NUMBERS)]
        self._sharpness.fill_(1.0)  # of slots that nobody has taken
        self.seed_keys = per_slot(torch.int32)
        self._output_counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None
        self._logit_bias: torch.Tensor | None = None
        self.drafter_cache: torch.Tensor | None = None
        if drafter is not None:
            n_taps = len(drafter.config.tap_layers)
            self.drafter_cache = _cache(drafter.config.n_layers, n_pages * page_tokens, drafter.config.layer, target)
            # Taps of the last round's accepted path; they are injected when the next round begins.
            self.taps = torch.zeros(
                slots,
                drafter.config.block_size,
                n_taps * target.config.layer.hidden_size,
                dtype=target.dtype,
                device=device,
            )
            self._both_ways = torch.ones((drafter.config.block_size,) * 2, dtype=torch.bool, device=device)

    def on_device(self, values: Seq[int] | Seq[Seq[int]]) -> torch.Tensor:
        """int64 numbers of the host, copied without waiting for the device."""
        return self._sent(torch.tensor(values, dtype=torch.int64))

    def _sent(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.committed.device.type == "cuda":
            return numbers.pin_memory().to(self.committed.device, non_blocking=True)
        return numbers

    def seat(
        self, slot: int, prompt: Seq[int], pages: Seq[int], params: SamplingParams, seed: int, committed: int = 0
    ) -> None:
        """Give a slot to a new sequence, whose first ``committed`` tokens are in its pages already."""
        n = self.block_table.shape[1]
        counts = [committed, len(prompt), 0, min(params.top_k, self.vocab_size)]
        row = [*pages, *[TRASH_PAGE] * (n - len(pages)), *counts, seed_key(seed)]
        sharpness = sharpness_of(self._draft_temperature, 0.0 if params.top_k == 1 else params.temperature)
        numbers = torch.tensor([*(getattr(params, name) for name in _NUMBERS), sharpness, 0.0], dtype=torch.float32)
        # All in one copy, the numbers bit for bit: with many sequences the host's time to seat one is what counts.
        told = self._sent(torch.cat((torch.tensor(row, dtype=torch.int64), numbers.view(torch.int64))))
        self.block_table[slot], self._counts[:, slot] = told[:n], told[n : n + 4]
        self.seed_keys[slot] = told[n + 4]
        self._numbers[:, slot] = told[n + 5 :].view(torch.float32)
        if params.penalises and self._output_counts is None:
            shape = (self.committed.shape[0], self.vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self.committed.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.committed.device)
        if self._output_counts is not None and self._in_prompt is not None:
            self._output_counts[slot] = 0
            self._in_prompt[slot] = False
            self._in_prompt[slot, self.on_device(prompt)] = True
        if params.logit_bias and self._logit_bias is None:
            shape = (self.committed.shape[0], self.vocab_size)
            self._logit_bias = torch.zeros(shape, device=self.committed.device)
        if self._logit_bias is not None:
            self._logit_bias[slot] = 0
            if params.logit_bias:
                values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
                places = self.on_device(list(params.logit_bias))
                self._logit_bias[slot, places] = self._sent(values)

    def row_numbers(self, batch: int, rows: int) -> torch.Tensor:
        """int64 ``[batch, rows]``: 0, 1, 2 ... in every row, as a view of one tensor."""
        return self._row_numbers[:rows].expand(batch, -1)

    @property
    def spare_slot(self) -> int:
        """The last slot, which belongs to no sequence and fills up batches."""
        return self.committed.shape[0] - 1

    def block_sees(self, batch: int) -> torch.Tensor:
        """bool ``[batch, block_size, block_size]``: every row of a drafter's block sees every other."""
        return self._both_ways.expand(batch, -1, -1)

    def select(self, slots: torch.Tensor, flags: SamplingFlags, context_bound: int) -> Batch:
        """The round's view of some slots, int64 ``[batch]``; the spare slot is emptied."""
        seats = self._take_seats(
            slots, self.block_table, self.committed, self.roots, self.prompt_tokens, self.pending_taps,
            self._sharpness, self.max_model_len,
        )  # fmt: skip
        return Batch(
            **vars(seats),
            slots=slots,
            sampling=self._sampling(slots, flags) if flags.any_chosen_otherwise else None,
            tells_logprobs=flags.any_logprobs,
            context_bound=context_bound,
        )

    def _sampling(self, slots: torch.Tensor, flags: SamplingFlags) -> SamplingTensors:
        counts, in_prompt = None, None
        if flags.any_penalised and self._output_counts is not None and self._in_prompt is not None:
            counts, in_prompt = self._output_counts[slots], self._in_prompt[slots]
        temperature, top_p, min_p, repetition, presence, frequency = self._sampling_numbers[:, slots].unbind()
        return SamplingTensors(
            temperature=temperature,
            top_k=self.top_k[slots],
            top_p=top_p,
            min_p=min_p,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            seed_keys=self.seed_keys[slots],
            output_counts=counts,
            in_prompt=in_prompt,
            logit_bias=self._logit_bias[slots] if flags.any_biased and self._logit_bias is not None else None,
            any_sampled=flags.any_sampled,
            any_filtered=flags.any_filtered,
        )

    def count_tokens(self, slots: torch.Tensor, tokens: torch.Tensor, valid: Callable[[], torch.Tensor]) -> None:
        """Add generated tokens to the counts that penalties read.

        Args:
            slots: int64 ``[batch]``.
            tokens: int64 ``[batch, n]``.
            valid: gives bool ``[batch, n]``; called only where somebody counts.
        """
        if self._output_counts is not None:
            places = slots[:, None] * self.vocab_size + tokens
            self._output_counts.view(-1).scatter_add_(0, places.flatten(), valid().int().flatten())


def _cache(n_layers: int, n_slots: int, shape: LayerShape, target: Target) -> torch.Tensor:
    return torch.zeros(n_layers, 2, n_slots, shape.n_kv_heads, shape.head_dim, dtype=target.dtype, device=target.device)
