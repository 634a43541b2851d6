"""Experiment trackers behind a guard: whatever one of them does, training goes on, and waits for none.

Beside the walk: the train stage builds the loggers that the config names and hands their metrics over here. A thread of
the tracker's own makes every call, in order, while training goes on: an outage, a full disk or a hanging server costs
one warning, and at the end of the run a bounded wait for what is still on its way. Only rank 0 has trackers.
"""

from __future__ import annotations

import inspect
import logging
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch.loggers import Logger, WandbLogger

from eagle3 import mlflow_runs, tracked
from eagle3.artifacts import Artifact, write_json
from eagle3.config import LoggerConfig, build, locate, root_cause
from eagle3.records import read_json, sweep_of
from eagle3.tracked import Histogram

# How long the end of a run waits for what a tracker still has to take over (a drafter to upload, say).
CLOSE_TIMEOUT_S = 120.0
# A tracker that hangs is not told more than this; what a run logs in days is far less.
MOST_WAITING = 100_000
IDENTITY = "tracker.json"
# W&B's host since 0.31; before, and on servers of one's own, the name usually says what it is.
WANDB_HOST = "api.forge.coreweave.com"
log = logging.getLogger("eagle3")


@dataclass(frozen=True)
class Identity:
    """What a run is called in a tracker: `id` is that of all attempts at the same training, `group` of its sweep."""

    id: str
    name: str
    group: str | None = None

    @classmethod
    def of(cls, run_folder: Path, partial: Path, artifact_id: str) -> Identity:
        """The identity of the training whose checkpoints are in `partial`: a resumed one finds its own again there."""
        path = partial / IDENTITY
        known = read_json(path).get("id")
        if known is None:
            known = f"{artifact_id}-{secrets.token_hex(4)}"
            write_json(path, {"id": known})
        sweep = sweep_of(run_folder)
        return cls(known, run_folder.name, None if sweep is None else sweep.name)


