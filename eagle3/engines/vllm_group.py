"""Several copies of the target in vLLM side by side, each on GPUs of its own, as one engine (step 3 of the walk).

A thread for each engine takes shards or prompts from one queue, so that a slow engine holds up no other, and what comes
out is the same for any number of them. They stand and fall together: the first error ends all, at once.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from eagle3.engines import CapturedStates, EngineInfo, Generation, Prompt
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_settings import check_devices
from eagle3.errors import EngineError

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.config import Config
    from eagle3.engines.vllm_capture import ShardWork
    from eagle3.engines.vllm_process import EngineProcess
    from eagle3.shards import Layout
    from eagle3.tokens import Sample

T = TypeVar("T")

log = logging.getLogger("eagle3")


class VllmEngines:
    """`hardware.data_parallel_size` engines as one. A context manager; nothing of them survives `close`.

    A capture or a generation that is broken off, by an error or by whoever reads it, ends the engines.
    """

    def __init__(self, cfg: Config, target: Target, *, log_file: Path | None = None) -> None:
        """Loads all copies at the same time; engine k logs to `<stem of log_file>-k.log`.

        RequestError and EngineError as for one engine, the latter with the number of the engine that failed.
        """
        self.count = cfg.hardware.data_parallel_size
        check_devices(cfg, self.count)
        log_file = log_file or Path(tempfile.gettempdir()) / f"eagle3-engine-{time.time_ns()}.log"
        self.last_capture: dict[str, Any] = {}
        self.slots = cfg.hardware.generate_slots
        self._lock = threading.Lock()
        self._processes: list[EngineProcess] = []
        self._ended = False

        def load(number: int) -> Iterator[tuple[int, VllmEngine]]:
            file = log_file.with_stem(f"{log_file.stem}-{number}")
            yield number, VllmEngine(cfg, target, log_file=file, number=number, started=self._note)

        loaded: dict[int, VllmEngine] = {}
        for number, engine in self._side_by_side(load):
            loaded[number] = engine
            log.info("vllm: %d of %d engines loaded", len(loaded), self.count)
        self.engines = [loaded[number] for number in range(self.count)]

    def __enter__(self) -> VllmEngines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def info(self) -> EngineInfo:
        """What is loaded, as often as its details say."""
        info = self.engines[0].info()
        return dataclasses.replace(info, details={**info.details, "engines": self.count})

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample that the engines take."""
        return self.engines[0].longest_sample

    def capture(self, samples: Sequence[Sample], layer_ids: Sequence[int]) -> Iterator[CapturedStates]:
        """As VllmEngine's, by the first engine: it is for a few samples."""
        return self.engines[0].capture(samples, layer_ids)

    def capture_shards(
        self, work: Iterable[ShardWork], layer_ids: Sequence[int], layout: Layout
    ) -> Iterator[ShardWork]:
        """As VllmEngine's; `last_capture` is of all engines together, its `ranks` one engine after another."""
        shards, started = _Shared(work), time.monotonic()
        yield from self._side_by_side(lambda number: self.engines[number].capture_shards(shards, layer_ids, layout))
        reports = [engine.last_capture for engine in self.engines]
        self.last_capture = _together(reports, time.monotonic() - started)

    def generate(
        self, prompts: Sequence[Prompt], *, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[Generation]:
        """As VllmEngine's: which engine answers a prompt changes nothing."""
        self.engines[0].check_room(prompts)
        waiting = _Shared(prompts)
        # No engine takes more than its part at first, however few there are.
        most = min(2 * self.slots, -(-len(prompts) // self.count))
        yield from self._side_by_side(
            lambda number: self.engines[number].generate_from(
                waiting, most, temperature=temperature, seed=seed, stop_ids=stop_ids
            )
        )

    def close(self) -> None:
        """Ends the engines' processes; GPU memory is free afterwards."""
        with ThreadPoolExecutor(self.count) as pool:
            list(pool.map(VllmEngine.close, self.engines))

    def _note(self, process: EngineProcess) -> None:
        """A process of an engine was started, which is too late once all are to end."""
        with self._lock:
            self._processes.append(process)
            if self._ended:
                raise EngineError("vllm: another engine has failed")

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.kill()

    def _side_by_side(self, job: Callable[[int], Iterable[T]]) -> Iterator[T]:
        """What `job` yields for each engine's number, each in a thread, as it comes.

        The first error of one of them, or of whoever waits here, ends all engines, waits for the threads and is raised.
        """
        # So that whoever falls behind in reading slows the engines.
        found: queue.Queue[tuple[int, list[T] | BaseException]] = queue.Queue(self.count)

        def work(number: int) -> None:
            try:
                for item in job(number):
                    found.put((number, [item]))
                found.put((number, []))
            except BaseException as error:
                found.put((number, error))

        threads = [
            threading.Thread(target=work, args=(number,), name=f"eagle3-engine-{number}", daemon=True)
            for number in range(self.count)
        ]
        running = self.count
        try:
            for thread in threads:
                thread.start()
            while running:
                number, outcome = found.get()
                if isinstance(outcome, EngineError):
                    raise EngineError(f"engine-{number} of {self.count}: {outcome}") from outcome
                if isinstance(outcome, BaseException):
                    raise outcome
                running -= not outcome
                yield from outcome
        except BaseException:
            self._end()
            while any(thread.is_alive() for thread in threads):
                try:
                    found.get(timeout=0.1)
                except queue.Empty:
                    continue
            for process in self._processes:
                process.close(gently=False)
            raise


def _together(reports: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """The report of engines that ran side by side for `seconds`, from the arming of all to the end of all."""
    armed = min(report["arm_seconds"] for report in reports)
    return {
        "tokens": sum(report["tokens"] for report in reports),
        "seconds": seconds - armed,
        "arm_seconds": armed,
        "tail_seconds": max(report["tail_seconds"] for report in reports),
        "ranks": [rank for report in reports for rank in report["ranks"]],
    }


class _Shared(Generic[T]):
    """An iterator that several threads take from."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items, self._lock = iter(items), threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)
