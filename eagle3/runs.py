"""Run folders: one per attempt, never reused, and enough to repeat the run and to find all that it read and wrote.

Beside the walk: `cli` opens a run, the stage works through it, `cli` closes it. A helper rank of a training run joins
the folder of the rank that started it and writes nothing but its own log.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf
from rich.console import Console, RenderableType

from eagle3 import provenance
from eagle3.artifacts import Artifact, Artifacts, digest, write_json
from eagle3.config import Config
from eagle3.errors import RequestError, disk_full
from eagle3.progress import Advance, progress

FOLDER_VARIABLE = "EAGLE3_RUN_FOLDER"
WIDTH = 140
# They read what lies in the output folder; gc deletes there, and writes nothing.
LOOKING_STAGES = ("runs", "gc", "verify")
CONFIG_HEADER = """\
# The whole configuration of this run, resolved. `eagle3 -cp <this folder>` repeats it; values can be overridden there.
defaults:
  - application
  - _self_

"""


def config_hash(cfg: Config) -> str:
    """Stands for a whole resolved configuration: equal in every rank and in a repeated run."""
    return digest(dataclasses.asdict(cfg))


class _ConsoleHandler(logging.Handler):
    """Log lines through rich's console, so that a progress bar below them stays whole."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self.console.print(level + record.getMessage(), markup=False, highlight=False, soft_wrap=True)


class _FileHandler(logging.FileHandler):
    """Log lines into run.log; one that finds the disk full is lost without a traceback on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Tracker(Protocol):
    """An experiment tracker, as a run sees it."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Takes metrics at an optimizer step."""

    def close(self, exit_code: int) -> None:
        """Ends its own run, as failed unless `exit_code` is 0; must come back."""


