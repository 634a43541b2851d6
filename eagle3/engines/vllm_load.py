"""Watching a long load: how far it is, which backends it chose, and an early stop when they are the wrong ones.

A model of half a terabyte loads for many minutes, and its backends stand in the log long before the end.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from eagle3.engines.backends import log_backends, mismatches
from eagle3.errors import EngineError
from eagle3.progress import duration

if TYPE_CHECKING:
    from eagle3.weights import Weights

SHARDS = re.compile(r"Loading [\w ]*checkpoint shards:.*?(\d+)/(\d+)")
LINE_SECONDS, QUIET_SECONDS = 10.0, 60.0

log = logging.getLogger("eagle3")


class LoadWatch:
    """Reads the engine's log as it grows (`feed`); says how the load goes, and raises when it goes wrong."""

    def __init__(
        self,
        weights: Weights | None,
        expected: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        level: int = logging.INFO,
    ) -> None:
        """`expected` are the backends to insist on; `weights` gives the bytes of the shards, None for dummy weights.

        `level` is how loudly it speaks: of engines that load alike one is enough.
        """
        self._bytes = sum(path.stat().st_size for path in set(weights.files.values())) if weights is not None else 0
        self._expected, self._clock, self._level = expected, clock, level
        self._tail = ""
        self._first: tuple[float, int] | None = None
        self._said = self._heard = self._asked = clock()
        self._last = "none"
        self._backends: dict[str, str] = {}

    def feed(self, text: str) -> None:
        """Takes new text of the log. EngineError when it names a backend other than the expected one."""
        whole = self._tail + text
        lines = re.split(r"[\r\n]", whole)
        self._tail = lines[-1]
        self._listen(text)
        for name, value in log_backends(whole).items():
            if self._backends.get(name) != value:
                self._backends[name] = value
                log.log(self._level, "vllm: %s is %s", name, value)
        if problems := mismatches(self._expected, self._backends, partial=True):
            raise EngineError(
                f"hardware.expected_backends: {'; '.join(problems)}, seen in the log while the model loads; stopped "
                "early: change the setting, or hardware.on_backend_mismatch=warn to go on"
            )
        found = SHARDS.findall(whole)
        if found:
            self._progress(int(found[-1][0]), int(found[-1][1]))

    def _listen(self, text: str) -> None:
        """Says each minute that a load is silent, and after what: ranks that wait for each other say nothing."""
        now = self._clock()
        if text:
            self._heard = self._asked = now
            self._last = next(
                (line.strip() for line in reversed(re.split(r"[\r\n]", text)) if line.strip()), self._last
            )
        elif now - self._asked >= QUIET_SECONDS:
            self._asked, silent = now, duration(now - self._heard)
            log.log(
                self._level, "vllm: still loading, its log is silent for %s; last line: %s", silent, self._last[:200]
            )

    def _progress(self, done: int, total: int) -> None:
        now = self._clock()
        if self._first is None:
            self._first = (now, done)
        if now - self._said < LINE_SECONDS and done < total:
            return
        started, at_start = self._first
        self._said = now
        if done <= at_start:
            return
        per_s = (done - at_start) / max(now - started, 1e-9)
        rate = f", {per_s * self._bytes / total / 1e9:.2f} GB/s" if self._bytes else ""
        left = duration((total - done) / per_s)
        log.log(self._level, "vllm: loading, shard %d of %d%s, %s left", done, total, rate, left)
