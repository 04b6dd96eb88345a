"""Tensors of a Hugging Face folder, one file or several shards, each taken exactly once."""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from ddtree.errors import UserError
from ddtree.models.config_file import read_json_object

# Buffers that old checkpoints saved although they follow from the config.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


def _shard_names(index: Path) -> list[str]:
    weight_map = read_json_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{index}: weight_map does not give a file for each tensor", "download the file again")
    return sorted(set(names))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, for one
        return False


class Weights:
    """The safetensors of a folder.

    Every tensor must be taken once: what is left at the end is named and refused, since a tensor that is not used is a
    model that is not computed.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        dtype, device: what `take` converts to.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = _shard_names(index)
        else:
            names = ["model.safetensors"]
        self._files = []
        self._where = {}
        for name in names:
            path = folder / name
            if path.parent != folder or not _is_file(path):
                raise UserError(f"{folder} has no {name}", "download the folder again (safetensors files are needed)")
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is damaged ({error})", "download the file again") from None
            self._files.append(file)
            self._where.update(dict.fromkeys(file.keys(), file))
        self._left = {key for key in self._where if not key.endswith(DERIVED_SUFFIXES)}

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._where.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: Iterable[int]) -> torch.Tensor:
        """The tensor ``name``, which must have ``shape``.

        Raises:
            UserError: it is missing, of another shape, or of a packed type.
        """
        if name not in self._where:
            raise UserError(
                f"{self.folder} has no tensor {name}",
                "the checkpoint does not fit its config.json: download both again",
            )
        tensor = self._where[name].get_tensor(name)
        self._left.discard(name)
        if tuple(tensor.shape) != tuple(shape):
            raise UserError(
                f"{self.folder}: {name} is {list(tensor.shape)}, config.json says {list(shape)}",
                "the checkpoint does not fit its config.json: download both again",
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"{self.folder}: {name} holds {str(tensor.dtype).removeprefix('torch.')}",
                "quantised weights are not read: take the bfloat16 checkpoint",
            )
        return tensor.to(device=self.device, dtype=self.dtype)

    def stack(self, names: Iterable[str], rows: Iterable[int], columns: int | None) -> torch.Tensor:
        """Several tensors below each other, for one matrix product in place of several."""
        shapes = [(r,) if columns is None else (r, columns) for r in rows]
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def close(self) -> None:
        """Refuse tensors that nobody took.

        Raises:
            UserError: names what is left.
        """
        if self._left:
            shown = ", ".join(sorted(self._left)[:3]) + (", ..." if len(self._left) > 3 else "")
            raise UserError(
                f"{self.folder} holds {len(self._left)} tensors that config.json does not ask for ({shown})",
                "the checkpoint does not fit its config.json: download both again",
            )
