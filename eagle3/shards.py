"""The states store's files: planned from lengths alone, written by offset, complete or absent (step 4 of the walk).

A shard is a folder with one safetensors file per layer and an index. A layer file holds

    checksums      I64 [members]      crc32 of each member's rows
    hidden_states  dtype [rows, H]    the members' rows one after another

so that members can be written in any order, nothing is read back to be summed, and a damaged sample is known by name.
(crc32 is the fastest sum in the standard library, 1.6 GB/s against 0.6 for blake2b, and guards against torn files, not
against forgers.) Files grow in `shard-NNNNN.tmp` and get their names when they are whole and on the disk.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eagle3.artifacts import fsync_folder
from eagle3.errors import RequestError, StageFailed, StoreError, disk_full
from eagle3.shard_index import INDEX_NAME, complete_index, write_index
from eagle3.weights import read_header

if TYPE_CHECKING:
    from eagle3.tokens import Sample

PAGE_BYTES = 4096
DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float32": (torch.float32, "F32")}


@dataclass(frozen=True)
class ShardPlan:
    """One shard before anything is captured: its members' rows in the prepared set, their ids and lengths."""

    number: int
    rows: tuple[int, ...]
    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        """The shard's folder."""
        return f"shard-{self.number:05d}"

    @property
    def tokens(self) -> int:
        """Rows of each layer file."""
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """First row of each member in each layer file."""
        return tuple(itertools.accumulate(self.lengths[:-1], initial=0))


