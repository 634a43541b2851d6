"""Offline W&B runs, read back: wandb's own messages out of the log file that wandb-core writes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as messages

BLOCK = 32768
FULL, FIRST, LAST = 1, 2, 4


def payloads(path: Path) -> Iterator[bytes]:
    """The records of a LevelDB log, as wandb uses it: blocks of 32 KiB, a file header of 7 bytes before the first."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(data):  # the last record may be on its way
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        checksum, size, kind = struct.unpack("<IHB", data[place : place + 7])
        body = data[place + 7 : place + 7 + size]
        if len(body) < size:
            return
        assert zlib.crc32(bytes([kind]) + body) == checksum
        place += 7 + size
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            yield parts


class OfflineRun:
    """What one `offline-run-*` folder says."""

    def __init__(self, folder: Path) -> None:
        (file,) = folder.glob("*.wandb")
        self.records = []
        for payload in payloads(file):
            record = messages.Record()
            record.ParseFromString(payload)
            self.records.append(record)

    def _of(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.WhichOneof("record_type") == kind]

    @property
    def run(self) -> Any:
        """The run record: run_id, display_name, project, run_group."""
        return self._of("run")[0]

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration, as it was set and updated."""
        updates = [item for record in [self.run.config, *self._of("config")] for item in record.update]
        return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in updates}

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every logged row; tables and histograms are dicts."""
        rows = []
        for history in self._of("history"):
            row: dict[str, Any] = {}
            for item in history.item:
                *outer, last = item.nested_key or [item.key]
                inner = row
                for key in outer:
                    inner = inner.setdefault(key, {})
                inner[last] = json.loads(item.value_json)
            rows.append(row)
        return rows

    @property
    def axes(self) -> dict[str, str]:
        """Which metric (or pattern of metrics) is drawn over which."""
        return {metric.name or metric.glob_name: metric.step_metric for metric in self._of("metric")}

    @property
    def artifacts(self) -> dict[str, Any]:
        """Logged artifacts by name, without those that wandb makes of tables."""
        return {artifact.name: artifact for artifact in self._of("artifact") if artifact.type != "run_table"}

    @property
    def system_metrics(self) -> set[str]:
        """The names of the machine's measurements."""
        return {item.key for stats in self._of("stats") for item in stats.item}

    @property
    def exit_codes(self) -> list[int]:
        """What the run was finished with."""
        return [record.exit_code for record in self._of("exit")]


def offline_runs(run_folder: Path) -> list[OfflineRun]:
    """The offline runs below a run folder."""
    return [OfflineRun(folder) for folder in sorted((run_folder / "wandb").glob("offline-run-*"))]
