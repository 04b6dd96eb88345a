"""All that a GPU would otherwise set up at the first request of a kind: graphs by batch size, draft and sampling.

Only where rounds run as graphs is there anything to set up ahead. What requests ask for beyond this (filters,
penalties, log-probabilities, drafts of their own) is captured when it is first needed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ddtree.engine.groups import MAX_PREFILL_ROWS, auto_shapes
from ddtree.engine.prefill import PrefillKind
from ddtree.engine.runner import Runner
from ddtree.engine.scheduler import Scheduler
from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.errors import UserError

SAMPLINGS = (SamplingFlags(), SamplingFlags(any_sampled=True))
"""The most likely token, and plain sampling, which is what OpenAI's clients ask for by default."""


@dataclass(frozen=True)
class WarmUp:
    """Sets a runner up for every batch size.

    Args:
        shape: how requests draft unless they say otherwise.
        prefill_tokens: prompt tokens that a sequence commits between two rounds.
    """

    scheduler: Scheduler
    runner: Runner
    state: DeviceState
    shape: DraftShape
    max_batch: int
    prefill_tokens: int

    def run(self, tell: Callable[[str, float], None]) -> None:
        """Do it, telling how far it is.

        Raises:
            UserError: there is not enough memory.
        """
        steps = list(self._steps())
        for number, (what, step) in enumerate(steps):
            tell(f"capturing {what}", number / len(steps))
            try:
                step()
            except torch.OutOfMemoryError:
                raise UserError(
                    f"the GPU has no memory left for {what}", "lower the memory fraction, or max_batch"
                ) from None

    def _steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        buckets = sorted({self.runner.bucket_of(batch) for batch in range(1, self.max_batch + 1)})
        for bucket in buckets:
            for flags in SAMPLINGS:
                for shape in self._round_shapes(bucket):
                    yield f"rounds of a batch of {bucket}", partial(self._round, bucket, shape, flags)
        for rows in self._prefill_sizes():
            widest = self.runner.bucket_of(min(max(MAX_PREFILL_ROWS // rows, 1), self.max_batch))
            for bucket in (b for b in buckets if b <= widest):
                for flags in SAMPLINGS:
                    for is_last in (True, False) if rows >= self.prefill_tokens else (True,):
                        kind = PrefillKind(is_last, drafts=self.shape.budget > 0, flags=flags)
                        chunk = min(rows, self.prefill_tokens)
                        yield f"prompts of a batch of {bucket}", partial(self._prefill, bucket, chunk, kind)

    def _round_shapes(self, bucket: int) -> list[DraftShape]:
        if not self.shape.is_auto:
            return [self.shape]
        return auto_shapes(bucket, self.shape)

    def _prefill_sizes(self) -> list[int]:
        return sorted({self.runner.prefill_rows(rows) for rows in range(1, self.prefill_tokens + 1)})

    def _round(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> None:
        if self.shape.is_auto:
            self.scheduler.learn_costs(bucket, self.shape, flags)
        self.runner.measure(bucket, shape, flags)

    def _prefill(self, bucket: int, rows: int, kind: PrefillKind) -> None:
        self.runner.prefill([self.state.spare_slot] * bucket, [[0] * rows] * bucket, kind, 1)
