"""Drives a capture through vLLM's workers: shards go in, complete shards come out (step 3 of the walk).

Several shards are in flight at once, so that the engine never drains between them. A shard is complete when every rank
has written its part; the parts' checksums are summed up here, which also shows that no row is missing.

Workers answer between two batches, and for that the engine lets its GPUs run dry: some 7 ms with two of them. So they
are called seldom, and asked what is done when shards are handed to them anyway.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.checksums import combine_all
from eagle3.engines import stalls
from eagle3.engines.stalls import ProgressClock
from eagle3.errors import RequestError, StoreError
from eagle3.shards import Layout, ShardWriter, write_error

if TYPE_CHECKING:
    from eagle3.engines.vllm_process import EngineProcess
    from eagle3.tokens import Sample

RING_SLOTS, WRITERS = 3, 8
# Between two questions while batches run, after the last one, and the longest wait for a request that ends.
POLL_SECONDS, LAST_POLL_SECONDS, WAIT_SECONDS = 2.0, 0.005, 0.25
# Batches of tokens that wait in the engine at most, so that it never waits for this process; shards are handed over
# when half of them are done.
WINDOW_BATCHES = 8

Request = tuple[str, list[int], dict[str, Any]]


@dataclass(frozen=True)
class ShardWork:
    """A shard to capture: its open writer, and all members of its plan in order. Rejected members are left out."""

    writer: ShardWriter
    members: Sequence[Sample]


@dataclass
class ShardProgress:
    """A shard whose rows are being written: the members that are captured, and what each rank has reported."""

    work: ShardWork
    members: list[int]
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    def settle(self) -> None:
        """Sums up what all ranks wrote and accepts or rejects each member. StoreError when rows are missing."""
        writer, plan = self.work.writer, self.work.writer.plan
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        rejected: set[int] = set()
        for report in self.reports.values():
            rejected.update(report["rejected"])
            for layer_id, member, first, rows, crc in report["parts"]:
                parts.setdefault((layer_id, member), []).append((first, rows, crc))
        for member in self.members:
            sums: dict[int, int] = {}
            for layer_id in writer.files:
                pieces = sorted(parts.get((layer_id, member), []))
                found = 0
                for first, rows, _ in pieces:
                    if first != found:
                        break
                    found += rows
                if found != plan.lengths[member]:
                    raise StoreError(
                        f"{writer.temporary}: sample {plan.sample_ids[member]} has {found} of {plan.lengths[member]} "
                        f"rows of layer {layer_id}; nothing of this shard is kept: run the same command again"
                    )
                sums[layer_id] = combine_all((crc, rows * writer.layout.row_bytes) for _, rows, crc in pieces)
            if member in rejected:
                writer.retract(plan.sample_ids[member], "non_finite")
            else:
                writer.accept(plan.sample_ids[member], sums)


def ring_bytes(layers: int, batch_tokens: int, row_bytes: int) -> int:
    """Pinned host memory of all ranks of an engine together: the states of the batches that wait to be written."""
    return RING_SLOTS * layers * batch_tokens * row_bytes


def memory_bytes(report: Mapping[str, Any], key_values: int, name: str = "needed_bytes") -> int:
    """Device memory that the fullest rank of a capture needed, but of the engine's reserve for keys and values only the
    `key_values` that a batch needs. With the name `device_bytes` all that it took: what the allocator keeps for later
    too, and gives back when memory is short. 0 on a CPU.
    """
    found = [rank[name] - rank["key_value_bytes"] for rank in report["ranks"] if rank[name]]
    return max(found) + key_values if found else 0


def batch_bytes(report: Mapping[str, Any], loaded: Sequence[Mapping[str, Any]]) -> int:
    """What the fullest rank of a capture needed beside its weights, keys and values, and what the libraries take: a
    batch's activations and states, and the room that the engine keeps for them. It is the same at any number of layers.

    `loaded` are the ranks as the engine described them when it had loaded. 0 on a CPU.
    """
    found = [
        rank["needed_bytes"] - rank["key_value_bytes"] - before["weight_bytes"] - before["context_bytes"]
        for rank, before in zip(report["ranks"], loaded, strict=True)
        if rank["needed_bytes"]
    ]
    return max(found, default=0)


def throughput(report: Mapping[str, Any], forecast_tokens_per_s: float | None = None) -> dict[str, Any]:
    """What a capture's time went into, as shares of its seconds, averaged over the ranks.

    model: a forward pass runs; copy: only a copy to the host does; wait: the model waits for the disk. write: the
    writing threads are busy, beside the model. `ring_bytes` and `working_bytes` are the most host and device memory of
    a rank, which depend on the batch and not on the length of the run. `written_share`: each rank's part of the bytes.
    """
    ranks, seconds = report["ranks"], max(report["seconds"], 1e-9)

    def share(name: str) -> float:
        return round(sum(rank[f"{name}_s"] for rank in ranks) / len(ranks) / seconds, 4)

    speed = report["tokens"] / seconds
    size = sum(rank["bytes"] for rank in ranks)
    found = {
        "tokens_per_s": round(speed, 1),
        "bytes_per_s": round(size / seconds),
        "model_share": share("model"),
        "copy_share": share("copy"),
        "wait_share": share("wait"),
        "write_share": round(share("write") / WRITERS, 4),
        "written_share": [round(rank["bytes"] / max(size, 1), 4) for rank in ranks],
        "ring_bytes": max(rank["ring_bytes"] for rank in ranks),
        "working_bytes": max(rank["working_bytes"] for rank in ranks),
    }
    if forecast_tokens_per_s:
        found["of_forecast"] = round(speed / forecast_tokens_per_s, 3)
    return found


class CaptureDriver:
    """One capture of fixed layers. `report` tells afterwards what each rank spent on what, of `tokens` in `seconds`, of
    which `tail_seconds` after the engine's last batch; `arm_seconds` before, for hooks and pinned memory.
    """

    def __init__(
        self,
        process: EngineProcess,
        adapter: str,
        layer_ids: Sequence[int],
        layout: Layout,
        *,
        batch_tokens: int,
        longest_sample: int,
        rotation: int = 0,
    ) -> None:
        self.process, self.layer_ids, self.longest_sample = process, list(layer_ids), longest_sample
        self.window = WINDOW_BATCHES * batch_tokens
        self.report: dict[str, Any] = {}
        self._in_flight: dict[str, int] = {}
        self._open: dict[str, ShardProgress] = {}
        self._clock = ProgressClock(process)
        settings = {"hidden_size": layout.hidden_size, "dtype": layout.dtype, "rotation": rotation}
        settings |= {"slots": RING_SLOTS, "writers": WRITERS}
        settings |= {"address": self._clock.address, "say_s": stalls.SAY_SECONDS}
        started = time.monotonic()
        try:
            process.call("eagle3_arm", adapter, self.layer_ids, settings)
        except BaseException:
            self._clock.close()
            raise
        self._arm_seconds = time.monotonic() - started

    def run(self, work: Iterable[ShardWork]) -> Iterator[ShardWork]:
        """Yields each shard when its members are settled. See `VllmEngine.capture_shards` for what it raises."""
        started, waiting = time.monotonic(), iter(work)
        polled = drained = started
        try:
            while True:
                handed = yield from self._refill(waiting)
                if not self._open and not self._in_flight:
                    return
                for request_id, _, _ in self.process.finished(self._patience(handed)):
                    self._in_flight.pop(request_id, None)
                    drained = time.monotonic()
                if not handed and self._in_flight and time.monotonic() - polled < POLL_SECONDS:
                    continue
                answers, polled = self.process.call("eagle3_poll", waiting=self._clock.check), time.monotonic()
                self._clock.moved(
                    [len(self._in_flight), *((a["rows"], a["bytes"], a["rows_written"]) for a in answers)]
                )
                self._clock.check()
                yield from self._complete(answers)
                if self._open and not self._in_flight and all(a["rows"] == a["rows_written"] for a in answers):
                    count = answers[0]["open_samples"]
                    raise self.process.failure(
                        f"vllm: all requests are finished, but {count} samples of {sorted(self._open)} lack rows"
                    )
        except KeyboardInterrupt:
            # Whoever stops it waits for nothing in flight: not for a batch, nor for a disk that hangs.
            self.process.close(gently=False)
            raise
        finally:
            if not self.process.broken:
                # What is in flight has no counter to tell a slow disk by, so this waits for as long as it takes.
                ranks = self.process.call("eagle3_disarm", waiting=self._clock.say)
                ended = time.monotonic()
                self.report = {
                    "tokens": ranks[0]["rows_written"],
                    "seconds": ended - started,
                    "arm_seconds": self._arm_seconds,
                    "tail_seconds": ended - drained,
                    "ranks": ranks,
                }
            self._clock.close()

    def _patience(self, handed: bool) -> float:
        """Seconds to wait for a request that ends: none when the workers are to answer as well as take new shards."""
        if handed:
            return 0.0
        return WAIT_SECONDS if self._in_flight else LAST_POLL_SECONDS

    def _refill(self, waiting: Iterator[ShardWork]) -> Generator[ShardWork, None, bool]:
        """Opens shards in all workers and queues their samples until the window is full, once half of it is done.

        Yields the shards that have no sample to capture, so that none stays open behind others; returns whether the
        workers were handed any.
        """
        shards: list[dict[str, Any]] = []
        requests: list[Request] = []
        if sum(self._in_flight.values()) <= self.window // 2:
            while sum(self._in_flight.values()) < self.window and (work := next(waiting, None)) is not None:
                if not self._take(work, shards, requests):
                    yield work
        if shards:
            self.process.submit(requests, ("eagle3_open", (shards,)))
        return bool(shards)

    def _take(self, work: ShardWork, shards: list[dict[str, Any]], requests: list[Request]) -> bool:
        """Adds a shard for the workers to open and the requests of its samples; false when it has none to capture."""
        plan, writer = work.writer.plan, work.writer
        members = [m for m, sample_id in enumerate(plan.sample_ids) if sample_id not in writer.rejected]
        for member in members:
            if plan.lengths[member] > self.longest_sample:
                raise RequestError(
                    f"sample {plan.sample_ids[member]}: {plan.lengths[member]} tokens, the engine takes "
                    f"{self.longest_sample}; set hardware.engine_options.max_model_len, or a smaller dataset.max_length"
                )
        if not members:
            return False
        key = f"{plan.name}-{next(self.process.numbers)}"
        ids = [work.members[member].input_ids.astype(np.int32) for member in members]
        shard = {
            "key": key,
            "files": {str(k): [str(file.path), file.data_offset] for k, file in writer.files.items()},
            "members": members,
            "lengths": [plan.lengths[member] for member in members],
            "first_rows": [plan.starts[member] for member in members],
            "input_ids": np.concatenate(ids).tobytes(),
        }
        # Sampling one token is the least that vLLM does; it is never fed back.
        sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        for member, row in zip(members, ids, strict=True):
            requests.append((f"{key}-{member}", row.tolist(), sampling))
            self._in_flight[f"{key}-{member}"] = len(row)
        self._open[key] = ShardProgress(work, members)
        shards.append(shard)
        return True

    def _complete(self, answers: Sequence[Mapping[str, Any]]) -> Iterator[ShardWork]:
        """The shards that every rank has now written."""
        for rank, answer in enumerate(answers):
            if (failure := answer["failure"]) is not None:
                if failure["errno"] is not None:
                    folder = next(iter(self._open.values())).work.writer.temporary
                    raise write_error(OSError(failure["errno"], failure["message"]), folder)
                raise self.process.failure(f"vllm, rank {rank}: {failure['message']}", failure["traceback"])
            for report in answer["finished"]:
                self._open[report["key"]].reports[rank] = report
        for key, progress in list(self._open.items()):
            if len(progress.reports) == len(answers):
                del self._open[key]
                progress.settle()
                yield progress.work
