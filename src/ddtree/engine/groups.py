"""Which sequences run together: those that are alike, in parts that one launch can take."""

from ddtree.engine.budget_policy import CANDIDATES, auto_shape
from ddtree.engine.runner import Runner
from ddtree.engine.sequence import Sequence
from ddtree.engine.speculation import DraftShape

MAX_ROUND_ROWS = 2048
"""Rows that one round verifies at most, all sequences together; larger groups take turns."""

MAX_PREFILL_ROWS = 1024
"""Prompt rows of one prefill at most, all sequences together."""


def fitting_budgets(bucket: int, largest: int) -> list[int]:
    """Budgets up to ``largest`` that `auto` can choose for a batch of this size."""
    return [budget for budget in CANDIDATES if bucket * (budget + 1) <= MAX_ROUND_ROWS and budget <= largest]


def auto_shapes(bucket: int, wish: DraftShape) -> list[DraftShape]:
    """Shapes that rounds of a batch of this size can take where ``wish`` leaves the budget to the policy."""
    return [auto_shape(budget, wish.top_k) for budget in fitting_budgets(bucket, wish.budget)]


def prefill_groups(
    prefilling: list[Sequence], prefill_tokens: int, runner: Runner, split: Runner
) -> list[list[Sequence]]:
    """Sequences whose next chunks run in one launch: they end alike, draft alike and are constrained alike.

    Args:
        prefill_tokens: prompt tokens of a chunk at most.
        runner: runs the chunks; ``split`` those of sequences under a constraint.
    """
    by_kind: dict[tuple[bool, bool, bool], list[tuple[int, Sequence]]] = {}
    for sequence in prefilling:
        left = len(sequence.prompt) - sequence.prefilled
        rows, is_constrained = min(left, prefill_tokens), sequence.constraint is not None
        filled = (split if is_constrained else runner).prefill_rows(rows)
        kind = rows == left, sequence.shape.budget > 0, is_constrained
        by_kind.setdefault(kind, []).append((filled, sequence))
    return [
        [sequence for _, sequence in launch]
        for (_, _, is_constrained), chunks in by_kind.items()
        for launch in _prefill_launches(chunks, split if is_constrained else runner)
    ]


def _prefill_launches(chunks: list[tuple[int, Sequence]], runner: Runner) -> list[list[tuple[int, Sequence]]]:
    """Chunks of ``(rows, sequence)`` that share a launch.

    A launch of four prompts takes little longer than that of one, so smaller chunks join larger ones where chunks can
    be filled up, as long as no more than half of its rows are filling.
    """
    launches: list[list[tuple[int, Sequence]]] = []
    for chunk in sorted(chunks, key=lambda chunk: -chunk[0]):
        last = launches[-1] if launches else []
        most = last[0][0] if last else 0
        rows = most * runner.bucket_of(len(last) + 1) if last else 0
        is_alike = chunk[0] == most
        is_worth_it = runner.fills_up and rows <= 2 * (sum(filled for filled, _ in last) + chunk[0])
        if last and (is_alike or is_worth_it) and most * (len(last) + 1) <= MAX_PREFILL_ROWS:
            last.append(chunk)
        else:
            launches.append([chunk])
    return launches


def round_groups(decoding: list[Sequence]) -> list[tuple[DraftShape, list[Sequence]]]:
    """Sequences that draft alike and are constrained alike, in parts that a round can verify."""
    by_shape: dict[tuple[DraftShape, bool], list[Sequence]] = {}
    for sequence in decoding:
        by_shape.setdefault((sequence.shape, sequence.constraint is not None), []).append(sequence)
    return [
        (shape, part)
        for (shape, _), group in by_shape.items()
        for part in _parts(group, MAX_ROUND_ROWS // (1 if shape.is_auto else shape.rows))
    ]


def is_constrained(group: list[Sequence]) -> bool:
    """Whether the sequences of a group, all of them or none, are under a constraint."""
    return group[0].constraint is not None


def _parts(group: list[Sequence], size: int) -> list[list[Sequence]]:
    size = max(size, 1)
    return [group[i : i + size] for i in range(0, len(group), size)]
