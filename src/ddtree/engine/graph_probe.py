"""Does a captured round of this width run here? Asked of a child process, since a CUDA fault kills its context.

The child builds two layers of the models' shapes with random weights, captures a round of the asked budget and replays
it. What it finds is kept in the user's cache folder for this device, these versions and these shapes, so that only the
first start pays for it.
"""

import hashlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddtree.disk import write_whole
from ddtree.engine.graph_limit import GraphLimit
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.target_config import TargetConfig
from ddtree.user_cache import cache_folder

WIDTHS = (1024, 128, 64, 32, 16, 9, 8, 4, 1, 0)
"""Budgets that are probed, largest first; 0 is plain decoding."""

PROBE_LAYERS = 2
TIMEOUT_S = 300


@dataclass(frozen=True)
class ProbeRequest:
    """What a child tries.

    Attributes:
        fault_above: a planted fault, to test the probe with: rounds of a larger budget make an illegal access.
        exact: the target runs on exact kernels.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    dtype: str
    budget: int
    fault_above: int | None = None
    exact: bool = False


def find_limit(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    dtype: torch.dtype,
    wanted: int,
    tell: Callable[[str, float], None],
    fault_above: int | None = None,
    exact: bool = False,
) -> GraphLimit:
    """The largest budget up to ``wanted`` that a child process could capture and replay."""
    remembered, shortened = _recall(), _shortened(target, drafter)
    reason = ""
    for budget in [wanted, *(width for width in WIDTHS if width < wanted)]:
        if drafter is None and budget:
            continue
        request = ProbeRequest(*shortened, str(dtype), budget, fault_above, exact)
        key = _key(request)
        if key not in remembered:
            tell(f"trying a captured round of {budget} nodes", 0.0)
            remembered[key] = _ask(request)
            _remember(remembered)
        if not remembered[key]:
            return GraphLimit(budget, reason)
        reason = reason or f"capturing a round of {budget} nodes failed here ({remembered[key]})"
    return GraphLimit(None, reason)


def _shortened(target: TargetConfig, drafter: DrafterConfig | None) -> tuple[TargetConfig, DrafterConfig | None]:
    """Both with few layers, as many taps as before: the kernels of a layer are tried, not the number of layers."""
    n = min(PROBE_LAYERS, target.n_layers)
    target = replace(target, n_layers=n, sliding_windows=target.sliding_windows[-n:])
    if drafter is None:
        return target, None
    n = min(PROBE_LAYERS, drafter.n_layers)
    taps = (0,) * len(drafter.tap_layers)
    return target, replace(drafter, n_layers=n, sliding_windows=drafter.sliding_windows[-n:], tap_layers=taps)


def _ask(request: ProbeRequest) -> str:
    """Run a child; empty where all went well, else how it ended."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "ddtree.engine.graph_probe"],
            input=pickle.dumps(request),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT_S} s"
    if child.returncode == 0:
        return ""
    lines = [line for line in child.stderr.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit code {child.returncode}"])[-1].strip()[:200]


def _key(request: ProbeRequest) -> str:
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    sources = sorted(Path(__file__).parents[1].glob("kernels/**/*.[pc][yu]"))
    kernels = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    facts = (device.name, device.major, device.minor, torch.__version__, torch.version.cuda, kernels, repr(request))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _recall() -> dict[str, str]:
    try:
        found = json.loads((cache_folder() / "graph-probes.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(probes: dict[str, str]) -> None:
    try:
        path = cache_folder() / "graph-probes.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(probes))
    except OSError:
        return  # the next start asks again


def _try(request: ProbeRequest) -> None:
    """In the child: capture and replay."""
    from ddtree.engine.graph_runner import GraphKey, GraphRunner
    from ddtree.engine.speculation import DraftShape
    from ddtree.engine.state import DeviceState, SamplingFlags
    from ddtree.kernels.exact_set import exact_set
    from ddtree.kernels.fast_set import FAST
    from ddtree.models.dummy import dummy_drafter, dummy_target

    kernels = FAST
    if request.fault_above is not None and request.budget > request.fault_above:
        kernels = replace(FAST, walk_tree=_faulting)
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = getattr(torch, request.dtype.removeprefix("torch."))
    target = dummy_target(request.target, dtype, device, exact_set(kernels) if request.exact else kernels)
    drafter = dummy_drafter(request.drafter, target, kernels) if request.drafter else None
    state = DeviceState(
        target, drafter, slots=2, n_pages=4, page_tokens=16, table_pages=128, max_model_len=64, draft_window=None
    )  # fmt: skip
    shape = DraftShape("tree" if request.budget else "ar", request.budget, min(request.budget, 64))
    runner = GraphRunner(state, target, drafter, (1,))
    captured = runner.capture(GraphKey(1, shape, SamplingFlags()))
    for _ in range(3):
        captured.graph.replay()
    torch.cuda.synchronize()


def _faulting(*arguments: object) -> object:
    """A walk with a planted fault: reads far outside of memory, which leaves the context unusable."""
    from ddtree.kernels.fast_set import FAST

    torch.zeros(4, device="cuda")[torch.full((1,), 1 << 40, device="cuda")]
    return FAST.walk_tree(*arguments)


if __name__ == "__main__":
    _try(pickle.loads(sys.stdin.buffer.read()))