def plan_shards(
    lengths: Sequence[int],
    sample_ids: Sequence[str],
    bytes_per_token: int,
    shard_bytes: int,
    tokens_per_s: float | None,
    shard_seconds: float,
) -> tuple[ShardPlan, ...]:
    """Cuts the prepared set, in its order, into shards of at most `shard_bytes` and about `shard_seconds` of capture.

    A sample larger than the limit is a shard of its own. The plan depends on nothing but the arguments, so that two
    runs over the same samples make the same shards and the same batches.
    """
    limit = max(shard_bytes // bytes_per_token, 1)
    if tokens_per_s is not None:
        limit = min(limit, max(int(tokens_per_s * shard_seconds), 1))
    first_rows: list[int] = []
    tokens = 0
    for row, length in enumerate(lengths):
        if not first_rows or tokens + length > limit:
            first_rows.append(row)
            tokens = 0
        tokens += length
    return shards_at(first_rows, lengths, sample_ids)


def shards_at(first_rows: Sequence[int], lengths: Sequence[int], sample_ids: Sequence[str]) -> tuple[ShardPlan, ...]:
    """The shards that start at the given rows of the prepared set."""
    return tuple(
        ShardPlan(
            number,
            tuple(range(first, after)),
            tuple(sample_ids[row] for row in range(first, after)),
            tuple(int(lengths[row]) for row in range(first, after)),
        )
        for number, (first, after) in enumerate(itertools.pairwise([*first_rows, len(lengths)]))
    )


@dataclass(frozen=True)
class Layout:
    """What is the same in all shards of a store: width and dtype of the states, and the id of the final state."""

    hidden_size: int
    dtype: str
    final_id: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the rows. RequestError when the store knows none of that name."""
        if self.dtype not in DTYPES:
            raise RequestError(f"store.dtype: found {self.dtype!r}, expected one of {sorted(DTYPES)}")
        return DTYPES[self.dtype][0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer file."""
        return self.hidden_size * self.torch_dtype.itemsize

    def file_name(self, layer_id: int) -> str:
        """The file of one layer; the final state's has a name of its own."""
        return "final.safetensors" if layer_id == self.final_id else f"layer-{layer_id:03d}.safetensors"

    def header(self, plan: ShardPlan, layer_id: int) -> bytes:
        """The bytes in front of a layer file's data; the same for the same plan, which makes them a check."""
        return self._header(plan.name, len(plan.rows), plan.tokens, layer_id)

    def file_bytes(self, plan: ShardPlan, layer_id: int) -> int:
        """The exact size of a layer file."""
        return self.shard_file_bytes(plan.name, len(plan.rows), plan.tokens, layer_id)

    def shard_file_bytes(self, shard: str, members: int, rows: int, layer_id: int) -> int:
        """The same from what a manifest says of a shard, so that no plan is needed to know it."""
        return len(self._header(shard, members, rows, layer_id)) + members * 8 + rows * self.row_bytes

    def _header(self, shard: str, members: int, rows: int, layer_id: int) -> bytes:
        sums, data = members * 8, members * 8 + rows * self.row_bytes
        dtype = DTYPES[self.dtype][1]
        entries = {
            "__metadata__": {"format": "pt", "layer_id": str(layer_id), "shard": shard, "checksum": "crc32"},
            "checksums": {"dtype": "I64", "shape": [members], "data_offsets": [0, sums]},
            "hidden_states": {"dtype": dtype, "shape": [rows, self.hidden_size], "data_offsets": [sums, data]},
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        # The rows begin at a page, so that they can be written past the page cache.
        text += b" " * (-(8 + len(text) + sums) % PAGE_BYTES)
        return len(text).to_bytes(8, "little") + text


class LayerFile:
    """One layer of one shard while it is written, by offset and in any order."""

    def __init__(self, path: Path, layout: Layout, plan: ShardPlan, layer_id: int) -> None:
        header = layout.header(plan, layer_id)
        self.path, self.layout, self.plan = path, layout, plan
        self.checksums = np.full(len(plan.rows), -1, dtype=np.int64)
        self.sums_offset = len(header)
        self.data_offset = len(header) + self.checksums.nbytes
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self.handle, layout.file_bytes(plan, layer_id))
        self._write(memoryview(header), 0)

    def write(self, member: int, start: int, states: Tensor) -> None:
        """Writes a member's rows [T, H], cast to the store's dtype; `start` is the member's first row."""
        expected = (self.plan.lengths[member], self.layout.hidden_size)
        if tuple(states.shape) != expected:
            raise StoreError(
                f"{self.path}: sample {self.plan.sample_ids[member]} came with states {tuple(states.shape)}, expected "
                f"{expected}; the engine lost rows"
            )
        data = raw_bytes(states.to(self.layout.torch_dtype))
        self.checksums[member] = zlib.crc32(data)
        self._write(data, self.data_offset + start * self.layout.row_bytes)

    def erase(self, member: int, start: int) -> None:
        """Makes the rows of a member that an engine wrote zeros again, as those of a rejected one are."""
        size = self.plan.lengths[member] * self.layout.row_bytes
        self._write(memoryview(bytes(size)), self.data_offset + start * self.layout.row_bytes)

    def read(self, start: int, length: int) -> Tensor:
        """The rows [length, H] from `start` on, as they are in the file."""
        return read_rows(self.path, self.layout, self.data_offset, start, length)

    def close(self) -> None:
        """Writes the checksums and waits until everything is on the disk."""
        for member in np.flatnonzero(self.checksums < 0):
            # A rejected member's rows are a hole, which reads as zeros.
            self.checksums[member] = zlib.crc32(bytes(self.plan.lengths[member] * self.layout.row_bytes))
        self._write(self.checksums.data.cast("B"), self.sums_offset)
        os.fsync(self.handle)
        self.abandon()

    def abandon(self) -> None:
        """Closes the handle only."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self.handle, data, offset)
            data, offset = data[written:], offset + written


class ShardWriter:
    """Writes layers of one shard into `<name>.tmp`; `close` gives them their names. A context manager.

    Layers that the shard has already stay as they are. OSErrors become the error that the user can act on.
    """

    def __init__(self, folder: Path, layout: Layout, plan: ShardPlan, layer_ids: Sequence[int]) -> None:
        self.folder, self.layout, self.plan = folder / plan.name, layout, plan
        self.temporary = folder / f"{plan.name}.tmp"
        self.members = {sample_id: member for member, sample_id in enumerate(plan.sample_ids)}
        self.starts = plan.starts
        self.rejected: dict[str, str] = {}
        self.written: set[str] = set()
        try:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(parents=True)
            self.files = {k: LayerFile(self.temporary / layout.file_name(k), layout, plan, k) for k in layer_ids}
        except OSError as error:
            raise write_error(error, self.temporary) from error

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self.files.values():
            file.abandon()

    def write(self, sample_id: str, states: Mapping[int, Tensor]) -> None:
        """Writes one member's states [T, H] of every layer of this writer."""
        member = self.members[sample_id]
        try:
            for layer_id, file in self.files.items():
                file.write(member, self.starts[member], states[layer_id])
        except OSError as error:
            raise write_error(error, self.temporary) from error
        self.written.add(sample_id)

    def accept(self, sample_id: str, checksums: Mapping[int, int]) -> None:
        """Notes a member whose rows an engine has put into the files by itself; crc32 of its rows by layer id."""
        for layer_id, file in self.files.items():
            file.checksums[self.members[sample_id]] = checksums[layer_id]
        self.written.add(sample_id)

    def reject(self, sample_id: str, reason: str) -> None:
        """Leaves a hole where the member would be; the index will not name it."""
        self.rejected[sample_id] = reason

    def retract(self, sample_id: str, reason: str) -> None:
        """Rejects a member whose rows an engine has put into the files by itself: they become a hole again."""
        for file in self.files.values():
            file.erase(self.members[sample_id], self.starts[self.members[sample_id]])
        self.reject(sample_id, reason)

    def close(self, samples: Sequence[Sample], engine: Mapping[str, Any]) -> None:
        """Completes the shard: index, fsync, rename. `samples` are the plan's members, in its order.

        StoreError when a member was neither written nor rejected.
        """
        lost = [sample_id for sample_id in self.plan.sample_ids if sample_id not in self.written | self.rejected.keys()]
        if lost:
            raise StoreError(f"{self.temporary}: {len(lost)} samples were never captured, first {lost[0]}")
        try:
            for file in self.files.values():
                file.close()
            if self._joins():
                # The shard has other layers: these join them one by one, each whole before it has its name.
                for file in self.files.values():
                    os.replace(file.path, self.folder / file.path.name)
                self.temporary.rmdir()
                fsync_folder(self.folder)
            else:
                write_index(self.temporary / INDEX_NAME, self.plan, samples, self.rejected, engine)
                shutil.rmtree(self.folder, ignore_errors=True)
                fsync_folder(self.temporary)
                os.rename(self.temporary, self.folder)
            fsync_folder(self.folder.parent)
        except OSError as error:
            raise write_error(error, self.temporary) from error

    def _joins(self) -> bool:
        """Whether the shard is there already, whole, and only gains layers."""
        try:
            complete_index(self.folder, self.plan)
        except StoreError:
            return False
        return True


def check_layer_file(path: Path, layout: Layout, plan: ShardPlan, layer_id: int, checksums: bool) -> str | None:
    """What is wrong with a layer file: absent, wrong size, wrong header, or (if asked) a sample's checksum."""
    if not path.is_file():
        return "is absent"
    found, expected = path.stat().st_size, layout.file_bytes(plan, layer_id)
    if found != expected:
        return f"has {found} bytes, expected {expected}"
    header = layout.header(plan, layer_id)
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            return "has another header than planned"
        if checksums:
            sums = np.frombuffer(file.read(8 * len(plan.rows)), dtype=np.int64)
            for sample_id, length, expected_sum in zip(plan.sample_ids, plan.lengths, sums, strict=True):
                rows = file.read(length * layout.row_bytes)
                if zlib.crc32(rows) != expected_sum:
                    return f"has damaged rows (checksum of sample {sample_id})"
    return None


def read_rows(path: Path, layout: Layout, data_offset: int, start: int, length: int) -> Tensor:
    """The rows [length, H] of a layer file from `start` on. StoreError when it ends before."""
    rows = torch.empty(length, layout.hidden_size, dtype=layout.torch_dtype)
    with path.open("rb", buffering=0) as file:
        fill_rows(file.fileno(), path, data_offset + start * layout.row_bytes, rows)
    return rows


def fill_rows(handle: int, path: Path, offset: int, rows: Tensor) -> None:
    """Reads `rows` [T, H], contiguous on the CPU, from the open file `handle` of `path`.

    StoreError when it ends before, or when the disk fails.
    """
    assert rows.is_contiguous()  # else the bytes would be those of a copy
    view, problem = raw_bytes(rows), "ended early"
    try:
        while view and (count := os.preadv(handle, [view], offset)):
            view, offset = view[count:], offset + count
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    if view:
        raise StoreError(f"{path}: {problem} at byte {offset}; run `eagle3 stage=verify`")


def data_start(path: Path) -> int:
    """The offset of the first row in a layer file. StoreError when it has no readable header."""
    try:
        header, start = read_header(path)
        return start + header["hidden_states"]["data_offsets"][0]
    except (RequestError, KeyError) as error:
        cause = error.__cause__ or error
        raise StoreError(
            f"{path}: no readable safetensors header ({cause}); run `eagle3 stage=extract` to make the file again"
        ) from error


def raw_bytes(tensor: Tensor) -> memoryview:
    """A CPU tensor's elements as bytes; a slice of a larger tensor is copied out if it has gaps."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_error(error: OSError, path: Path) -> Exception:
    """The error to raise for a failed write: a full disk stops the run, an unwritable folder is a wrong request."""
    if disk_full(error):
        free = shutil.disk_usage(path if path.exists() else path.parent).free
        return StageFailed(
            f"{path}: the disk is full ({error.strerror}, {free / 1e9:.2f} GB free); complete shards are kept: make "
            "room and run the same command again to go on"
        )
    return RequestError(
        f"{path}: cannot be written ({type(error).__name__}: {error.strerror or error}); expected a writable folder; "
        "try another output_dir"
    )
