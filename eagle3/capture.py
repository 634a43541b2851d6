"""Capture: which samples, which layers, in which shards; drives an engine into the store and resumes (step 3).

A shard is the unit of work: its members are captured in batches that depend on the plan alone, so a run that was
killed and resumed makes the same bytes as one that was not. What is on disk is asked for afresh at every start: a
shard counts for the layers whose files in it are whole.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.disk_room import free_bytes
from eagle3.engines import CapturedStates, Engine
from eagle3.errors import RequestError, StageFailed, StoreError
from eagle3.progress import Advance, size_text
from eagle3.shard_index import INDEX_NAME, ShardIndex, complete_index, index_bytes
from eagle3.shards import Layout, ShardPlan, ShardWriter, check_layer_file
from eagle3.streaming import ShardEngine, check_first, stream

if TYPE_CHECKING:
    from eagle3.tokens import Sample

log = logging.getLogger("eagle3")


@dataclass
class CaptureCount:
    """What one run captured: `tokens` and `seconds` of it, samples left out by reason.

    `first_seconds` went by until an engine that writes shards by itself had shown its first states to be right.
    """

    tokens: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)


class Tally:
    """Counts samples as they are settled. StageFailed when more are lost than allowed."""

    def __init__(self, lost: Counter[str], max_failed: int, advance: Advance) -> None:
        """`lost` are those of earlier runs, by reason; `advance` hears of every token."""
        self.count = CaptureCount()
        self._lost, self._max_failed, self._advance = lost, max_failed, advance

    def note(self, sample: Sample, reason: str | None, *, new: bool) -> None:
        """A sample is stored (no reason) or left out; `new` unless its shard settled that in an earlier run."""
        if reason is not None and new:
            self.count.rejected[reason] += 1
            self._lost[reason] += 1
        if self._lost.total() > self._max_failed:
            raise StageFailed(
                f"store.max_failed_fraction: {self._lost.total()} samples could not be captured "
                f"({_reasons(self._lost)}; the last one {sample.id}), allowed are {self._max_failed}; complete shards "
                "are kept: allow more, or look at the samples with `eagle3 stage=inspect`"
            )
        self.count.tokens += len(sample.input_ids) if reason is None else 0
        self._advance(len(sample.input_ids))


@dataclass(frozen=True)
class Capture:
    """What a states folder shall hold: these layers of these shards. The target reads up to `max_length` tokens."""

    folder: Path
    layout: Layout
    plans: tuple[ShardPlan, ...]
    layer_ids: tuple[int, ...]
    max_length: int

    def missing(self, unproven: Collection[int] = ()) -> dict[int, list[int]]:
        """Layers to capture by shard number. All rows of `unproven` layers are read, of others sizes and headers."""
        found = {plan.number: self._missing_in(plan, unproven) for plan in self.plans}
        return {number: layer_ids for number, layer_ids in found.items() if layer_ids}

    def faults(self, plan: ShardPlan) -> list[str]:
        """Everything that is wrong with a shard's files, all checksums read."""
        found: list[str] = []
        try:
            self._index(plan)
        except StoreError as error:
            found.append(str(error))
        for layer_id in self.layer_ids:
            path = self._file(plan, layer_id)
            if problem := check_layer_file(path, self.layout, plan, layer_id, checksums=True):
                found.append(f"{path}: {problem}")
        return found

    def size_bytes(self, missing: Mapping[int, Sequence[int]] | None = None) -> int:
        """Exact bytes of the files that are still to be written; of all of them when `missing` is not given."""
        wanted = {plan.number: self.layer_ids for plan in self.plans} if missing is None else missing
        return sum(
            sum(self.layout.file_bytes(self.plans[number], k) for k in layer_ids) + index_bytes(self.plans[number])
            for number, layer_ids in wanted.items()
        )

    def tokens(self, missing: Mapping[int, Sequence[int]] | None = None) -> int:
        """Tokens that go through the target; of all shards when `missing` is not given."""
        return sum(self.plans[number].tokens for number in (range(len(self.plans)) if missing is None else missing))

    def check_space(self, missing: Mapping[int, Sequence[int]], margin: float) -> None:
        """RequestError when the disk has less room than the missing files and a margin (a fraction of them)."""
        free, needed = free_bytes(self.folder), int(self.size_bytes(missing) * (1 + margin))
        if needed > free:
            raise RequestError(
                f"{self.folder}: extraction will write {size_text(needed)} (margin included), but only "
                f"{size_text(free)} are free; make room, choose another output_dir, or store fewer layers or samples"
            )

    def run(
        self,
        engine: Engine,
        samples: Sequence[Sample],
        missing: Mapping[int, Sequence[int]],
        max_failed: int,
        advance: Advance,
        foretold_bytes: float | None = None,
    ) -> CaptureCount:
        """Captures what is missing; `samples` is the whole prepared set, `advance` hears of every token.

        `foretold_bytes`: what a rehearsal wrote for one token at one layer; the first samples are held against it.
        Raises StageFailed when more than `max_failed` samples of the store are lost or the disk is full, RequestError
        when the folder cannot be written, StoreError when the engine loses a sample.
        """
        for temporary in self.folder.glob("shard-*.tmp"):
            # What a killed run was writing.
            shutil.rmtree(temporary)
        started = time.monotonic()
        info = engine.info()
        tally = Tally(Counter(r for plan in self.plans for r in self._rejected(plan).values()), max_failed, advance)
        for number in missing:
            if self.settled(self.plans[number]) is not None:
                self._warn_of_versions(self.plans[number], f"{info.name} {info.version}")
        if isinstance(engine, ShardEngine):
            check_first(self, engine, samples, missing, foretold_bytes)
            tally.count.first_seconds = time.monotonic() - started
            stream(self, engine, samples, missing, tally)
            missing = {}
        for number, layer_ids in missing.items():
            plan = self.plans[number]
            settled = self.settled(plan)
            members = [samples[row] for row in plan.rows]
            with ShardWriter(self.folder, self.layout, plan, layer_ids) as writer:
                for sample, reason in self._capture_shard(writer, engine, members, settled):
                    tally.note(sample, reason, new=settled is None)
                writer.close(members, {"name": info.name, "version": info.version, "dtype": info.dtype})
        tally.count.seconds = time.monotonic() - started
        return tally.count

    def _capture_shard(
        self, writer: ShardWriter, engine: Engine, members: Sequence[Sample], settled: Mapping[str, str] | None
    ) -> Iterator[tuple[Sample, str | None]]:
        """Writes or rejects each member; yields it with the reason.

        `settled` tells who was rejected when the shard was made; nobody new can be, where it only gains layers:
        StoreError.
        """
        by_id = {sample.id: sample for sample in members}
        for sample in members:
            reason = (settled or {}).get(sample.id)
            if reason is None and len(sample.input_ids) > self.max_length:
                reason = "longer_than_model"
            if reason is not None:
                writer.reject(sample.id, reason)
                yield sample, reason
        wanted = [sample for sample in members if sample.id not in writer.rejected]
        for caught in engine.capture(wanted, list(writer.files)):
            sample = by_id[caught.sample_id]
            reason = _fault(caught, len(sample.input_ids), self.layout.hidden_size)
            if reason is None:
                writer.write(sample.id, caught.states)
            elif settled is None:
                writer.reject(sample.id, reason)
            else:
                raise StoreError(
                    f"{writer.folder}: sample {sample.id} came out {reason} now, yet it was stored when the shard was "
                    "made; is this the same target and engine? delete that folder to make the shard again"
                )
            yield sample, reason

    def kept(self) -> tuple[int, int, dict[str, str]]:
        """Samples and tokens in the complete shards, and why others are missing, by sample id."""
        indexes = [self._index(plan) for plan in self.plans]
        rejected = {key: reason for index in indexes for key, reason in index.rejected.items()}
        return sum(len(index.sample_ids) for index in indexes), sum(int(i.lengths.sum()) for i in indexes), rejected

    def drop_other_layers(self) -> None:
        """Removes layer files that are not asked for: what a killed run with another selection left behind."""
        wanted = {INDEX_NAME, *(self.layout.file_name(k) for k in self.layer_ids)}
        for plan in self.plans:
            for path in (self.folder / plan.name).iterdir():
                if path.name not in wanted:
                    path.unlink()

    def _missing_in(self, plan: ShardPlan, unproven: Collection[int]) -> list[int]:
        try:
            self._index(plan)
        except StoreError:
            return list(self.layer_ids)
        return [
            k
            for k in self.layer_ids
            if check_layer_file(self._file(plan, k), self.layout, plan, k, checksums=k in unproven)
        ]

    def _file(self, plan: ShardPlan, layer_id: int) -> Path:
        return self.folder / plan.name / self.layout.file_name(layer_id)

    def _index(self, plan: ShardPlan) -> ShardIndex:
        return complete_index(self.folder / plan.name, plan)

    def settled(self, plan: ShardPlan) -> dict[str, str] | None:
        """Who was rejected, and why, where the shard has a good index and only gains layers; None for a new shard."""
        try:
            return self._index(plan).rejected
        except StoreError:
            return None

    def _rejected(self, plan: ShardPlan) -> dict[str, str]:
        return self.settled(plan) or {}

    def _warn_of_versions(self, plan: ShardPlan, running: str) -> None:
        engine = self._index(plan).engine
        made_by = f"{engine.get('name')} {engine.get('version')}"
        if made_by != running:
            log.warning("%s: was made by %s, its new layers come from %s", plan.name, made_by, running)


def _fault(caught: CapturedStates, length: int, hidden_size: int) -> str | None:
    """Why a sample's states must not be stored: rows are missing, or not all numbers are finite."""
    if any(tuple(state.shape) != (length, hidden_size) for state in caught.states.values()):
        return "wrong_shape"
    return None if all(bool(state.isfinite().all()) for state in caught.states.values()) else "non_finite"


def _reasons(count: Counter[str]) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in sorted(count.items()))
