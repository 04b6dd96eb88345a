import sys

sys.path.insert(0, "benchmarks")
import torch, kernels_h200 as kb
from ddtree.kernels.tree_attention_triton import TreeAttention as T

names = {}
for cfg in [
    (264, 64, 64, 4, 2),
    (264, 64, 64, 4, 3),
    (132, 64, 64, 4, 3),
    (264, 64, 32, 4, 3),
    (264, 32, 64, 4, 3),
    (264, 128, 64, 8, 3),
    (528, 64, 64, 4, 3),
    (264, 64, 128, 4, 2),
]:
    T.programs, T.tile_rows, T.tile_keys, T.warps, T.stages = cfg
    row = []
    for name, launch, moved in kb.attention_rows():
        try:
            row.append(f"{kb.graph_us(launch, 16, 7):.1f}")
        except Exception as e:
            row.append(type(e).__name__)
    print(cfg, *row, flush=True)
