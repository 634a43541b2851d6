"""Multirun: one child process for each job, a summary that is always up to date, and no work done twice.

Beside the walk. Hydra's sweeper says which jobs there are; the launcher here checks all of them before the first
starts, lets one child capture the union of their layers so that the target is passed once, and then runs each job in
its folder `<output_dir>/sweeps/<hash of config and grid>/<overrides>/`. The same sweep again skips what is done. The
parent never imports torch. Under another launcher (hydra/launcher=joblib, ...) each job is one such child as well.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from eagle3 import layers
from eagle3.artifacts import digest, drop_lock, take_lock, write_json
from eagle3.config import Config
from eagle3.errors import RequestError, StageFailed
from eagle3.progress import duration
from eagle3.runs import WIDTH
from eagle3.validation import explain, known_depth, validate

# Stages that need hidden states of all the layers that a sweep asks for.
READS_STATES = ("extract", "train", "pipeline")
# What does not change which states are captured, layers apart.
AFTER_STATES = ("stage", "layers", "drafter", "trainer", "logger", "export", "evaluate", "inspect", "runs")
HEADLINES = ("loss", "simulated_acceptance_length", "acceptance_length")
MAX_NAME = 200


@dataclass(frozen=True)
class Job:
    """One point of the sweep: its folder's name, its overrides, what they compose to."""

    name: str
    overrides: tuple[str, ...]
    cfg: Config


def sweep_id(*, _root_: DictConfig) -> str:
    """Stands for the configuration and the grid of overrides, in whatever order they were written.

    Hydra hands the cache of the sweep's config down to its jobs' configs, which so keep the sweep's id.
    """
    cache = OmegaConf.get_cache(_root_).setdefault("eagle3.sweep_id", {})
    if "" not in cache:
        config = OmegaConf.to_container(_application(_root_), resolve=False)
        cache[""] = digest({"config": config, "grid": sorted(map(_grid_line, _root_.hydra.overrides.task))})
    return cache[""]


