"""What attention reads of trees: as SGLang's own backend works it out of the mask, and by the definition."""

import ast
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddtree.sglang.tree_tables import TreeTables, why_not, write_tree_tables
from ddtree.sglang.verify_mask import mask_elements, write_verify_mask
from devices import DEVICE, needs_triton
from random_trees import random_trees
from sglang_sources import sglang_source

METHOD = "_apply_cuda_graph_metadata"


def build_page_table(*, req_to_token, req_pool_indices, cache_seqlens, page_table, page_size) -> None:
    """As SGLang's kernel of that name does on a GPU."""
    for row, request in enumerate(req_pool_indices.tolist()):
        pages = -(-int(cache_seqlens[row]) // page_size)
        page_table[row, :pages] = req_to_token[request, : pages * page_size : page_size] // page_size


class FlashAttentionBackend:
    """SGLang's buffers of that class, for graphs of up to 4 sequences."""

    page_size, topk, has_swa, use_sliding_window_kv_pool = 1, 2, False, False

    def __init__(self, width: int, page_size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.page_size, self.speculative_num_draft_tokens, self.max_context_len = page_size, width, 128
        pages = torch.randperm(900, generator=generator)[: 6 * 128 // page_size].view(6, -1)
        self.req_to_token = (pages[:, :, None] * page_size + torch.arange(page_size)).view(6, 128).int()
        self.target_verify_metadata_topk_normal, self.target_verify_metadata_topk_expand = {}, {}
        for size in range(1, 5):
            self.target_verify_metadata_topk_normal[size] = self._metadata(size, 128)
            self.target_verify_metadata_topk_expand[size] = self._metadata(size * width, width)

    @staticmethod
    def _metadata(rows: int, columns: int) -> SimpleNamespace:
        zeros = {"dtype": torch.int32}
        return SimpleNamespace(
            cache_seqlens_int32=torch.zeros(rows, **zeros), cu_seqlens_k=torch.zeros(rows + 1, **zeros),
            page_table=torch.zeros(rows, columns, **zeros), max_seq_len_k=0,
        )  # fmt: skip


def backend_of(version: str, width: int, page_size: int) -> Any:
    """The class above with the released method in it."""
    source = (sglang_source(version) / "sglang/srt/layers/attention/flashattention_backend.py").read_text()
    (cls,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "FlashAttentionBackend")
    (method,) = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == METHOD)
    module = ModuleType(f"sglang_{version}")
    vars(module).update(torch=torch, build_trtllm_mha_page_table=build_page_table)
    exec("from __future__ import annotations\n" + ast.unparse(method), vars(module))
    sys.modules[module.__name__] = module
    found = type("FlashAttentionBackend", (FlashAttentionBackend,), {METHOD: vars(module)[METHOD]})
    found.__module__ = module.__name__
    return found(width, page_size)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("version", ["0.5.16", "0.5.17", "0.5.18"])
def test_tables_are_those_that_sglang_works_out_of_the_mask(version: str, page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    for _ in range(20):
        batch, budget = int(rng.integers(1, 5)), int(rng.integers(1, 20))
        width, size = budget + 1, int(rng.integers(batch, 5))
        tree, _ = random_trees(rng, batch, budget, 5, 4)
        theirs, ours = (backend_of(version, width, page_size) for _ in range(2))
        lengths = torch.ones(size, dtype=torch.int64)
        lengths[:batch] = torch.from_numpy(rng.integers(1, 60, batch))
        requests = torch.zeros(size, dtype=torch.int64)
        requests[:batch] = torch.from_numpy(rng.permutation(6)[:batch])
        mask = torch.ones(mask_elements(width, int(lengths.sum()), size) + 99, dtype=torch.bool)
        write_verify_mask(tree.ancestors, lengths[:batch], mask)
        given = {
            "bs": size, "req_pool_indices": requests, "seq_lens": lengths, "seq_lens_sum": None, "encoder_lens": None,
            "forward_mode": SimpleNamespace(is_decode_or_idle=lambda: False, is_target_verify=lambda: True),
            "spec_info": SimpleNamespace(custom_mask=mask, positions=torch.zeros(batch * width)),
            "seq_lens_cpu": None, "out_cache_loc": None,
        }  # fmt: skip
        theirs._apply_cuda_graph_metadata(**given)
        assert why_not(ours) is None
        columns = lengths[:batch, None] + torch.arange(width + 3)
        slots = ours.req_to_token[requests[:batch, None], columns].long()
        with TreeTables(ours, write_tree_tables).of(tree, slots):
            ours._apply_cuda_graph_metadata(**given)
        want, got = theirs.forward_metadata, ours.forward_metadata
        for name in ("cache_seqlens_int32", "cu_seqlens_k", "page_table"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert got.max_seq_len_k == want.max_seq_len_k
        want, got = (b.forward_metadata_spec_decode_expand for b in (theirs, ours))
        real = batch * width
        assert torch.equal(got.page_table[:real], want.page_table[:real])
        assert torch.equal(got.cache_seqlens_int32[:real], want.cache_seqlens_int32[:real])
        assert torch.equal(got.cu_seqlens_k[: real + 1], want.cu_seqlens_k[: real + 1])
        assert (got.cache_seqlens_int32[real:] == 1).all(), "a padded row that sees nothing makes NaN"


def test_what_is_not_a_tree_of_ours_goes_through(caplog) -> None:
    """Captures, draft passes and a pass whose trees were not told, which is said once; trees are of one pass."""
    backend, asked = backend_of("0.5.16", 5, 1), []
    backend._apply_cuda_graph_metadata = lambda **given: asked.append(given)
    tables = TreeTables(backend, write_tree_tables)
    verify, decode = (SimpleNamespace(is_target_verify=lambda v=v: v) for v in (True, False))
    tree, _ = random_trees(np.random.default_rng(1), 1, 4, 3, 3)
    given = {"bs": 1, "seq_lens": torch.ones(1), "req_pool_indices": torch.zeros(1, dtype=torch.int64)}
    with tables.of(tree, torch.arange(5)[None]):
        backend._apply_cuda_graph_metadata(forward_mode=decode)
        assert len(asked) == 1
        backend._apply_cuda_graph_metadata(forward_mode=verify, **given)
        assert len(asked) == 1 and backend.forward_metadata_spec_decode_expand.page_table[0, 0] == 0
        assert not caplog.records
        backend._apply_cuda_graph_metadata(forward_mode=verify, **given)
    with tables.of(tree, torch.arange(5)[None]):
        pass  # a pass without a graph
    for _ in range(2):
        backend._apply_cuda_graph_metadata(forward_mode=verify, **given)
    assert len(asked) == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "without its trees" in caplog.text


def test_other_backends_and_releases_keep_their_way() -> None:
    assert "SimpleNamespace is not" in str(why_not(SimpleNamespace()))
    backend = backend_of("0.5.16", 5, 1)
    assert why_not(backend) is None
    for name, value in (("topk", 1), ("has_swa", True)):
        setattr(backend, name, value)
        assert why_not(backend) is not None
        delattr(backend, name)
    assert "another way" in str(why_not(backend_of("0.5.23", 5, 1)))


@needs_triton
def test_the_fast_kernel_equals_its_twin() -> None:
    from ddtree.sglang.tree_tables_triton import write_tree_tables as fast

    rng = np.random.default_rng(8)
    for _ in range(8):
        batch, budget = int(rng.integers(1, 5)), int(rng.integers(1, 40))
        width = budget + 1
        tree, _ = random_trees(rng, batch, budget, 6, 5)
        slots = torch.from_numpy(rng.permutation(900)[: batch * (width + 2)].reshape(batch, width + 2)).to(DEVICE)
        made = []
        for write in (write_tree_tables, fast):
            table = torch.full((batch * width + 3, width), -1, dtype=torch.int32, device=DEVICE)
            lengths = torch.zeros(batch * width + 3, dtype=torch.int32, device=DEVICE)
            write(slots, tree.ancestors.to(DEVICE), table, lengths)
            made.append((table, lengths))
        assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])


def test_a_row_sees_its_ancestors_in_order() -> None:
    """By hand: a root with two children, the second of which has a child."""
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)[None]
    table, lengths = torch.zeros(5, 4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    write_tree_tables(torch.tensor([[7, 5, 9, 3, 8]]), ancestors, table, lengths)
    assert table.tolist() == [[7, 5, 9, 3], [7, 5, 9, 3], [7, 9, 5, 3], [7, 9, 3, 5], [0, 0, 0, 0]]
    assert lengths.tolist() == [1, 2, 2, 3, 1]
