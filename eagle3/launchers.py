"""Hydra's launchers as a sweep uses them: everything checked and captured before the first job, and a summary after.

Beside the walk. Ours runs one child after the other. Every other launcher that Hydra finds (joblib, submitit, ray) gets
the same around it, and decides only where and when the children run.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from eagle3 import layers, summary
from eagle3.artifacts import digest, drop_lock, take_lock, write_json
from eagle3.children import child_command, ended_well, is_done, run_job, wait
from eagle3.errors import RequestError, StageFailed
from eagle3.overrides import quoted
from eagle3.records import INDEX, Record, read_json
from eagle3.runs import WIDTH
from eagle3.sweep import READS_STATES, Job, application, job_names, override_key, searched, sweep_id, union_requests
from eagle3.validation import explain, known_depth, validate


class SweepLauncher(Launcher):
    """What every launcher of a sweep does; `_run` is how the jobs that are not done yet come to run."""

    # Whether jobs can be at work together, and so must not find that they have to make the same states.
    parallel: ClassVar[bool] = False
    # The launcher of this process's sweep: `conclude` asks it how the sweep ended.
    current: ClassVar[SweepLauncher | None] = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra with the sweep's own config."""
        self.context = hydra_context
        self.config = config
        self.folder = Path(config.hydra.sweep.dir).absolute()
        self.console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
        self.index: dict[str, list[str]] = {}
        self.jobs: dict[str, Job] = {}
        self._captured: set[str] = set()
        SweepLauncher.current = self

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs what is not done yet, and returns what each job is worth to a search; a failed job stops no other.

        A sweeper that searches calls this again and again.
        """
        try:
            jobs = self._plan(job_overrides)
        except RequestError:
            self._drop_folder()
            raise
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.folder / "sweep.lock"
        handle = take_lock(lock, str(self.folder))
        try:
            self.jobs |= {job.name: job for job in jobs}
            self.index = {**read_json(self.folder / INDEX), **{job.name: list(job.overrides) for job in jobs}}
            write_json(self.folder / INDEX, self.index)
            self._work(list({job.name: job for job in jobs}.values()), initial_job_idx)
        finally:
            summary.write(self.folder, self.index)
            drop_lock(lock, handle)
        self._check_failure_rate(jobs)
        return [self._returned(job) for job in jobs]

    def _drop_folder(self) -> None:
        """Takes back what Hydra wrote before it asked: a sweep that never began leaves nothing to wonder about."""
        if self.folder.is_dir() and {path.name for path in self.folder.iterdir()} == {"multirun.yaml"}:
            (self.folder / "multirun.yaml").unlink()
            for folder in (self.folder, *self.folder.parents[:2]):
                with suppress(OSError):  # something else is in it
                    folder.rmdir()

    def _work(self, jobs: list[Job], first: int) -> None:
        waiting = [job for job in jobs if not is_done(self.folder / job.name)]
        if first == 0:
            done = f", {len(jobs) - len(waiting)} of them done already" if len(waiting) < len(jobs) else ""
            self._say(f"sweep of {len(jobs)} jobs{done}: {self.folder}")
        if waiting:
            self._capture_union(jobs)
            with summary.Watch(self.folder, self.index, list(self.jobs), self.console):
                self._run(waiting, first)

    def _run(self, jobs: Sequence[Job], first: int) -> None:
        raise NotImplementedError

    def conclude(self) -> list[str]:
        """The end of the sweep: table, summary, report. Returns the jobs that failed, each with its error."""
        if not self.index:
            return []
        self.console.print(summary.table(summary.write(self.folder, self.index)))
        self._say(f"all metrics: {self.folder / summary.FILE}")
        if not self.config.dry_run:
            self._report()
        records = [Record(self.folder / name) for name in self.jobs if not ended_well(self.folder / name)]
        return [f"{record.name} ({record.result.get('error', 'no result')})" for record in records]

    def _report(self) -> None:
        try:
            from eagle3.report import write_report

            self._say(f"report: {write_report(self.folder)}")
        except Exception as error:  # the results are there; a picture must not turn them into a failure
            self._say(f"warning: no report ({type(error).__name__}: {error}); try `eagle3 stage=report`")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _plan(self, job_overrides: Sequence[Sequence[str]]) -> list[Job]:
        """Composes and checks every job before the first one starts."""
        if str(self.config.hydra.sweeper.get("direction")).rpartition(".")[2] == "minimize":
            raise RequestError(
                "hydra.sweeper.direction: found minimize, expected maximize: what a job returns is its acceptance "
                "length; add hydra.sweeper.direction=maximize"
            )
        self._check_tasks()
        jobs, faults = [], []
        for name, overrides in zip(job_names(job_overrides, self._typed()), job_overrides, strict=True):
            try:
                jobs.append(self._job(name, overrides))
            except RequestError as error:
                faults.append(f"job {name}: {error}")
            except Exception as error:
                faults.append(f"job {name}: {explain(error, overrides)}")
        if faults:
            raise RequestError("\n  ".join([f"no job was started, {len(faults)} are wrong:", *faults]))
        return jobs

    def _check_tasks(self) -> None:
        settings = self.config.hydra.launcher
        for field in ("nodes", "tasks_per_node"):
            if (found := settings.get(field, 1)) > 1:
                raise RequestError(
                    f"hydra.launcher.{field}: found {found}, expected 1: a job is one process on one machine, which "
                    "starts the ranks of its training itself; leave it out and set hardware.devices"
                )

    def _job(self, name: str, overrides: Sequence[str]) -> Job:
        node = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        cfg = validate(application(node))
        if cfg.stage.name in READS_STATES and (depth := known_depth(cfg.model)) is not None:
            layers.select(depth, cfg.layers.ids, cfg.layers.fractions)
        return Job(name, tuple(overrides), cfg)

    def _typed(self) -> list[str]:
        return [str(override) for override in self.config.hydra.overrides.task]

    def _searched(self, job: Job) -> list[Job]:
        """What `job` would be with each of the layers that the sweep will ever try; a search tells them one by one."""
        found = []
        for override in [*self._typed(), *searched(self.config)]:
            key, sweeps = override_key(override)
            if not sweeps or key not in ("layers", "layers.ids", "layers.fractions"):
                continue
            (parsed,) = OverridesParser.create(self.context.config_loader).parse_overrides([override])
            if parsed.is_discrete_sweep():
                rest = [o for o in job.overrides if o.lstrip("+").split("=")[0] != key]
                words = [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
                found += [self._job("", [*rest, word]) for word in words]
        return found

    def _capture_union(self, jobs: Sequence[Job]) -> None:
        """Makes the states that the jobs share, prepared set included; of a dry run's, says so."""
        for job, selections in union_requests([*jobs, *self._searched(jobs[0])], self.parallel):
            shown = json.dumps(selections, separators=(",", ":"))
            overrides = [o for o in job.overrides if o.split("=")[0] not in ("stage", "layers.also")]
            request = digest([sorted(o for o in overrides if o in self._typed()), sorted(map(str, selections))])
            if request in self._captured:
                continue
            for stage in ("prepare", "extract") if job.cfg.inputs.prepared is None else ("extract",):
                extra = [f"layers.also={shown}"] if stage == "extract" else []
                if job.cfg.dry_run:
                    self._say(f"dry run: shared by all jobs and made first: stage={stage} {' '.join(extra)}")
                    continue
                self._say(f"shared by all jobs: stage={stage} {' '.join(extra)}")
                code = wait(child_command(self.config.hydra, [*overrides, f"stage={stage}", *extra]))
                if code:
                    raise _ended(
                        f"stage={stage}, which all jobs need, ended with exit code {code}; see its message above", code
                    )
            self._captured.add(request)

    def _check_failure_rate(self, jobs: Sequence[Job]) -> None:
        """Ends a search, by SearchEnded, when too many jobs of a batch failed. The default of Optuna's sweeper, 0.0,
        does not count: a failing job stops no other unless somebody asks for it."""
        limit = self.config.hydra.sweeper.get("max_failure_rate")
        typed = any("hydra.sweeper.max_failure_rate=" in word for word in self.config.hydra.overrides.hydra)
        failed = sum(not ended_well(self.folder / job.name) for job in jobs)
        if limit is not None and (limit or typed) and failed / len(jobs) > limit:
            self._say(
                f"hydra.sweeper.max_failure_rate: {failed} of the last {len(jobs)} jobs failed, more than {limit:g} of "
                "them; the search ends here"
            )
            raise SearchEnded

    def _returned(self, job: Job) -> JobReturn:
        record = Record(self.folder / job.name)
        returned = JobReturn(overrides=list(job.overrides), working_dir=str(record.folder))
        # Failures are told by `conclude`; to Hydra a failed job is one without a value, which a search leaves out.
        returned.status = JobStatus.COMPLETED
        returned.return_value = record.objective if ended_well(record.folder) else None
        return returned


