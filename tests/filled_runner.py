"""A runner for the CPU that fills prompt chunks up to one length, as graphs do."""

from ddtree.engine.prefill import prefill_chunk
from ddtree.engine.runner import EagerRunner

ROWS = 32


class FilledRunner(EagerRunner):
    """Fills every chunk up to 32 rows with a token that must leave no trace.

    Attributes:
        batches: how many chunks each prefill had.
    """

    fills_up = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.batches = []

    def prefill_rows(self, rows):
        return ROWS

    def prefill(self, slots, chunks, kind, context_bound, constraints=()):
        self.batches.append(len(chunks))
        tokens = self._state.on_device([chunk + [9] * (ROWS - len(chunk)) for chunk in chunks])
        valid = self._state.on_device([len(chunk) for chunk in chunks])
        batch = self._state.select(self._state.on_device(slots), kind.flags, context_bound)
        drafter = self._drafter if kind.drafts else None
        return prefill_chunk(self._state, batch, self._target, drafter, tokens, kind.is_last, (), valid)
