"""From an engine's batches to the files of a store's shards, off the compute stream (steps 3 and 4 of the walk).

Lives in each worker of a tensor-parallel engine. A batch's states go device → pinned ring → file: the copy runs on a
side stream, threads match the rows to samples and write them, which lets go of the interpreter's lock.
When the disk is slower than the model, the ring is full and the next batch waits: nothing grows. All ranks hold the
same states, so the rows of a batch times the layers are one line that is cut into equal parts, one for each rank.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.engines.direct_files import is_direct, open_for_rows, page_memory, write_at
from eagle3.engines.matching import OpenSample, RowMatcher, Run
from eagle3.engines.stalls import DiskWatch
from eagle3.errors import EngineError

WRITE_BYTES = 16 * 2**20
FLUSH_SECONDS = 0.5


def share(rank: int, world: int, layers: int, rows: int) -> list[tuple[int, int]]:
    """The rows [first, last) of each layer of one batch that fall to `rank`."""
    first, last = rank * layers * rows // world, (rank + 1) * layers * rows // world
    return [
        (min(max(first - layer * rows, 0), rows), min(max(last - layer * rows, 0), rows)) for layer in range(layers)
    ]


def finite_rows(states: Tensor) -> Tensor:
    """Which rows of [rows, H] are finite throughout. By their sums: one pass over the memory where `isfinite` takes
    several, beside the model. Finite numbers large enough to overflow a sum in float32 count as not finite.
    """
    return states.sum(-1, dtype=torch.float32).isfinite()


@dataclass
class Shard:
    """A shard being filled: where each layer's file is and where its data starts, what is still to come."""

    key: str
    files: dict[int, tuple[str, int]]
    rows_left: int
    rejected: set[int] = field(default_factory=set)
    descriptors: dict[int, int] = field(default_factory=dict)
    parts: list[list[int]] = field(default_factory=list)
    """[layer id, member, first row, rows, crc32] of everything that this rank wrote."""


@dataclass
class Job:
    """Rows that lie side by side in a slot and in a layer's file, one member after another."""

    shard: Shard
    layer_id: int
    source_row: int
    file_row: int
    members: list[tuple[int, int, int]]
    """(member, its first row here, rows)."""

    @property
    def rows(self) -> int:
        return sum(rows for _, _, rows in self.members)


@dataclass
class Slot:
    """The pinned memory of one batch: this rank's part of its states, and everything needed to tell whose they are."""

    states: Tensor
    finite: Tensor
    input_ids: Tensor
    positions: Tensor
    rows: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)
    copied: Any = None
    started: Any = None
    pending: int = 0