class Run:
    """One attempt at one stage.

    `folder` holds its files, `artifacts` finds and makes results, `log` is the logger "eagle3", `console` the terminal.
    `rank` is 0 except in the helper processes that a distributed training run starts.
    """

    def __init__(self, cfg: Config, folder: Path, rank: int = 0) -> None:
        self.cfg = cfg
        self.folder = folder
        self.rank = rank
        self.artifacts = Artifacts(Path(cfg.output_dir).absolute() / "artifacts", attached=rank > 0)
        # Tables in a file or a pipe are as wide as they need to be.
        self.console = Console(quiet=rank > 0, width=None if sys.stdout.isatty() else WIDTH)
        self.log = logging.getLogger("eagle3")
        self.status = "running"
        # What follows the run elsewhere, opened by the stage that trains; `finish` closes them.
        self.trackers: list[Tracker] = []
        self._terminal = Console(stderr=True, quiet=rank > 0)
        self._started = time.monotonic()
        self._lineage: dict[str, list[dict[str, str]]] = {"read": [], "wrote": []}
        self._facts: dict[str, Any] = {}
        self._log_file = folder / ("run.log" if rank == 0 else f"rank-{rank}.log")
        self._start_logging()

    @property
    def log_file(self) -> Path:
        """Where the whole story is, tracebacks included."""
        return self._log_file

    @property
    def seconds(self) -> float:
        """How long the run has been open."""
        return time.monotonic() - self._started

    @classmethod
    def start(cls, cfg: Config, overrides: list[str], folder: Path | None = None) -> Run:
        """Opens a new run in `folder`, or in a folder of its own under `<output_dir>/runs/<date>/`.

        RequestError when the output folder cannot be written or when `folder` holds a run already. The stages that only
        look through the output folder get a temporary folder then: a full disk is when they are needed.
        """
        target: Path | None = None
        named = any(dataclasses.asdict(cfg.inputs).values())  # what it is to look at may lie elsewhere
        if cfg.stage.name in LOOKING_STAGES and not named and not Path(cfg.output_dir).exists():
            raise RequestError(
                f"output_dir={cfg.output_dir}: no such folder, expected one that runs have been written to; check the "
                "path and the folder that you are in"
            )
        try:
            target = _new_folder(cfg) if folder is None else folder.absolute()
            return cls._open(cfg, overrides, target)
        except FileExistsError as error:
            if folder is None or not (folder / "config.yaml").exists():
                raise _unwritable(cfg, folder, error) from error
            raise RequestError(
                f"hydra.run.dir={folder}: holds a run already, and a run folder is never used twice; leave "
                f"hydra.run.dir out, or repeat that run with `eagle3 -cp {folder}`"
            ) from error
        except OSError as error:
            if folder is None and target is not None:
                shutil.rmtree(target, ignore_errors=True)
            if folder is not None or cfg.stage.name not in LOOKING_STAGES or not Path(cfg.output_dir).is_dir():
                raise _unwritable(cfg, folder, error) from error
        return cls.start(cfg, overrides, Path(tempfile.mkdtemp(prefix=f"eagle3-{cfg.stage.name}-")))

    @classmethod
    def _open(cls, cfg: Config, overrides: list[str], target: Path) -> Run:
        target.mkdir(parents=True, exist_ok=True)
        with open(target / "config.yaml", "x", encoding="utf-8") as file:
            file.write(CONFIG_HEADER + OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg))))
        (target / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(list(overrides))), encoding="utf-8")
        run = cls(cfg, target)
        run.artifacts.context["run"] = os.path.relpath(target, run.artifacts.root)
        run._facts = {
            "stage": cfg.stage.name,
            "model": cfg.model.name,
            "config_hash": config_hash(cfg),
            "started": _now(),
            **provenance.collect(),
        }
        try:
            run._write_provenance()
        except OSError:
            run._stop_logging()
            raise
        os.environ[FOLDER_VARIABLE] = str(target)
        run.log.debug("config %s, %s", run._facts["config_hash"], run._facts["command"])
        return run

    @classmethod
    def attach(cls, cfg: Config, rank: int, folder: Path | None = None) -> Run:
        """Joins, as helper rank `rank` > 0, the run that rank 0 opened and named in the environment."""
        named = folder or os.environ.get(FOLDER_VARIABLE)
        if named is None:
            raise RequestError(
                f"rank {rank}: {FOLDER_VARIABLE} is not set, so this rank does not know its run; start eagle3 itself "
                "(not torchrun) with hardware.devices=N, or give every rank the same hydra.run.dir=FOLDER"
            )
        Path(named).mkdir(parents=True, exist_ok=True)
        return cls(cfg, Path(named), rank)

    def read(self, artifact: Artifact) -> Artifact:
        """Notes that this run read the artifact."""
        return self._note_artifact("read", artifact)

    def wrote(self, artifact: Artifact) -> Artifact:
        """Notes that this run made or extended the artifact; one that was complete already counts as read."""
        return self._note_artifact("wrote" if artifact.folder in self.artifacts.written else "read", artifact)

    def note(self, **facts: Any) -> None:
        """Adds facts to provenance.json: the adapter, the engine and its version, ..."""
        self._facts.update(facts)
        self._write_provenance()

    def record(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Appends one line to metrics.jsonl."""
        if self.rank == 0:
            line = {"time": _now(), **({} if step is None else {"step": step}), **metrics}
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def show(self, renderable: RenderableType) -> None:
        """Prints a table or a text to the terminal and to run.log."""
        with open(self._log_file, "a", encoding="utf-8") as file:
            Console(file=file, width=WIDTH, no_color=True).print(renderable)
        try:
            self.console.print(renderable)
        except (BrokenPipeError, SystemExit):  # `eagle3 stage=runs | head`; rich leaves when its reader is gone
            self.console.quiet = True

    def progress(self, total: float, unit: str, what: str) -> AbstractContextManager[Advance]:
        """Shows how far `what` is: yields `advance(n)`, n in `unit`s of `total`."""
        return progress(self._terminal, self.log, total, unit, what)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes in provenance.json how many seconds a part of the run took."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._facts.setdefault("seconds_of", {})[name] = round(time.monotonic() - started, 3)

    def file_only(self, message: str, error: BaseException) -> None:
        """Writes a message and its whole traceback to run.log, not to the terminal."""
        details = (type(error), error, error.__traceback__)
        self._file.handle(logging.LogRecord("eagle3", logging.ERROR, __file__, 0, message, None, details))

    def finish(
        self, status: str, exit_code: int, metrics: dict[str, Any] | None = None, error: str | None = None
    ) -> None:
        """Closes the run: result.json, artifacts.json, the last of provenance.json; locks and log files given back."""
        self.status = status
        self.artifacts.close()
        if self.rank == 0:
            seconds = round(self.seconds, 3)
            result = {"status": status, "stage": self.cfg.stage.name, "exit_code": exit_code, "seconds": seconds}
            if error:
                result["error"] = error
            write_json(self.folder / "result.json", {**result, "metrics": metrics or {}})
            self._facts.update(finished=_now(), seconds=seconds, exit_code=exit_code)
            self._write_provenance()
            os.environ.pop(FOLDER_VARIABLE, None)
        for tracker in self.trackers:
            tracker.close(exit_code)
        self._stop_logging()

    def _note_artifact(self, direction: str, artifact: Artifact) -> Artifact:
        entry = {"kind": artifact.kind, "id": artifact.id, "folder": str(artifact.folder)}
        known = self._lineage["read"] + self._lineage["wrote"] if direction == "read" else self._lineage["wrote"]
        if entry not in known and self.rank == 0:
            self._lineage[direction].append(entry)
            made_from = [f"{e['kind']}/{e['id']}" for e in self._lineage["read"] + self._lineage["wrote"]]
            self.artifacts.context["made_from"] = made_from
            self._write_provenance()
            self._link(artifact)
        return artifact

    def _link(self, artifact: Artifact) -> None:
        for name in (artifact.kind, f"{artifact.kind}-{artifact.id}"):
            link = self.folder / name
            if link.is_symlink() and os.path.realpath(link) == os.path.realpath(artifact.folder):
                return
            try:
                link.symlink_to(os.path.relpath(artifact.folder, self.folder))
                return
            except OSError as error:
                self.log.debug("%s: no link (%s)", link, error)

    def _write_provenance(self) -> None:
        if self.rank == 0:
            write_json(
                self.folder / "provenance.json", {**self._facts, "status": self.status, "artifacts": self._lineage}
            )
            write_json(self.folder / "artifacts.json", self._lineage)

    def _start_logging(self) -> None:
        """The terminal shows eagle3's own lines; run.log also has its details and what other libraries say."""
        self._screen = _ConsoleHandler(self._terminal)
        self._file = _FileHandler(self._log_file, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        self._root_level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(self._file)
        self.log.setLevel(logging.DEBUG)
        self.log.addHandler(self._screen)
        logging.captureWarnings(True)

    def _stop_logging(self) -> None:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(self._file)
        logging.getLogger().setLevel(self._root_level)
        self.log.removeHandler(self._screen)
        self._file.close()


def _now() -> str:
    return datetime.now().astimezone().isoformat("T", "milliseconds")


def _new_folder(cfg: Config) -> Path:
    """A folder that did not exist: two processes started together get two."""
    while True:
        now = datetime.now()
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", cfg.model.name)
        name = f"{now:%H-%M-%S-%f}-{cfg.stage.name}-{model}"
        folder = Path(cfg.output_dir).absolute() / "runs" / f"{now:%Y-%m-%d}" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue


def _unwritable(cfg: Config, folder: Path | None, error: OSError) -> RequestError:
    where = f"output_dir={cfg.output_dir}" if folder is None else f"hydra.run.dir={folder}"
    if disk_full(error):
        return RequestError(f"{where}: the disk is full, expected room for a run; `eagle3 stage=gc` lists what can go")
    place = "" if error.filename is None else f": {error.filename}"
    return RequestError(
        f"{where}: cannot write there ({error.strerror or error}{place}), expected a folder that can be "
        "created or written; try output_dir=/tmp/eagle3-outputs"
    )
