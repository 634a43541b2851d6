"""Capture by an engine whose workers write the shards themselves: several shards in flight, closed behind its back.

`Capture.run` comes here for such an engine (step 3 of the walk). A shard's checksums, index, fsync and rename happen in
threads of this process, which waits for them when too many are behind: a slow disk slows the engine, nothing grows.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from eagle3.engines import EngineInfo
from eagle3.engines.stalls import SAY_SECONDS
from eagle3.errors import EngineError, StoreError
from eagle3.progress import duration
from eagle3.shards import Layout, ShardPlan, ShardWriter, check_layer_file, data_start, read_rows

if TYPE_CHECKING:
    from eagle3.capture import Capture, Tally
    from eagle3.engines.vllm_capture import ShardWork
    from eagle3.tokens import Sample

CLOSERS, MOST_CLOSING = 4, 8
FIRST_SAMPLES = 10

log = logging.getLogger("eagle3")


@runtime_checkable
class ShardEngine(Protocol):
    """An engine that writes shards by itself; `last_capture` is the report of its last capture (vllm_capture)."""

    last_capture: dict[str, Any]

    @property
    def longest_sample(self) -> int:
        """The most tokens of a sample that it takes."""
        ...

    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    def capture_shards(
        self, work: Iterable[ShardWork], layer_ids: Sequence[int], layout: Layout
    ) -> Iterator[ShardWork]:
        """Yields each shard when all its members are accepted or rejected in its writer."""
        ...


def stream(
    capture: Capture,
    engine: ShardEngine,
    samples: Sequence[Sample],
    missing: Mapping[int, Sequence[int]],
    tally: Tally,
) -> None:
    """Captures the missing layers of each shard; `tally` hears of every sample. Raises what `Capture.run` does."""
    info = engine.info()
    made_by = {"name": info.name, "version": info.version, "dtype": info.dtype}
    # The threads end before what they have not closed is abandoned.
    with ExitStack() as stack, ThreadPoolExecutor(CLOSERS, thread_name_prefix="eagle3-close") as closers:
        closing: deque[tuple[Path, Future[None]]] = deque()
        for layer_ids, numbers in itertools.groupby(missing, key=lambda number: tuple(missing[number])):
            plans = [capture.plans[number] for number in numbers]
            work = _open_shards(capture, engine, samples, plans, layer_ids, stack)
            for done in engine.capture_shards(work, layer_ids, capture.layout):
                settled = capture.settled(done.writer.plan)
                for sample in done.members:
                    reason = done.writer.rejected.get(sample.id)
                    if settled is not None and reason != settled.get(sample.id):
                        raise StoreError(
                            f"{done.writer.folder}: sample {sample.id} came out {reason} now, yet it was stored when "
                            "the shard was made; is this the same target? delete that folder to make the shard again"
                        )
                    tally.note(sample, reason, new=settled is None)
                future = closers.submit(done.writer.close, done.members, made_by)
                closing.append((done.writer.folder, future))
                while closing and (closing[0][1].done() or len(closing) > MOST_CLOSING):
                    _wait_for_disk(*closing.popleft())
        for folder, future in closing:
            _wait_for_disk(folder, future)


def _wait_for_disk(folder: Path, closing: Future[None]) -> None:
    """Waits until a shard is complete on the disk; says each minute that it does."""
    started = time.monotonic()
    while not wait([closing], SAY_SECONDS).done:
        waited = duration(time.monotonic() - started)
        log.warning(
            "extract: the disk has not taken what was written to %s in %s; does its mount answer?", folder, waited
        )
    closing.result()


def _open_shards(
    capture: Capture,
    engine: ShardEngine,
    samples: Sequence[Sample],
    plans: Sequence[ShardPlan],
    layer_ids: Sequence[int],
    stack: ExitStack,
) -> Iterator[Any]:
    """The shards to capture, each opened when the engine asks for it; too long members are rejected."""
    from eagle3.engines.vllm_capture import ShardWork

    for plan in plans:
        members = [samples[row] for row in plan.rows]
        settled = capture.settled(plan)
        writer = stack.enter_context(ShardWriter(capture.folder, capture.layout, plan, layer_ids))
        for sample in members:
            reason = (settled or {}).get(sample.id)
            if reason is None and len(sample.input_ids) > capture.max_length:
                reason = "longer_than_model"
            elif reason is None and len(sample.input_ids) > engine.longest_sample:
                reason = "longer_than_engine"
            if reason is not None:
                writer.reject(sample.id, reason)
        yield ShardWork(writer, members)


def check_first(
    capture: Capture,
    engine: ShardEngine,
    samples: Sequence[Sample],
    missing: Mapping[int, Sequence[int]],
    foretold_bytes: float | None = None,
) -> None:
    """Captures a few samples into a shard of their own and reads it back before the rest may start.

    `foretold_bytes` is what a rehearsal wrote for one token at one layer. EngineError when what came is not the states
    of these samples; that the rows have their token ids is what the workers match them by.
    """
    from eagle3.engines.vllm_capture import ShardWork

    longest = min(capture.max_length, engine.longest_sample)
    rows = (row for number in missing for row in capture.plans[number].rows)
    first = list(itertools.islice((samples[r] for r in rows if len(samples[r].input_ids) <= longest), FIRST_SAMPLES))
    if not first:
        return
    layout, layer_ids, info = capture.layout, next(iter(missing.values())), engine.info()
    plan = ShardPlan(0, tuple(range(len(first))), tuple(s.id for s in first), tuple(len(s.input_ids) for s in first))
    # Among the store's own leftovers, so that a killed run's is cleaned away with them.
    with tempfile.TemporaryDirectory(prefix="shard-first-", suffix=".tmp", dir=capture.folder) as name:
        with ShardWriter(Path(name), layout, plan, layer_ids) as writer:
            for done in engine.capture_shards([ShardWork(writer, first)], layer_ids, layout):
                done.writer.close(first, {"name": info.name, "version": info.version})
        written = sum(rank["bytes"] for rank in engine.last_capture["ranks"]) / plan.tokens / len(layer_ids)
        expected = foretold_bytes or layout.row_bytes
        if written != expected:
            raise EngineError(
                f"{info.name}: the first {len(first)} samples took {written:g} bytes for a token at a layer, expected "
                f"{expected:g} as in the rehearsal; is this the model that its config describes?"
            )
        broken = set(writer.rejected)
        for layer_id in layer_ids:
            path = Path(name) / plan.name / layout.file_name(layer_id)
            if problem := check_layer_file(path, layout, plan, layer_id, checksums=True):
                raise EngineError(f"{info.name}: of the first {len(first)} samples, {path.name} {problem}")
            for sample, start in zip(first, plan.starts, strict=True):
                state = read_rows(path, layout, data_start(path), start, len(sample.input_ids))
                if not state.isfinite().all():
                    broken.add(sample.id)
    if 2 * len(broken) > len(first):
        raise EngineError(
            f"{info.name}: of the first {len(first)} samples {len(broken)} have states that are not finite; nothing "
            "was stored: try `eagle3 stage=rehearse`, or another model.dtype"
        )