class ProcessLauncher(SweepLauncher):
    """Runs the jobs one after the other, each as a child `python -m eagle3 ...` without -m."""

    def _run(self, jobs: Sequence[Job], first: int) -> None:
        for job in jobs:
            run_job(self.config.hydra, job.overrides, self.folder / job.name)


class ForeignLauncher(SweepLauncher):
    """Hands the jobs to another of Hydra's launchers, `inner`, which calls `run_foreign_job` for each somewhere."""

    parallel = True
    inner: ClassVar[type[Launcher]]

    def __init__(self, **settings: Any) -> None:
        self.launcher = self.inner(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra with the sweep's own config."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def _run(self, jobs: Sequence[Job], first: int) -> None:
        # Elsewhere nobody knows our resolver, so that the folders are told as they are.
        folder = f"hydra.sweep.dir={quoted(self.folder)}"
        overrides = [[*job.overrides, folder, f"hydra.sweep.subdir={quoted(job.name)}"] for job in jobs]
        try:
            self.launcher.launch(overrides, first)
        except Exception as error:  # a worker that was lost, say; what the jobs left tells which of them failed
            self._say(f"warning: {type(self.launcher).__name__}: {type(error).__name__}: {error}")


class SearchEnded(Exception):
    """Too many jobs of a search failed; `conclude` tells which."""


def conclude() -> None:
    """The end of this process's sweep, if there was one; StageFailed names the jobs that failed."""
    launcher, SweepLauncher.current = SweepLauncher.current, None
    failures = launcher.conclude() if launcher is not None else []
    if failures:
        raise StageFailed(
            f"{len(failures)} jobs of the sweep failed: {'; '.join(failures)}; the same command tries them again"
        )


def register() -> None:
    """Makes the launcher and the sweep folder's name known to Hydra."""
    # OmegaConf 2.4 calls it register_resolver, a name that 2.3 still has for something older.
    renamed = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
    register_resolver: Any = OmegaConf.register_resolver if renamed else OmegaConf.register_new_resolver
    register_resolver("eagle3.sweep_id", sweep_id, replace=True)
    plugins = Plugins.instance()
    for launcher in plugins.discover(Launcher):
        name = f"{launcher.__module__}.{launcher.__name__}"
        if not issubclass(launcher, SweepLauncher):
            # Hydra finds a class by its module and name, so that ours must be found here.
            ours = f"Foreign_{name.replace('.', '_')}"
            globals()[ours] = type(ours, (ForeignLauncher,), {"inner": launcher, "__module__": __name__})
            plugins.class_name_to_class[name] = globals()[ours]
    # Hydra takes launchers only under names in `hydra_plugins`, a namespace that is not ours to install into.
    plugins.class_name_to_class["hydra_plugins.eagle3.ProcessLauncher"] = ProcessLauncher
    SweepLauncher.current = None


def _ended(message: str, code: int) -> Exception:
    return RequestError(message) if code == 2 else StageFailed(message)
