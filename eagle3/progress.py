"""How far along: a bar with rate and time left on a terminal, a plain line every few seconds in a log.

Beside the walk: `Run.progress` hands this to every stage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_SECONDS = 10.0

Advance = Callable[[float], None]


def duration(seconds: float) -> str:
    """A time as people say it: 8.4s, 3m12s, 2h05m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def size_text(size: float) -> str:
    """A number of bytes as people say it: 12 B, 3.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def rate_text(rate: float) -> str:
    """A number per second, with two digits however slow: 1,234.5, 12.3, 0.043."""
    return f"{rate:,.1f}" if rate >= 1 or rate <= 0 else f"{rate:.2g}"


def is_live(console: Console) -> bool:
    """Whether lines on it can be drawn again. A dumb terminal (an editor's shell) gets what a log file gets."""
    return console.is_terminal and not console.is_dumb_terminal


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{rate_text(task.speed)} {self.unit}/s" if task.speed else f"- {self.unit}/s")


class PlainProgress:
    """Progress as log lines: `what 120/300 samples (40%), 12.3 samples/s, 14.6s left`."""

    def __init__(
        self, log: logging.Logger, total: float, unit: str, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.log, self.total, self.unit, self.what, self.clock = log, total, unit, what, clock
        self.done = 0.0
        self.started = self.last_line = clock()

    def advance(self, n: float = 1) -> None:
        """Counts n more units; says so when the last line is old enough."""
        self.done += n
        now = self.clock()
        if now - self.last_line >= LINE_SECONDS and self.done < self.total:
            self.last_line = now
            rate = self.done / max(now - self.started, 1e-9)
            left = duration((self.total - self.done) / rate) if rate > 0 else "?"
            share = 100 * self.done / self.total
            self.log.info(
                "%s %s/%s %s (%.0f%%), %s %s/s, %s left",
                *(self.what, f"{self.done:,.0f}", f"{self.total:,.0f}", self.unit, share),
                *(rate_text(rate), self.unit, left),
            )

    def finish(self) -> None:
        """The closing line, with the rate over the whole time."""
        seconds = self.clock() - self.started
        rate = rate_text(self.done / max(seconds, 1e-9))
        self.log.info(
            "%s %s %s in %s (%s %s/s)", self.what, f"{self.done:,.0f}", self.unit, duration(seconds), rate, self.unit
        )


@contextmanager
def progress(console: Console, log: logging.Logger, total: float, unit: str, what: str) -> Iterator[Advance]:
    """Yields `advance(n)`. The closing line goes to the log in both forms, so that run.log always has the rate."""
    plain = PlainProgress(log, total, unit, what)
    if not is_live(console):
        yield plain.advance
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(unit),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)

            def advance(n: float = 1) -> None:
                plain.done += n
                bar.advance(task, n)

            yield advance
    plain.finish()
