"""Published shapes that the engine is measured with, random weights in place of the checkpoints."""

from dataclasses import replace
from typing import Any

import torch

from ddtree import Engine, Speculation
from ddtree.engine.sampling_params import SamplingParams
from ddtree.kernels.fast_set import FAST
from ddtree.kernels.kernel_set import KernelSet
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.models.drafter_config import DrafterConfig, default_tap_layers
from ddtree.models.dummy import DummyTokenizer, dummy_drafter, dummy_target
from ddtree.models.rope import RopeSettings
from ddtree.models.target_config import LayerShape, TargetConfig


def pair(
    family: str, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, layers: int, vocab: int, tied: bool
) -> tuple[TargetConfig, DrafterConfig]:
    """A dense target of a family and a DFlash drafter of 5 layers of the same width, with Qwen3's norms of heads."""
    shape = LayerShape(hidden, inner, heads, kv_heads, head_dim, 1e-6, False, False, False, family == "qwen3")
    rope = RopeSettings("default", 1e6, head_dim, 40960, {})
    target = TargetConfig(
        family, vocab, layers, shape, rope, tied, (None,) * layers, 40960, None, (), "bfloat16", ()
    )  # fmt: skip
    drafter = DrafterConfig(
        vocab, 5, replace(shape, qk_norm=True), rope, 16, vocab - 267, default_tap_layers(layers, 5), False,
        (None,) * 5, "bidirectional", 40960, 1.0, (),
    )  # fmt: skip
    return target, drafter


SHAPES = {
    "Qwen3-8B": pair("qwen3", 4096, 12288, 32, 8, 128, 36, 151936, tied=False),
    "Qwen3-4B": pair("qwen3", 2560, 9728, 32, 8, 128, 36, 151936, tied=True),
    "SmolLM2-135M": pair("llama", 576, 1536, 9, 3, 64, 30, 49152, tied=True),
}


def simulate_slowly(real: torch.Tensor, tree: TreeTensors, accepted: int, vocab: int) -> torch.Tensor:
    """See `simulated_choice_triton.simulate` (slow twin)."""
    row = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    is_child = (tree.parents[:, None, :] == row[:, None]) & (row > 0) & tree.alive[:, None, :]
    best = is_child.int().argmax(-1)
    wanted = is_child.any(-1) & (tree.depths < accepted)
    return torch.where(wanted, tree.tokens.gather(1, best), (real + 1) % vocab)


def simulated_choice(accepted: int, kernels: KernelSet = FAST) -> Any:
    """A choice that makes the walk accept ``accepted`` nodes where the tree is that deep: SIMULATED acceptance.

    The real choice is computed as well, so that its time is in the round. Each row's choice becomes the token of its
    best child, down to depth ``accepted``.
    """

    def choose(
        logits: torch.Tensor, sampling: Any, tree: TreeTensors, committed: torch.Tensor, allowed: Any = None
    ) -> torch.Tensor:
        real = kernels.choose(logits, sampling, tree, committed, allowed)
        if tree.tokens.shape[1] == 1:
            return real
        simulate = simulate_slowly
        if real.is_cuda:
            from simulated_choice_triton import simulate
        return simulate(real, tree, accepted, logits.shape[-1])

    return choose


def dummy_engine(
    name: str, *, accepted: int, max_model_len: int = 4096, max_batch: int = 1, kernels: KernelSet = FAST
) -> Engine:
    """An engine of a published shape with random weights and simulated acceptance."""
    target_config, drafter_config = SHAPES[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = replace(kernels, choose=simulated_choice(accepted, kernels))
    target = dummy_target(target_config, torch.bfloat16, device, kernels)
    drafter = dummy_drafter(drafter_config, target, kernels)
    return Engine(
        target, drafter, DummyTokenizer(), speculation=Speculation("tree", 64), draft_window=None,
        max_model_len=max_model_len, memory_fraction=0.5, max_batch=max_batch, prefill_tokens=512,
        graphs="on", identity={"model": f"{name} shape, random weights", "draft": "DFlash shape, random weights"},
    )  # fmt: skip


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True)
