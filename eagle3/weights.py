"""The safetensors files of a checkpoint: index, headers, sizes and single tensors, without loading the model.

A safetensors file is 8 bytes of header size (little endian), a JSON header that gives each tensor's dtype, shape and
byte range, then the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 4096
MAX_HEADER_BYTES = 100_000_000


class Weights:
    """All tensors of a checkpoint folder by name. Raises RequestError for a folder without a readable index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weight_map = _weight_map(folder)
        # One path a shard: a trillion parameters have 200,000 tensors, and paths are slow to make and to hash.
        shards = {file: folder / file for file in set(weight_map.values())}
        self.files: dict[str, Path] = {name: shards[file] for name, file in weight_map.items()}

    @cached_property
    def headers(self) -> dict[Path, tuple[dict[str, Any], int]]:
        """Per shard: its header, and the offset at which its data starts."""
        return {shard: read_header(shard) for shard in sorted(set(self.files.values()))}

    def check(self) -> None:
        """RequestError unless all shards are there with exactly the tensors and bytes that their headers announce."""
        shards = sorted(set(self.files.values()))
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise RequestError(
                f"{self.folder}: {len(missing)} of {len(shards)} shards are missing, first {missing[0]}; "
                "expected all that the index names; fetch the checkpoint again"
            )
        for shard, (header, start) in self.headers.items():
            expected = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            found = shard.stat().st_size
            if found != expected:
                raise RequestError(
                    f"{shard}: found {found} bytes, its header says {expected}; the file is incomplete: fetch it again"
                )
        for name, shard in self.files.items():
            if name not in self.headers[shard][0]:
                raise RequestError(f"{shard}: no tensor {name}, which the index places there; fetch the files again")

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> list[int]:
        """A tensor's shape, from its shard's header. RequestError when it is absent."""
        return self.headers[self._shard(name)][0][name]["shape"]

    def tensor(self, name: str) -> Tensor:
        """One tensor. RequestError when it is absent."""
        from safetensors import safe_open

        with safe_open(self._shard(name), framework="pt") as shard:
            return shard.get_tensor(name)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors as stored (packed integers count as stored)."""
        return sum(math.prod(entry["shape"]) for header, _ in self.headers.values() for entry in header.values())

    def digest(self) -> str:
        """Hash of each shard's size, header and evenly spaced samples of its data.

        Headers alone would take a fine-tune for its base model; reading 500 GB would take an hour. An edit of single
        elements between two samples is not seen.
        """
        digest = hashlib.sha256()
        for shard, (_, start) in self.headers.items():
            size = shard.stat().st_size
            with shard.open("rb") as file:
                digest.update(size.to_bytes(8, "little") + file.read(start))
                for offset in range(start, size, max((size - start) // SAMPLE_BLOCKS, SAMPLE_BYTES)):
                    digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
        return digest.hexdigest()[:16]

    def _shard(self, name: str) -> Path:
        if name not in self.files:
            raise RequestError(
                f"{self.folder}: no tensor {name} in the checkpoint, which the adapter expects; "
                "is model.adapter the right family? see `eagle3 stage=adapters`"
            )
        return self.files[name]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensor entries and the offset at which its data starts. RequestError when unreadable."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise ValueError(f"a header of {size} bytes in a file of {path.stat().st_size}")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return header, 8 + size
    except (OSError, ValueError, AttributeError) as error:
        raise RequestError(f"{path}: no readable safetensors header ({error}); fetch the file again") from error


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a checkpoint's file; a copy of `missing` when the file is absent. RequestError otherwise."""
    if missing is not None and not path.is_file():
        return dict(missing)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise RequestError(f"{path}: found a JSON {type(value).__name__}, expected an object; fetch the file again")
    return value


def _weight_map(folder: Path) -> dict[str, str]:
    """File name by tensor name, from the index or from the header of a single file."""
    if (folder / INDEX_NAME).is_file():
        weight_map = read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise RequestError(f"{folder / INDEX_NAME}: found no weight_map in it; fetch the checkpoint's index again")
        return weight_map
    single = folder / "model.safetensors"
    if single.is_file():
        return dict.fromkeys(read_header(single)[0], single.name)
    others = sorted(file.name for file in folder.glob("*.bin"))
    raise RequestError(
        f"model.path: {folder} is no model: found neither model.safetensors nor {INDEX_NAME}"
        + (f" (but {others[0]}: convert it to safetensors)" if others else "")
        + "; expected safetensors weights; set model.path to a complete checkpoint"
    )
