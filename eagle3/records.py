"""What run folders say: results, curves and lineage, read for summaries and reports (beside the walk).

Everything here reads files as they are at that moment: one that is absent or torn reads as empty, and nothing imports
torch, so that a sweep's parent can look at its jobs while they work.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

# The stages whose metrics hold a headline, when the run was a pipeline; else they are the run's own.
HEADLINES = {
    "acceptance_length": ("evaluate",),
    "simulated_acceptance_length": ("train", "evaluate"),
    "loss": ("train",),
    "tokens_per_s": ("train",),
}
INDEX = "index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is none, or not yet a whole one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def sweep_of(folder: Path) -> Path | None:
    """The sweep that a run folder is a job of."""
    return folder.parent if folder.name in read_json(folder.parent / INDEX) else None


def unfinished(provenance: dict[str, Any]) -> str:
    """What a run without a result is: on this host its process runs or was killed; elsewhere nobody can tell."""
    if provenance.get("host", {}).get("name") != os.uname().nodename:
        return "no result"
    try:
        os.kill(int(provenance.get("process", 0)) or -1, 0)
    except (ProcessLookupError, ValueError):
        return "killed"
    except PermissionError:
        pass
    return "running"


class Record:
    """One run folder. `name` and `overrides` are those of a sweep's job."""

    def __init__(self, folder: Path, overrides: tuple[str, ...] = ()) -> None:
        self.folder, self.name, self.overrides = folder, folder.name, overrides

    @cached_property
    def result(self) -> dict[str, Any]:
        """result.json."""
        return read_json(self.folder / "result.json")

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """provenance.json."""
        return read_json(self.folder / "provenance.json")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty when the run never began."""
        path = self.folder / "config.yaml"
        found = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
        return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}

    @property
    def status(self) -> str:
        """done, dry run, failed, refused, interrupted; running or killed; waiting before it has begun."""
        if "status" in self.result:
            return str(self.result["status"])
        if self.provenance:
            return unfinished(self.provenance)
        return "starting" if self.folder.is_dir() else "waiting"

    @property
    def metrics(self) -> dict[str, Any]:
        """What the stage returned."""
        return self.result.get("metrics") or {}

    def headline(self, name: str) -> Any:
        """One of `HEADLINES`, wherever this run's stage put it; None when it has none."""
        for stage in (None, *HEADLINES[name]):
            found = self.metrics if stage is None else self.metrics.get(stage)
            if isinstance(found, dict) and found.get(name) is not None:
                return found[name]
        return None

    def metrics_of(self, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where a stage's metrics may be: under its name, as a pipeline has them, or among the run's own."""
        return self.metrics.get(stage) or {}, self.metrics

    @property
    def objective(self) -> float | None:
        """What a search over jobs maximizes: the acceptance length, the simulated one where nothing was decoded."""
        real = self.headline("acceptance_length")
        return real if real is not None else self.headline("simulated_acceptance_length")

    @property
    def lineage(self) -> list[dict[str, str]]:
        """The artifacts that it read and wrote: kind, id, folder and `way` (read or wrote)."""
        found = self.provenance.get("artifacts", {})
        return [{**entry, "way": way} for way in ("read", "wrote") for entry in found.get(way, [])]

    def artifact(self, kind: str) -> Path | None:
        """The folder of the last artifact of a kind that it read or wrote, if it is still there."""
        folders = [Path(entry["folder"]) for entry in self.lineage if entry["kind"] == kind]
        return next((folder for folder in reversed(folders) if folder.is_dir()), None)

    @cached_property
    def layer_ids(self) -> list[int] | None:
        """The layers that its drafter reads."""
        drafter = self.artifact("drafter")
        return None if drafter is None else read_json(drafter / "manifest.json").get("layer_ids")

    @property
    def given(self) -> dict[str, str]:
        """What its overrides set, by field or group, as they were written."""
        return dict(o.lstrip("+").split("=", 1) for o in self.overrides if "=" in o)

    @property
    def layers(self) -> str:
        """The layers as the command line or the configuration named them."""
        given = self.given
        used = self.config.get("layers") or {}
        return given.get("layers.ids") or given.get("layers") or str(used.get("ids") or used.get("name", ""))

    def positions(self) -> tuple[list[float], bool] | None:
        """The share of drafts accepted at each position among those whose earlier drafts were, and whether it was
        measured by decoding (else on validation samples)."""
        for found in self.metrics_of("evaluate"):
            if rates := found.get("per_position"):
                return [rate for rate in rates if rate is not None], True
        for found in self.metrics_of("train"):
            values = found.get("validation") or {}
            steps = sorted(int(m[1]) for key in values if (m := re.fullmatch(r"accuracy_conditional/step_(\d+)", key)))
            if steps:
                return [values[f"accuracy_conditional/step_{step}"] for step in steps], False
        return None

    @cached_property
    def prompts(self) -> dict[str, tuple[int, int]]:
        """Accepted drafts and rounds of each prompt that was decoded and did not loop; empty where a server counted."""
        found = {}
        for record in read_json(self.folder / "evaluation.json").get("records", []):
            accepted = record.get("accepted_by_round")
            if accepted and not record.get("looping"):
                found[f"{record['set']}/{record['key']}"] = (sum(accepted), len(accepted))
        return found

    @cached_property
    def _points(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, those of earlier attempts at the same job first."""
        folders = [*sorted(attempts(self.folder), key=lambda path: int(path.name.rpartition("-")[2])), self.folder]
        return [line for folder in folders for line in _lines(folder / "metrics.jsonl")]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """A metric over optimizer steps; where an attempt repeated a step, the later value."""
        points = {line["step"]: line[name] for line in self._points if "step" in line and line.get(name) is not None}
        return sorted(points.items())

    def seconds_of(self) -> dict[str, float]:
        """How long each stage of a pipeline took; the run as a whole when it was one stage."""
        parts = self.provenance.get("seconds_of")
        if parts:
            return dict(parts)
        seconds = self.result.get("seconds")
        return {} if seconds is None else {str(self.result.get("stage", "run")): seconds}

    def bytes_made(self) -> int:
        """The size of its drafter and its export."""
        return self.bytes_of("drafter") + self.bytes_of("export")

    def bytes_of(self, kind: str) -> int:
        """The size of the artifact of a kind that it made or read."""
        folder = self.artifact(kind)
        return 0 if folder is None else folder_bytes(folder)

    def bytes_read(self) -> int:
        """The size of the stored states that its drafter was trained on: its layers and the final state."""
        states = self.artifact("states")
        if states is None or self.layer_ids is None:
            return 0
        names = [*(f"layer-{layer:03d}.safetensors" for layer in self.layer_ids), "final.safetensors"]
        return sum(path.stat().st_size for name in names for path in states.glob(f"shard-*/{name}"))


def attempts(folder: Path) -> list[Path]:
    """Where a job's earlier, unfinished attempts lie."""
    pattern = re.compile(re.escape(folder.name) + r"\.attempt-\d+")
    return [path for path in folder.parent.iterdir() if pattern.fullmatch(path.name)] if folder.parent.is_dir() else []


def last_point(folder: Path) -> dict[str, Any]:
    """The newest line of a run's metrics.jsonl."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 16384, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return {}


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder, links left out."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # cut short by a kill
            continue