class Recorder:
    """One rank's part of a capture. All methods are called by the engine's thread; `poll` tells what became of it."""

    def __init__(
        self,
        layer_ids: list[int],
        *,
        batch_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        slots: int = 3,
        writers: int = 4,
        watch: DiskWatch | None = None,
    ) -> None:
        self.layer_ids, self.dtype, self.device = layer_ids, dtype, device
        self.rank, self.world, self.batch_rows = rank, world, batch_rows
        self._watch = watch or DiskWatch(rank)
        self.row_bytes = hidden_size * dtype.itemsize
        self.cuda = device.type == "cuda"
        part = -(-len(layer_ids) * batch_rows // world)

        def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
            if self.cuda:  # also begins at a page
                return torch.empty(*shape, dtype=dtype, pin_memory=True)
            return page_memory(*shape, dtype=dtype)

        self._free: queue.Queue[Slot] = queue.Queue()
        for _ in range(slots):
            self._free.put(
                Slot(
                    pinned(part, hidden_size, dtype=dtype),
                    pinned(part, dtype=torch.bool),
                    pinned(batch_rows, dtype=torch.int64),
                    pinned(batch_rows, dtype=torch.int64),
                )
            )
        self.ring_bytes = slots * part * self.row_bytes
        self._side = torch.cuda.Stream(device) if self.cuda else None
        self._current: Slot | None = None
        self._matcher = RowMatcher()
        self._shards: dict[str, Shard] = {}
        self._lock = threading.Lock()
        self._finished: list[dict[str, Any]] = []
        self._failure: dict[str, Any] | None = None
        self._counts = {"steps": 0, "rows": 0, "rows_written": 0, "bytes": 0}
        self._seconds = {"model": 0.0, "copy": 0.0, "write": 0.0, "wait": 0.0}
        self._filled: queue.Queue[Slot | None] = queue.Queue()
        self._pool = ThreadPoolExecutor(writers, thread_name_prefix="eagle3-write")
        self._closed = threading.Event()
        self._match = threading.Thread(target=self._drain, name="eagle3-match", daemon=True)
        self._match.start()
        threading.Thread(target=self._flush, name="eagle3-flush", daemon=True).start()

    def open(self, shard: dict[str, Any]) -> None:
        """Expects a shard's samples.

        `shard` has key, files {layer id: [path, data offset]}, input_ids (int32, as bytes), and of each sample in
        members, lengths and first_rows its number in the shard's plan, its tokens and its first row in the files.
        """
        members, lengths, first_rows = shard["members"], shard["lengths"], shard["first_rows"]
        input_ids = np.frombuffer(shard["input_ids"], dtype=np.int32).astype(np.int64)
        files = {int(layer): (str(path), int(start)) for layer, (path, start) in shard["files"].items()}
        with self._lock:
            self._shards[shard["key"]] = Shard(shard["key"], files, int(sum(lengths)))
            at = 0
            for member, length, first_row in zip(members, lengths, first_rows, strict=True):
                self._matcher.open(OpenSample(shard["key"], member, input_ids[at : at + length], first_row))
                at += length

    @property
    def batch_rows_now(self) -> int:
        """Rows of the batch in flight; 0 when none is recorded."""
        return self._current.rows if self._current is not None else 0

    def begin(self, input_ids: Tensor | None, positions: Tensor) -> None:
        """A forward pass starts on `input_ids` [T] at `positions` [T]; waits for a free slot of the ring."""
        if self._failure is not None or not self._shards:
            return
        if input_ids is None:
            self._fail(
                EngineError(
                    "the inner model got embeddings instead of input_ids, so its rows cannot be told apart; "
                    "set hardware.engine_options.language_model_only=true"
                )
            )
            return
        rows = len(input_ids)
        if positions.ndim != 1 or len(positions) != rows or rows > self.batch_rows:
            self._fail(
                EngineError(
                    f"a batch of {rows} token ids came with positions of shape {tuple(positions.shape)}, expected "
                    f"[{rows}] and at most {self.batch_rows} rows"
                )
            )
            return
        slot = self._current or self._take_slot()
        if slot is None:
            return
        slot.rows, slot.parts = rows, share(self.rank, self.world, len(self.layer_ids), rows)
        # On the compute stream: the engine overwrites both before its next batch.
        slot.input_ids[:rows].copy_(input_ids, non_blocking=True)
        slot.positions[:rows].copy_(positions, non_blocking=True)
        slot.started = self._event()
        if self._current is None:
            self._counts["steps"] += 1
            self._counts["rows"] += rows
        self._current = slot

    def _take_slot(self) -> Slot | None:
        before = time.perf_counter()
        while True:
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                if self._failure is not None:
                    return None
            finally:
                self._seconds["wait"] += time.perf_counter() - before
                before = time.perf_counter()

    def wanted(self, layer: int) -> tuple[int, int] | None:
        """The rows of the batch in flight that this rank keeps of layer number `layer`; None when there are none."""
        if self._current is None:
            return None
        first, last = self._current.parts[layer]
        return (first, last) if first < last else None

    def keep(self, layer: int, states: Tensor) -> None:
        """Copies this rank's rows of one layer, `wanted(layer)`, out of the batch: states [rows, H] on the device."""
        slot = self._current
        assert slot is not None
        at = sum(last - first for first, last in slot.parts[:layer])
        states = states.to(self.dtype)
        target = slice(at, at + len(states))
        if self._side is None:
            slot.states[target].copy_(states)
            slot.finite[target].copy_(finite_rows(states))
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            slot.states[target].copy_(states, non_blocking=True)
            slot.finite[target].copy_(finite_rows(states), non_blocking=True)
        states.record_stream(self._side)

    def end(self) -> None:
        """The forward pass is over: its rows may be written once they are copied."""
        slot, self._current = self._current, None
        if slot is None:
            return
        computed = self._event()
        if self._side is not None:  # also for a batch of which this rank keeps no row
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        slot.copied = (computed, self._event(self._side))
        self._filled.put(slot)

    def fail(self, error: BaseException) -> None:
        """Stops the capture with an error of the hooks in the batch in flight; `poll` reports it."""
        self._fail(error, self._current)

    def poll(self) -> dict[str, Any]:
        """What happened since the last poll: finished shards of this rank, the failure, counts and seconds so far."""
        with self._lock:
            finished, self._finished = self._finished, []
            return {
                "finished": finished,
                "failure": self._failure,
                "open_samples": len(self._matcher),
                "ring_bytes": self.ring_bytes,
                **self._counts,
                **{f"{name}_s": seconds for name, seconds in self._seconds.items()},
            }

    def close(self) -> None:
        """Waits for what is in flight, not for the disk to take it, and closes the files."""
        self._filled.put(None)
        self._closed.set()
        self._match.join()
        self._pool.shutdown(wait=True)
        for shard in self._shards.values():
            self._close(shard)
        self._shards.clear()
        self._watch.close()

    def _event(self, stream: torch.cuda.Stream | None = None) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def _drain(self) -> None:
        """The matching thread: batches in their order, each handed to the writers in pieces."""
        while (slot := self._filled.get()) is not None:
            try:
                self._wait_copied(slot)
                if self._failure is None:
                    self._write(slot)
                else:
                    self._free.put(slot)
            except BaseException as error:
                self._fail(error, slot)

    def _wait_copied(self, slot: Slot) -> None:
        computed, copied = slot.copied
        if self.cuda:
            copied.synchronize()
            model_s, copy_s = slot.started.elapsed_time(computed) / 1000, computed.elapsed_time(copied) / 1000
        else:
            model_s, copy_s = computed - slot.started, 0.0
        with self._lock:
            self._seconds["model"] += model_s
            self._seconds["copy"] += max(copy_s, 0.0)

    def _write(self, slot: Slot) -> None:
        with self._lock:
            runs = self._matcher.match(slot.input_ids[: slot.rows].numpy(), slot.positions[: slot.rows].numpy())
        jobs: dict[int, list[Job]] = {layer_id: [] for layer_id in self.layer_ids}
        at = 0
        finite = slot.finite.numpy()
        for layer_id, (first, last) in zip(self.layer_ids, slot.parts, strict=True):
            for run in runs:
                begin, end = max(run.batch_row, first), min(run.batch_row + run.count, last)
                if begin >= end:
                    continue
                source, sample_row = at + begin - first, run.sample_row + begin - run.batch_row
                shard, member = self._shards[run.sample.shard], run.sample.index
                if not finite[source : source + end - begin].all():
                    shard.rejected.add(member)
                piece = (member, sample_row, end - begin)
                self._add(jobs[layer_id], Job(shard, layer_id, source, run.sample.first_row + sample_row, [piece]))
            at += last - first
        # In turn from each layer: a file takes one write at a time, so neighbours should go to different files.
        in_turn = [job for group in itertools.zip_longest(*jobs.values()) for job in group if job is not None]
        slot.pending = len(in_turn)
        if not in_turn:
            self._written(slot, runs)
        for job in in_turn:
            self._pool.submit(self._write_rows, slot, runs, job)

    def _add(self, jobs: list[Job], job: Job) -> None:
        """Adds a write, joined to the last one where it goes on both in memory and in the file."""
        if jobs:
            last = jobs[-1]
            rows = last.rows
            joined = last.shard is job.shard and last.layer_id == job.layer_id
            joined = joined and (last.source_row + rows, last.file_row + rows) == (job.source_row, job.file_row)
            if joined and (rows + job.rows) * self.row_bytes <= WRITE_BYTES:
                last.members.extend(job.members)
                return
        if job.layer_id not in job.shard.descriptors:
            path = job.shard.files[job.layer_id][0]
            with self._watch.doing("opening", path):
                job.shard.descriptors[job.layer_id] = open_for_rows(path, self.row_bytes)
        jobs.append(job)

    def _flush(self) -> None:
        """The flushing thread: sends what lies in the page cache on to the disk, so that little is left when a shard is
        done.
        """
        while not self._closed.wait(FLUSH_SECONDS):
            with self._lock:
                # Duplicates, since a shard's own descriptors are closed when it is complete.
                files = [
                    (os.dup(file), shard.files[layer_id][0])
                    for shard in self._shards.values()
                    for layer_id, file in shard.descriptors.items()
                ]
            for file, path in files:
                try:
                    if not is_direct(file):
                        with self._watch.doing("flushing", path):
                            os.fdatasync(file)
                except OSError as error:
                    self._fail(error)
                finally:
                    os.close(file)

    def _write_rows(self, slot: Slot, runs: list[Run], job: Job) -> None:
        try:
            before, parts, row = time.perf_counter(), [], job.source_row
            for member, first, rows in job.members:
                parts.append([job.layer_id, member, first, rows, zlib.crc32(_bytes(slot.states[row : row + rows]))])
                row += rows
            path, start = job.shard.files[job.layer_id]
            with self._watch.doing("writing", path):
                data, offset = _bytes(slot.states[job.source_row : row]), start + job.file_row * self.row_bytes
                write_at(job.shard.descriptors[job.layer_id], data, offset)
            with self._lock:
                job.shard.parts.extend(parts)
                self._seconds["write"] += time.perf_counter() - before
                self._counts["bytes"] += job.rows * self.row_bytes
                slot.pending -= 1
                last = slot.pending == 0
            if last:
                self._written(slot, runs)
        except BaseException as error:
            self._fail(error, slot)

    def _written(self, slot: Slot, runs: list[Run]) -> None:
        """All of a batch is in its files: the slot is free, and shards may be complete."""
        rows, complete = slot.rows, []
        with self._lock:
            for run in runs:
                shard = self._shards[run.sample.shard]
                shard.rows_left -= run.count
                if shard.rows_left == 0:
                    complete.append(self._shards.pop(shard.key))
        self._free.put(slot)
        for shard in complete:
            self._close(shard)
        # Together, since rows that are all written without their shards being complete are lost ones to whoever polls.
        with self._lock:
            self._counts["rows_written"] += rows
            for shard in complete:
                self._finished.append({"key": shard.key, "rejected": sorted(shard.rejected), "parts": shard.parts})

    def _close(self, shard: Shard) -> None:
        """Closes a shard's files, which some network disks take for flushing them; completing it waits for the disk."""
        for layer_id, descriptor in shard.descriptors.items():
            with self._watch.doing("closing", shard.files[layer_id][0]):
                os.close(descriptor)
        shard.descriptors.clear()

    def _fail(self, error: BaseException, slot: Slot | None = None) -> None:
        """Keeps the first failure; the ring stops, so that the engine is never blocked by it."""
        where = "" if slot is None else f" in a batch of {slot.rows} rows"
        message = f"{type(error).__name__}{where}: {str(error) or 'no message'}"
        details = "".join(traceback.format_exception(error))
        with self._lock:
            if self._failure is None:
                self._failure = {"message": message, "errno": getattr(error, "errno", None), "traceback": details}


def _bytes(states: Tensor) -> memoryview:
    array: Any = states.view(torch.uint8).numpy()
    return memoryview(array).cast("B")