def _grid_line(override: str) -> str:
    """An override with the values that it sweeps over in one order; one that only Hydra can expand stays as it is."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    if not parsed.is_discrete_sweep() or isinstance(parsed.value(), Glob):
        return override
    return f"{parsed.get_key_element()}={','.join(sorted(parsed.sweep_string_iterator()))}"


def _application(root: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])


def job_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """A folder name for each job, from the overrides that differ between them: distinct, of [A-Za-z0-9._=-] only."""
    counts = Counter(override for overrides in jobs for override in set(overrides))
    names = []
    for overrides in jobs:
        own = [o for o in overrides if counts[o] < len(jobs)] or list(overrides)
        text = "-".join(re.sub(r"[^A-Za-z0-9._=-]+", "-", o.lstrip("+").replace("[", "").replace("]", "")) for o in own)
        names.append(text.strip(".-") or "job")
    repeated = Counter(names)
    return [
        name if len(name) <= MAX_NAME and repeated[name] == 1 else f"{name[:MAX_NAME]}-{digest(list(overrides))}"
        for name, overrides in zip(names, jobs, strict=True)
    ]


def union_requests(jobs: Sequence[Job]) -> list[tuple[Job, list[Any]]]:
    """For jobs that differ in layers only, as far as states go: one of them, and all selections that they need.

    A selection is a list of ids, a list of fractions, or None for EAGLE's rule.
    """
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.cfg.stage.name in READS_STATES and job.cfg.inputs.states is None and not job.cfg.dry_run:
            tree = dataclasses.asdict(job.cfg)
            groups.setdefault(digest({k: v for k, v in tree.items() if k not in AFTER_STATES}), []).append(job)
    found = []
    for members in groups.values():
        selections: list[Any] = []
        for job in members:
            own = job.cfg.layers
            for selection in (own.ids if own.ids is not None else own.fractions, *own.also):
                if selection not in selections:
                    selections.append(selection)
        if len(selections) > 1:
            found.append((members[0], selections))
    return found


class ProcessLauncher(Launcher):
    """Runs the jobs of a sweep one after the other, each as a child `python -m eagle3 ...` without -m."""

    failures: ClassVar[list[str]] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra with the sweep's own config."""
        self.context = hydra_context
        self.config = config
        self.folder = Path(config.hydra.sweep.dir).absolute()
        self.console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs what is not done yet. A failed job is noted in `failures` and does not stop the others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.folder / "sweep.lock"
        handle = take_lock(lock, str(self.folder))
        try:
            return self._launch(job_overrides)
        finally:
            drop_lock(lock, handle)

    def _launch(self, job_overrides: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
        jobs = self._plan(job_overrides)
        index = {**_read_json(self.folder / "index.json"), **{job.name: list(job.overrides) for job in jobs}}
        write_json(self.folder / "index.json", index)
        summarize(self.folder, index)
        waiting = [job for job in jobs if not _done(self.folder / job.name)]
        self.console.print(
            f"sweep of {len(jobs)} jobs, {len(jobs) - len(waiting)} of them done already: {self.folder}", soft_wrap=True
        )
        self._capture_union(jobs if waiting else [])
        for number, job in enumerate(jobs, 1):
            if job not in waiting:
                self.console.print(f"[{number}/{len(jobs)}] {job.name}: done already", markup=False)
                continue
            self.console.print(f"[{number}/{len(jobs)}] {job.name}", markup=False)
            summarize(self.folder, index, running=job.name)
            try:
                run_job(self.config.hydra, job.overrides, self.folder / job.name)
            finally:
                summarize(self.folder, index)
        self.console.print(table(summarize(self.folder, index)))
        self.console.print(f"all metrics: {self.folder / 'summary.csv'}", markup=False, soft_wrap=True)
        return [self._returned(job) for job in jobs]

    def _plan(self, job_overrides: Sequence[Sequence[str]]) -> list[Job]:
        """Composes and checks every job before the first one starts."""
        jobs, faults = [], []
        for name, overrides in zip(job_names(job_overrides), job_overrides, strict=True):
            try:
                node = self.context.config_loader.load_sweep_config(self.config, list(overrides))
                cfg = validate(_application(node))
                if cfg.stage.name in READS_STATES and (depth := known_depth(cfg.model)) is not None:
                    layers.select(depth, cfg.layers.ids, cfg.layers.fractions)
                jobs.append(Job(name, tuple(overrides), cfg))
            except RequestError as error:
                faults.append(f"job {name}: {error}")
            except Exception as error:
                faults.append(f"job {name}: {explain(error, overrides)}")
        if faults:
            raise RequestError("\n  ".join([f"no job was started, {len(faults)} are wrong:", *faults]))
        return jobs

    def _capture_union(self, jobs: Sequence[Job]) -> None:
        for job, selections in union_requests(jobs):
            overrides = [o for o in job.overrides if o.split("=")[0] not in ("stage", "layers.also")]
            stages = ["prepare", "extract"] if job.cfg.stage.name == "pipeline" else ["extract"]
            shown = json.dumps(selections, separators=(",", ":"))
            for stage in stages:
                extra = [f"layers.also={shown}"] if stage == "extract" else []
                self.console.print(f"shared by all jobs: stage={stage} {' '.join(extra)}", markup=False)
                code = _wait(child_command(self.config.hydra, [*overrides, f"stage={stage}", *extra]))
                if code:
                    raise _ended(
                        f"stage={stage}, which all jobs need, ended with exit code {code}; see its message above", code
                    )

    def _returned(self, job: Job) -> JobReturn:
        result = _read_json(self.folder / job.name / "result.json")
        if not _done(self.folder / job.name):
            self.failures.append(f"{job.name} ({result.get('error', 'no result')})")
        returned = JobReturn(overrides=list(job.overrides), working_dir=str(self.folder / job.name))
        returned.status = JobStatus.COMPLETED
        returned.return_value = result
        return returned


def child_command(settings: Any, overrides: Sequence[str]) -> list[str]:
    """A job's command line: the config sources of the sweep (`settings` is its `hydra` node), then plain overrides."""
    command = [sys.executable, "-m", "eagle3", "--config-name", str(settings.job.config_name)]
    for source in settings.runtime.config_sources:
        if source.provider == "command-line":
            command += ["--config-dir", source.path]
        elif source.provider == "main" and source.schema == "file":
            command += ["--config-path", source.path]
    search = [o for o in settings.overrides.hydra if o.lstrip("+").startswith("hydra.searchpath")]
    return [*command, *search, *overrides]


def run_job(settings: Any, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs a job in a child process, with `folder` as its run folder, unless it is done; returns its result.json."""
    if not _done(folder):
        _set_aside(folder)
        folder.mkdir(parents=True)
        quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
        code = _wait(child_command(settings, [*overrides, f"hydra.run.dir='{quoted}'"]))
        if code and not (folder / "result.json").exists():
            # It ended before it could open its run, or by a signal that it cannot catch.
            fault = f"the process ended with code {code}"
            write_json(folder / "result.json", {"status": "failed", "exit_code": code, "error": fault, "metrics": {}})
    return _read_json(folder / "result.json")


def run_foreign_job(settings: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """A job of a sweep under another launcher than ours; StageFailed when it fails."""
    folder = Path(settings.runtime.output_dir)
    result = run_job(settings, overrides, folder)
    if not _done(folder):
        raise StageFailed(f"{folder}: {result.get('error', 'the job left no result')}")
    return result


def summarize(folder: Path, index: dict[str, list[str]], running: str | None = None) -> list[dict[str, Any]]:
    """Writes summary.csv from what the job folders say now, and returns its rows."""
    rows = []
    for name, overrides in index.items():
        result = _read_json(folder / name / "result.json")
        status = "running" if name == running else result.get("status", "waiting")
        row = {"job": name, "status": status, "exit_code": result.get("exit_code"), "seconds": result.get("seconds")}
        row |= dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
        rows.append(row | _flat(result.get("metrics") or {}))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    temporary = folder / ".summary.csv"
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, folder / "summary.csv")
    return rows


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= _flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item if not isinstance(item, list) else json.dumps(item)
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The summary on a screen: of its metrics only the headlines, each from the stage that names it first."""
    known = dict.fromkeys(key for row in rows for key in row)
    paths = [next((k for k in known if k.count(".") < 2 and k.rpartition(".")[2] == name), None) for name in HEADLINES]
    shown = [(name, path) for name, path in zip(HEADLINES, paths, strict=True) if path is not None]
    found = Table("job", "status", "time", *(name.replace("_", " ") for name, _ in shown))
    for row in rows:
        seconds = row.get("seconds")
        values = [
            f"{row[path]:.3f}" if isinstance(row.get(path), float) else str(row.get(path, "")) for _, path in shown
        ]
        found.add_row(row["job"], row["status"], duration(seconds) if seconds is not None else "", *values)
    return found


def _ended(message: str, code: int) -> Exception:
    return RequestError(message) if code == 2 else StageFailed(message)


def _done(folder: Path) -> bool:
    return _read_json(folder / "result.json").get("status") == "done"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _set_aside(folder: Path) -> None:
    """Renames what an earlier, unfinished attempt left: a run folder is never used twice."""
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
    elif folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.attempt-{number}")).exists():
            number += 1
        folder.rename(aside)


def _wait(command: Sequence[str]) -> int:
    """Runs a child to its end; when this process is told to stop, the child is stopped first."""
    child = subprocess.Popen(command)
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def register() -> None:
    """Makes the launcher and the sweep folder's name known to Hydra."""
    # OmegaConf 2.4 calls it register_resolver, a name that 2.3 still has for something older.
    renamed = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
    register_resolver: Any = OmegaConf.register_resolver if renamed else OmegaConf.register_new_resolver
    register_resolver("eagle3.sweep_id", sweep_id, replace=True)
    # Hydra takes launchers only under names in `hydra_plugins`, a namespace that is not ours to install into.
    Plugins.instance().class_name_to_class["hydra_plugins.eagle3.ProcessLauncher"] = ProcessLauncher
    ProcessLauncher.failures.clear()
