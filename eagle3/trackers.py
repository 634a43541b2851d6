"""Experiment trackers behind a guard: whatever one of them does, training goes on.

Beside the walk: the train stage builds the loggers that the config names and hands their metrics over here. Every call
runs in a thread of the tracker's own with a time limit, so that an outage, a full disk or a hanging server costs one
warning and a bounded wait. Only rank 0 has trackers.
"""

from __future__ import annotations

import inspect
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from eagle3.config import LoggerConfig, build, locate, root_cause

INIT_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 120.0
log = logging.getLogger("eagle3")


class SafeLogger(Logger):
    """One tracker. `make` builds the Lightning logger and is the first thing that may fail.

    A call that raises is warned of once for each kind (init, log, finish); one that does not come back in time, and an
    init that fails, end this tracker.
    """

    def __init__(self, label: str, make: Callable[[], Logger], timeouts_s: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.label = label
        self._timeouts = {
            "init": INIT_TIMEOUT_S,
            "log": CALL_TIMEOUT_S,
            "finish": FINISH_TIMEOUT_S,
            **(timeouts_s or {}),
        }
        self._warned: set[str] = set()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._logger: Any = None
        self._alive = True
        threading.Thread(target=self._work, name=f"tracker-{label}", daemon=True).start()
        self._alive = self._do("init", lambda: self._start(make))

    @property
    def alive(self) -> bool:
        """Whether it still takes calls."""
        return self._alive

    @property
    def name(self) -> str | None:
        """The tracker's name in the config."""
        return self.label

    @property
    def version(self) -> str | None:
        """None: the run folder tells attempts apart."""
        return None

    @property
    def experiment(self) -> Any:
        """The tracker's own object, for callbacks that want more than metrics; None when it is gone."""
        return self._logger.experiment if self._alive and self._logger is not None else None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hands the configuration over, as a plain dict."""
        self._do("log", lambda: self._inner.log_hyperparams(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Hands metrics over; `step` counts optimizer steps."""
        self._do("log", lambda: self._inner.log_metrics(dict(metrics), step))

    def log_drafter(self, path: Path, name: str) -> None:
        """Hands the trained drafter over to a tracker that keeps artifacts."""
        self._do("log", lambda: self._log_artifact(path, name))

    def save(self) -> None:
        """Writes what is buffered."""
        self._do("log", lambda: self._inner.save())

    def finalize(self, status: str) -> None:
        """Lightning's end of a fit. The tracker stays open: `close` ends it when the stage is done."""
        self.save()

    def close(self, exit_code: int) -> None:
        """Ends the tracker's run, as failed unless `exit_code` is 0."""
        self._do("finish", lambda: self._finish(exit_code))
        self._alive = False
        self._calls.put(None)

    @property
    def _inner(self) -> Any:
        return self._logger

    def _start(self, make: Callable[[], Logger]) -> None:
        logger: Any = make()
        _ = logger.experiment  # where trackers really begin
        self._logger = logger

    def _finish(self, exit_code: int) -> None:
        self._inner.finalize("success" if exit_code == 0 else "failed")
        finish = getattr(self._inner.experiment, "finish", None)
        if callable(finish):
            finish(exit_code=exit_code)

    def _log_artifact(self, path: Path, name: str) -> None:
        log_artifact = getattr(self._inner.experiment, "log_artifact", None)
        if callable(log_artifact):
            log_artifact(str(path), name=name, type="drafter")

    def _do(self, kind: str, call: Callable[[], None]) -> bool:
        """Runs a call in the tracker's thread. True when it came back, whether or not it liked what it was given."""
        if not self._alive:
            return False
        done = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:
                failure.append(error)
            done.set()

        self._calls.put(run)
        if not done.wait(self._timeouts[kind]):
            self._alive = False
            self._warn(kind, f"did not answer within {self._timeouts[kind]:.0f} s and is left alone from here on")
            return False
        if failure:
            self._warn(kind, f"failed ({root_cause(failure[0])}); training goes on")
        return not (failure and kind == "init")

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("logger.loggers.%s: %s %s", self.label, kind, what)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def build_trackers(cfg: LoggerConfig, folder: Path, config: dict[str, Any]) -> list[SafeLogger]:
    """One guarded logger for each entry of `logger.loggers`, writing below the run folder, with the config handed over.

    RequestError for an entry that names nothing that can be imported: that is a wrong request, not an outage.
    """
    trackers = []
    for label, node in cfg.loggers.items():
        target = locate(node, f"logger.loggers.{label}")
        options = _options(cfg, label, target, folder)
        given = {key: value for key, value in options.items() if key not in node}
        tracker = SafeLogger(label, partial(build, node, f"logger.loggers.{label}", **given))
        tracker.log_hyperparams({**config, "run_folder": str(folder)})
        trackers.append(tracker)
    return trackers


def _options(cfg: LoggerConfig, label: str, target: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """What we can tell a logger about this run, as far as it asks for it."""
    offered: dict[str, Any] = {"save_dir": str(folder), "name": label, "version": "", "flush_logs_every_n_steps": 1}
    if inspect.isclass(target) and issubclass(target, WandbLogger):
        # The run folder's name is unique and says when, what and with which model.
        return {
            "save_dir": str(folder),
            "project": cfg.project,
            "name": folder.name,
            "id": folder.name,
            "mode": wandb_mode(cfg.mode),
        }
    offered["default_hp_metric"] = False
    return {key: value for key, value in offered.items() if key in inspect.signature(target).parameters}


def wandb_mode(mode: str) -> str:
    """`auto` is online when there is an API key in the environment or in ~/.netrc, else offline."""
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "api.wandb.ai" in netrc.read_text())
    return "online" if has_key else "offline"
