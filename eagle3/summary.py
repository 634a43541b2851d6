"""A sweep as it stands: a row for each job, summary.csv, and what the terminal shows meanwhile (beside the walk).

One thread of the sweep's parent looks at the job folders, whoever runs the jobs there: this machine, joblib's workers
or a cluster that shares the file system. A job that ends is in summary.csv within a second. A terminal gets a live
table, a log file plain lines.
"""

from __future__ import annotations

import csv
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from eagle3.progress import duration, is_live
from eagle3.records import HEADLINES, Record, last_point

POLL_S = 0.5
LINE_S = 60.0
FILE = "summary.csv"

Index = Mapping[str, Sequence[str]]


def rows(folder: Path, index: Index) -> list[dict[str, Any]]:
    """One row for each job: the headlines, then its overrides, then every metric under its full name."""
    found = []
    for name, overrides in index.items():
        record = Record(folder / name, tuple(overrides))
        row: dict[str, Any] = {
            "job": name,
            "status": record.status,
            "layers": record.layers,
            "layer_ids": record.layer_ids,
            **{headline: record.headline(headline) for headline in HEADLINES},
            "seconds": record.result.get("seconds"),
            "exit_code": record.result.get("exit_code"),
            "folder": str(record.folder),
            "error": record.result.get("error"),
        }
        row |= {key: value for key, value in record.given.items() if key not in row}
        found.append(row | {key: value for key, value in _flat(record.metrics).items() if key not in row})
    return found


def write(folder: Path, index: Index) -> list[dict[str, Any]]:
    """Replaces summary.csv by what the job folders say now; returns its rows."""
    found = rows(folder, index)
    _replace(folder, found)
    return found


def _replace(folder: Path, found: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in found for key in row))
    temporary = folder / f".{FILE}"
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in found)
    os.replace(temporary, folder / FILE)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= _flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item
    return found


def table(found: Sequence[dict[str, Any]], steps: Mapping[str, dict[str, Any]] | None = None) -> Table:
    """The summary on a screen; `steps` has the newest metrics of jobs that are at work."""
    shown = [name for name in HEADLINES if any(row.get(name) is not None for row in found)]
    screen = Table("job", "status", "time", *(name.replace("_", " ") for name in shown))
    for row in found:
        seconds = row.get("seconds")
        status = row["status"]
        if point := (steps or {}).get(row["job"]):
            status += f", {_progress(point)}"
        values = [_number(row.get(name)) for name in shown]
        screen.add_row(row["job"], status, duration(seconds) if seconds is not None else "", *values)
    return screen


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _progress(point: dict[str, Any]) -> str:
    loss = next((point[key] for key in ("train/loss", "validation/loss") if key in point), None)
    return f"step {point.get('step', '?')}" + ("" if loss is None else f", loss {loss:.3f}")


class Watch:
    """Keeps summary.csv and the screen up to date while jobs run; used as a context manager."""

    def __init__(self, folder: Path, index: Index, jobs: Sequence[str], console: Console) -> None:
        self.folder, self.index, self.jobs, self.console = folder, index, list(jobs), console
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="sweep-watch", daemon=True)
        self._seen: dict[str, str] = {}
        self._rows: list[dict[str, Any]] = []
        self._state: dict[str, Any] = {}
        self._last_line = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if is_live(console) else None

    def __enter__(self) -> Watch:
        self._rows = write(self.folder, self.index)
        self._seen = {row["job"]: row["status"] for row in self._rows}
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look(final=True)
        if self._live is not None:
            self._live.stop()

    def _look_on(self) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(OSError):  # a full disk, say: jobs go on, and the end of the sweep, which writes again, tells
                self._look()

    def _look(self, final: bool = False) -> None:
        """Rewrites what has changed."""
        state = {name: _state(self.folder / name) for name in self.index}
        if state != self._state or final:
            self._read_again(state, final)
            self._announce()
        steps = {row["job"]: last_point(self.folder / row["job"]) for row in self._rows if row["status"] == "running"}
        steps = {name: point for name, point in steps.items() if point}
        if self._live is not None:
            self._live.update(table(self._rows, steps), refresh=True)
        elif steps and time.monotonic() - self._last_line >= LINE_S:
            self._last_line = time.monotonic()
            self._say("; ".join(f"{name} at {_progress(point)}" for name, point in steps.items()))

    def _read_again(self, state: dict[str, Any], final: bool) -> None:
        """Only what has changed or is at work: a sweep of a thousand jobs would read a million."""
        known = {row["job"]: row for row in self._rows}
        old = {name for name in state if state[name] == self._state.get(name) and known[name]["status"] != "running"}
        new = rows(self.folder, {name: self.index[name] for name in state if final or name not in old})
        known |= {row["job"]: row for row in new}
        self._state, self._rows = state, [known[name] for name in self.index]
        _replace(self.folder, self._rows)

    def _announce(self) -> None:
        """A line for each job that began or ended; a live table shows it by itself."""
        for row in self._rows:
            name, status = row["job"], row["status"]
            before, self._seen[name] = self._seen.get(name), status
            if status == before or status in ("waiting", "starting") or self._live is not None:
                continue
            place = f"[{self.jobs.index(name) + 1}/{len(self.jobs)}] " if name in self.jobs else ""
            self._say(f"{place}{name}: {status}{_outcome(row)}")
            self._last_line = time.monotonic()

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _outcome(row: Mapping[str, Any]) -> str:
    if row["status"] == "running":
        return ""
    words = "" if row.get("seconds") is None else f" in {duration(row['seconds'])}"
    measured = [f"{name.replace('_', ' ')} {_number(row[name])}" for name in HEADLINES if row.get(name) is not None]
    if row.get("error"):
        return f"{words}: {row['error']}"
    return words + (": " + ", ".join(measured) if measured else "")


def _state(folder: Path) -> Any:
    """What changes when a job begins or ends."""
    times = []
    for name in ("provenance.json", "result.json"):
        try:
            times.append((folder / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return times