class SafeLogger(Logger):
    """One tracker. `make` builds the Lightning logger and is the first thing that may fail.

    A call that raises is warned of once for each kind (init, log, finish); an init that fails ends this tracker, and
    so does `close` when it did not get through in time: then `abandon` ends what could keep the process from ending.
    """

    def __init__(
        self,
        label: str,
        make: Callable[[], Logger],
        close_timeout_s: float | None = None,
        abandon: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._abandon = abandon
        self.label = label
        self._close_timeout_s = CLOSE_TIMEOUT_S if close_timeout_s is None else close_timeout_s
        self._warned: set[str] = set()
        self._calls: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(MOST_WAITING)
        self._logger: Any = None
        self._doing = "init"
        self._alive = True
        self._do("init", lambda: self._start(make))
        self._thread = threading.Thread(target=self._work, name=f"tracker-{label}", daemon=True)
        self._thread.start()

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
        """The tracker's own object, for callbacks that want more than metrics; None before it is there and after."""
        return self._logger.experiment if self._alive and self._logger is not None else None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hands the configuration over, as a plain dict."""
        self._do("log", lambda: self._logger.log_hyperparams(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Hands metrics over; `step` counts optimizer steps."""
        values = dict(metrics)
        self._do("log", lambda: self._logger.log_metrics(values, step))

    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Hands distributions over to a tracker that shows them."""
        self._do("log", lambda: tracked.log_histograms(self._logger, histograms, step))

    def log_positions(self, rates: Sequence[float], step: int) -> None:
        """Hands the acceptance at each position over to a tracker that draws tables."""
        self._do("log", lambda: tracked.log_positions(self._logger, rates, step))

    def log_drafter(self, drafter: Artifact, states: Artifact) -> None:
        """Hands the trained drafter, and what it was trained on, over to a tracker that keeps artifacts."""
        self._do("log", lambda: tracked.log_drafter(self._logger, drafter, states))

    def save(self) -> None:
        """Writes what is buffered."""
        self._do("log", lambda: self._logger.save())

    def finalize(self, status: str) -> None:
        """Lightning's end of a fit. The tracker stays open: `close` ends it when the stage is done."""
        self.save()

    def close(self, exit_code: int) -> None:
        """Ends the tracker's run, as failed unless `exit_code` is 0; waits for it, but not for ever."""
        self._do("finish", lambda: self._finish(exit_code))
        if self._alive:
            self._calls.put(None)
            self._thread.join(self._close_timeout_s)
            if self._thread.is_alive():
                if self._abandon is not None:
                    self._abandon()
                self._warn(self._doing, f"did not answer within {self._close_timeout_s:.0f} s and is left alone")
        self._alive = False

    def _start(self, make: Callable[[], Logger]) -> None:
        logger: Any = make()
        _ = logger.experiment  # where trackers really begin
        self._logger = logger

    def _finish(self, exit_code: int) -> None:
        self._logger.finalize("success" if exit_code == 0 else "failed")
        finish = getattr(self._logger.experiment, "finish", None)
        if callable(finish):
            finish(exit_code=exit_code)

    def _do(self, kind: str, call: Callable[[], None]) -> None:
        """Leaves a call to the tracker's thread."""
        if self._alive:
            try:
                self._calls.put_nowait((kind, call))
            except queue.Full:
                self._alive = False
                self._warn(self._doing, "has not answered for a long time and is left alone from here on")

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            self._doing, call = item
            try:
                call()
            except BaseException as error:
                self._warn(self._doing, f"failed ({root_cause(error)}); training goes on")
                if self._doing == "init":
                    self._alive = False
                    return

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("logger.loggers.%s: %s %s", self.label, kind, what)


def build_trackers(cfg: LoggerConfig, folder: Path, config: dict[str, Any], identity: Identity) -> list[SafeLogger]:
    """One guarded logger for each entry of `logger.loggers`, writing below the run folder, with the config handed over.

    RequestError for an entry that names nothing that can be imported: that is a wrong request, not an outage.
    """
    trackers = []
    for label, node in cfg.loggers.items():
        target = locate(node, f"logger.loggers.{label}")
        options = _options(cfg, label, target, folder, identity, config)
        given = {key: value for key, value in options.items() if key not in node}
        abandon = tracked.abandon_wandb if _is_wandb(target) else None
        tracker = SafeLogger(label, partial(build, node, f"logger.loggers.{label}", **given), abandon=abandon)
        tracker.log_hyperparams({**config, "run_folder": str(folder)})
        trackers.append(tracker)
    return trackers


def _options(
    cfg: LoggerConfig,
    label: str,
    target: Callable[..., Any],
    folder: Path,
    identity: Identity,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """What we can tell a logger about this run, as far as it asks for it."""
    if _is_wandb(target):
        mode = wandb_mode(cfg.mode)
        return {
            "save_dir": str(folder),
            "project": cfg.project,
            "name": identity.name,
            "id": identity.id,
            "group": identity.group,
            "mode": mode,
            # What the run prints is in run.log; a print must not wait for a tracker either.
            "settings": {"console": "off"},
            # Offline there is no earlier part to ask for: `wandb sync` puts the parts of one id together.
            "resume": "allow" if mode == "online" else None,
        }
    if inspect.isclass(target) and issubclass(target, mlflow_runs.MlflowLogger):
        return {
            **mlflow_runs.store(cfg.mode, Path(config["output_dir"])),
            "experiment_name": cfg.project,
            "run_name": identity.name,
            "training": identity.id,
            "group": identity.group,
        }
    offered: dict[str, Any] = {"save_dir": str(folder), "name": label, "version": "", "flush_logs_every_n_steps": 1}
    offered |= {"experiment_name": cfg.project, "run_name": identity.name, "default_hp_metric": False}
    return {key: value for key, value in offered.items() if key in inspect.signature(target).parameters}


def _is_wandb(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, WandbLogger)


def wandb_mode(mode: str) -> str:
    """`auto` is what WANDB_MODE says, else online when there is a key. Without one nothing is online: W&B would ask for
    it on the terminal."""
    if mode == "auto" and os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if mode not in ("auto", "online"):
        return mode
    if _has_wandb_key():
        return "online"
    if mode == "online":
        log.warning(
            "logger.mode: found online, but no key of W&B (WANDB_API_KEY, or ~/.netrc, where `wandb login` puts it); "
            "written offline, `wandb sync` uploads it later"
        )
    return "offline"


def _has_wandb_key() -> bool:
    """Looks where W&B does, without its asking a server."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        hosts = netrc.netrc(Path(os.environ.get("NETRC", "~/.netrc")).expanduser()).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    return own in hosts if own else any(host == WANDB_HOST or "wandb" in host for host in hosts)
