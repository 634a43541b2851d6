"""A shard's index: which samples it holds, where their rows start, and their token ids (step 4 of the walk).

The index is written last, so that a shard without one is no shard.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors

from eagle3.errors import StoreError

if TYPE_CHECKING:
    from eagle3.shards import ShardPlan
    from eagle3.tokens import Sample

INDEX_NAME = "index.safetensors"
SAFETENSORS_DTYPES = {"uint8": "U8", "int32": "I32", "int64": "I64"}


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one complete shard. `members` are their places in the plan, `starts` their first rows."""

    sample_ids: tuple[str, ...]
    rows: np.ndarray
    members: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    input_ids: np.ndarray
    loss_mask: np.ndarray
    rejected: dict[str, str]
    engine: dict[str, Any]

    @property
    def offsets(self) -> np.ndarray:
        """First element of each sample in `input_ids` and `loss_mask`, which have no holes."""
        return np.concatenate([[0], np.cumsum(self.lengths[:-1])]).astype(np.int64)

    @classmethod
    def read(cls, path: Path) -> ShardIndex:
        """Raises StoreError when the file is torn or its checksum does not hold."""
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if metadata["checksum"] != str(_sum_of(tensors)):
                raise ValueError("its checksum does not hold")
            width = tensors["sample_ids"].shape[1]
            text = tensors["sample_ids"].tobytes().decode("ascii")
            ids = tuple(text[i : i + width].rstrip("\0") for i in range(0, len(text), width)) if width else ()
            fields = {name: tensors[name] for name in ("rows", "members", "starts", "lengths", "input_ids")}
            return cls(
                sample_ids=ids,
                loss_mask=tensors["loss_mask"].astype(bool),
                rejected=json.loads(metadata["rejected"]),
                engine=json.loads(metadata["engine"]),
                **fields,
            )
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise StoreError(
                f"{path}: cannot be read ({type(error).__name__}: {error}), expected a complete index; "
                "run `eagle3 stage=extract` to make the shard again"
            ) from error


def complete_index(folder: Path, plan: ShardPlan) -> ShardIndex:
    """The index of a shard's folder. Raises StoreError when it is absent, torn or of other samples than planned."""
    path = folder / INDEX_NAME
    index = ShardIndex.read(path)
    if {*index.sample_ids, *index.rejected} != set(plan.sample_ids):
        raise StoreError(f"{path}: lists other samples than planned; run `eagle3 stage=extract` to make it again")
    return index


def write_index(
    path: Path, plan: ShardPlan, samples: Sequence[Sample], rejected: Mapping[str, str], engine: Mapping[str, Any]
) -> None:
    """Writes the index of a shard's plan, without the rejected members, and waits until it is on the disk.

    `samples` are the members in the plan's order; `rejected` gives the reason by sample id; `engine` is provenance.
    """
    kept = [m for m, sample_id in enumerate(plan.sample_ids) if sample_id not in rejected]
    width = max((len(sample_id) for sample_id in plan.sample_ids), default=0)
    ids = "".join(plan.sample_ids[m].ljust(width, "\0") for m in kept).encode("ascii")
    starts = plan.starts
    empty_ids, empty_mask = np.empty(0, np.int32), np.empty(0, np.uint8)
    tensors = {
        "rows": np.array([plan.rows[m] for m in kept], dtype=np.int64),
        "members": np.array(kept, dtype=np.int64),
        "starts": np.array([starts[m] for m in kept], dtype=np.int64),
        "lengths": np.array([plan.lengths[m] for m in kept], dtype=np.int64),
        "input_ids": np.concatenate([empty_ids, *(samples[m].input_ids.astype(np.int32) for m in kept)]),
        "loss_mask": np.concatenate([empty_mask, *(samples[m].loss_mask.astype(np.uint8) for m in kept)]),
        "sample_ids": np.frombuffer(ids, dtype=np.uint8).reshape(len(kept), width),
    }
    metadata = {
        "checksum": str(_sum_of(tensors)),
        "rejected": json.dumps(dict(rejected), sort_keys=True),
        "engine": json.dumps(dict(engine), sort_keys=True),
    }
    with path.open("wb") as file:
        file.write(_header({name: (t.dtype.name, t.shape) for name, t in tensors.items()}, metadata))
        file.writelines(tensor.tobytes() for tensor in tensors.values())
        file.flush()
        os.fsync(file.fileno())


def index_bytes(plan: ShardPlan) -> int:
    """About the size of a shard's index before it is written: exact but for the metadata."""
    members, tokens = len(plan.rows), plan.tokens
    width = max((len(sample_id) for sample_id in plan.sample_ids), default=0)
    fields: dict[str, tuple[str, tuple[int, ...]]] = {
        **dict.fromkeys(("rows", "members", "starts", "lengths"), ("int64", (members,))),
        "input_ids": ("int32", (tokens,)),
        "loss_mask": ("uint8", (tokens,)),
        "sample_ids": ("uint8", (members, width)),
    }
    metadata = {"checksum": "4294967295", "rejected": "{}", "engine": "x" * 64}
    data = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in fields.values())
    return len(_header(fields, metadata)) + data


def _header(fields: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """What stands before the data of a safetensors file with these dtypes and shapes, the same each time.

    The library's own writer orders the metadata at random.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in fields.items():
        after = offset + math.prod(shape) * np.dtype(dtype).itemsize
        entries[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, after]}
        offset = after
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sum_of(tensors: Mapping[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(np.ascontiguousarray(tensors[name]).tobytes(), total)
    return total
