"""The GGUF reader against the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_target import gguf_bytes

from ddtree.demo.gguf import GgufFile


@pytest.mark.parametrize(
    "kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0]
)
def test_tensors_equal_those_of_the_gguf_package(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    weights = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    raw = gguf.quants.quantize(weights, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("first", np.ones(5, np.float32))  # so that the second one does not start at offset 0
    writer.add_tensor("second", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GgufFile((tmp_path / "x.gguf").read_bytes()).tensor("second")
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, kind))


def test_metadata_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    ours = GgufFile(gguf_bytes(tmp_path / "x.gguf"))
    theirs = gguf.GGUFReader(tmp_path / "x.gguf")
    kept = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == kept.keys()
    for key, value in kept.items():
        assert ours.metadata[key] == pytest.approx(value) if isinstance(value, float) else ours.metadata[key] == value
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}


@pytest.mark.parametrize("keep", [0, 3, 20, 200])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match="GGUF"):
        GgufFile(gguf_bytes(tmp_path / "x.gguf")[:keep])


def test_an_unknown_tensor_type_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("half", np.ones(4, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="half has GGUF type 1"):
        GgufFile((tmp_path / "x.gguf").read_bytes()).tensor("half")
