"""A capture or a generation in which nothing moves any more is told from a slow one and ended (step 3 of the walk).

A network disk that hangs blocks a write for ever; the ring fills, the model waits for it, and no worker answers a call.
So each worker says what it waits for by messages of its own, from a thread that touches no disk, and the driver knows
whether anything moves at all. The log would be no way between them: it often lies on the disk that hangs. A generation
writes nothing, and its engine answers between two steps.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from eagle3.errors import EngineError
from eagle3.progress import duration

if TYPE_CHECKING:
    from eagle3.engines.vllm_process import EngineProcess

SAY_SECONDS = 60.0
# A write is at most 16 MB: a disk that needs longer for each of them is as good as gone. Below the ten minutes after
# which NCCL ends ranks that wait for another one, and says nothing of a disk.
STALL_SECONDS = 480.0
# Between two looks at most this much counts: a process that was stopped for an hour has not waited for one.
LOOK_SECONDS = 5.0

log = logging.getLogger("eagle3")


class DiskWatch:
    """What the threads of one rank do on the disk at the moment; tells `address` when that takes long."""

    def __init__(self, rank: int, address: bytes = b"", say_s: float = SAY_SECONDS) -> None:
        """`address` is a ProgressClock's, which hears what takes longer than half of `say_s`."""
        self._rank, self._address, self._say_s = rank, address, say_s
        self._running: dict[int, tuple[float, float, str, str]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="eagle3-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def doing(self, what: str, path: str) -> Iterator[None]:
        """The calling thread is busy with `path`: opening, writing, flushing, closing."""
        thread = threading.get_ident()
        self._running[thread] = (time.monotonic(), time.time(), what, path)
        try:
            yield
        finally:
            del self._running[thread]

    def close(self) -> None:
        """Ends the watch."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            while not self._ended.wait(self._say_s / 4):
                oldest = min(self._running.copy().values(), default=None)
                if oldest is None or time.monotonic() - oldest[0] < self._say_s / 2:
                    continue
                since = time.strftime("%H:%M:%S", time.localtime(oldest[1]))
                with suppress(OSError):  # nobody listens, or listens on another machine
                    out.sendto(json.dumps([self._rank, since, *oldest[2:]]).encode(), self._address)


class ProgressClock:
    """How long an engine has stood still: `moved` hears of a capture's counters, `check` is to be called about each
    second; a generation takes its ended requests from `finished` instead.
    """

    def __init__(self, process: EngineProcess, clock: Callable[[], float] = time.monotonic) -> None:
        self._process, self._clock = process, clock
        self._counters: object = None
        self._looked, self._still, self._said = clock(), 0.0, 0.0
        self._waits: dict[int, tuple[str, str, str]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind("")  # Linux picks a free name, which is no file
        self.address: bytes = self._socket.getsockname()

    def close(self) -> None:
        """Listens no more."""
        self._socket.close()

    def moved(self, counters: object) -> None:
        """Notes the capture's counters; any change is progress."""
        if counters != self._counters:
            self._counters = counters
            self._restart()

    def finished(self) -> list[tuple[str, list[int], str]]:
        """Requests of a generation that have ended, as EngineProcess hands them out; none when none has in a second and
        the engine is between two steps then. EngineError when that takes eight minutes."""
        ended = self._process.finished(1.0)
        if not ended:
            self._process.ask("alive", waiting=self.check)
        self._restart()
        return ended

    def check(self) -> None:
        """As `say`; EngineError after eight minutes without progress, the engine is ended then."""
        still = self.say()
        if self._still >= STALL_SECONDS:
            raise self._given_up(still)

    def say(self) -> str:
        """Says each minute without progress what is waited for; returns in words for how long."""
        now = self._clock()
        self._still += min(now - self._looked, LOOK_SECONDS)
        self._looked = now
        self._hear()  # each time: the kernel keeps ten messages
        still = f"no token and no byte for {duration(self._still)}"
        if self._still >= self._said + SAY_SECONDS:
            self._said = self._still
            named = [
                f"rank {rank} has been {what} {path} since {when}" for rank, (when, what, path) in self._waits.items()
            ]
            log.warning(
                "vllm: %s; %s", still, "; ".join(named) or "no rank waits for a disk: the model itself stands still"
            )
        return still

    def _restart(self) -> None:
        self._hear()
        self._waits.clear()
        self._looked, self._still, self._said = self._clock(), 0.0, 0.0

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            while True:
                rank, *wait = json.loads(self._socket.recv(2**16))
                self._waits[rank] = tuple(wait)

    def _given_up(self, still: str) -> EngineError:
        for rank, (since, what, path) in self._waits.items():
            self._process.close(gently=False)
            return EngineError(
                f"{path}: rank {rank} has been {what} it since {since}, and there was {still}: this disk does not "
                "answer; look at its mount (`df`, `dmesg`), or choose another output_dir, and run the same command "
                "again: complete shards are kept"
            )
        error = self._process.failure(
            f"vllm: {still}, and no rank waits for a disk: the model itself stands still; look at nvidia-smi for a GPU "
            "that fell out"
        )
        self._process.close(gently=False)
        return error
