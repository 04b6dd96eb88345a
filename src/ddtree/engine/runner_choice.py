"""Which runner an engine gets: CUDA graphs where they run, one operation after another elsewhere."""

from collections.abc import Callable

from ddtree.engine.graph_limit import GraphLimit
from ddtree.engine.graph_probe import find_limit
from ddtree.engine.graph_runner import GraphRunner
from ddtree.engine.loading import Graphs
from ddtree.engine.runner import EagerRunner, Runner
from ddtree.engine.speculation import MAX_BUDGET
from ddtree.engine.state import DeviceState
from ddtree.kernels.fast_set import why_not_fast
from ddtree.kernels.kernel_set import TWINS
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target


def choose_runner(
    state: DeviceState,
    target: Target,
    drafter: Drafter | None,
    max_batch: int,
    graphs: Graphs,
    tell: Callable[[str, float], None],
) -> Runner:
    """The fastest runner that works here; one without graphs knows the reason.

    Args:
        max_batch: sequences of a round at most.
        graphs: see `Engine.load`.
        tell: told what is tried.
    """
    why_not = "plain torch kernels" if target.kernels is TWINS else why_not_fast(target.device)
    if why_not or graphs == "off":
        return EagerRunner(state, target, drafter, why_not or "switched off")
    limit = GraphLimit(MAX_BUDGET)
    if graphs == "probe":
        config = drafter.config if drafter else None
        limit = find_limit(target.config, config, target.dtype, MAX_BUDGET, tell, exact=target.kernels.is_exact)
    if limit.budget is None:
        return EagerRunner(state, target, drafter, limit.reason)
    buckets = tuple(sorted({*(2**i for i in range(7) if 2**i < max_batch), max_batch}))
    return GraphRunner(state, target, drafter, buckets, limit)
