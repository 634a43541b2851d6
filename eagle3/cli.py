"""The command `eagle3`: composes the configuration, checks it, opens a run, hands it to one stage, maps the exit code.

Beside the walk. Nothing here imports torch, so that --help, --cfg and tab completion answer at once. Hydra composes
and lists; the stage runs after Hydra has returned, so that errors, folders and exit codes are ours alone:
0 = done, 1 = it failed while running, 2 = the request is wrong.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import eagle3
from eagle3 import assets, children, launchers, plugins, stages
from eagle3.config import Config, check_nodes, register_schema
from eagle3.errors import Eagle3Error, RequestError, disk_full
from eagle3.runs import Run
from eagle3.validation import explain, explain_flag, validate

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
TRAINING_STAGES = ("train", "pipeline")
PROMPT_STAGES = ("pipeline", "evaluate", "serve_check")
WITHOUT_TARGET = ("runs", "gc", "report", "adapters")
PATH_FLAGS = ("-cp", "--config-path", "-cd", "--config-dir")
VALUE_FLAGS = ("-c", "--cfg", "-i", "--info", "-p", "--package", "-cn", "--config-name")
LONG_FLAGS = (
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)


@dataclass(frozen=True)
class Composed:
    """What a command line asks for: the checked configuration, its overrides, the run folder if one was named."""

    cfg: Config
    overrides: list[str]
    run_folder: Path | None


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; treated as Ctrl-C is."""


def main() -> None:
    """The console script `eagle3` and `python -m eagle3`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us, as some daemons do
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open
    sys.exit(command())


def command() -> int:
    """Runs the command line in sys.argv; returns its exit code."""
    if "--version" in sys.argv[1:]:  # Hydra would say its own
        print(f"eagle3 {eagle3.__version__}")
        return 0
    with _terminable():
        try:
            composed = compose()
            return 0 if composed is None else execute(composed)
        except Eagle3Error as error:
            return _refuse(str(error), error.exit_code)
        except BrokenPipeError:  # `eagle3 --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt:
            return _refuse("stopped; the same command goes on from what is complete", 1)
        except Exception as error:
            return _refuse(explain(error, sys.argv[1:]), 2)


def compose() -> Composed | None:
    """Lets Hydra read the command line; None when it had something to print or a sweep to run.

    RequestError names what is wrong with the configuration; StageFailed the jobs of a sweep that failed.
    """
    received: list[Composed | Eagle3Error] = []

    def receive(node: DictConfig) -> None:
        settings = HydraConfig.get()
        overrides = [str(override) for override in OmegaConf.to_container(settings.overrides.task, resolve=False) or []]
        if settings.mode != RunMode.RUN:
            children.run_foreign_job(settings, overrides, validate(node))
            return
        try:
            folder = None if settings.run.dir == "." else Path(settings.run.dir).absolute()
            received.append(Composed(validate(node), overrides, folder))
        except Eagle3Error as error:
            received.append(error)

    register_schema()
    plugins.register()
    launchers.register()
    sys.argv[1:] = arranged(sys.argv[1:])
    arguments: dict[str, Any] = {"config_path": "pkg://eagle3.conf", "config_name": "config"}
    if "execution_whitelist" in inspect.signature(hydra.main).parameters:  # Hydra 1.4
        arguments["execution_whitelist"] = ["eagle3.*"]
    else:
        arguments["version_base"] = "1.3"
    try:
        with _raising():
            hydra.main(**arguments)(receive)()
    except Eagle3Error:
        raise
    except Exception:
        # A sweeper that could not go on, because all jobs failed, say: then that is the news.
        launchers.conclude()
        raise
    for item in received:
        if isinstance(item, Eagle3Error):
            raise item
        return item
    launchers.conclude()
    return None


def execute(composed: Composed) -> int:
    """Runs one stage in a run folder of its own; returns the exit code."""
    cfg = composed.cfg
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name)), 0)
    check_stage(cfg.stage.name)
    if rank > 0:
        run = Run.attach(cfg, rank, composed.run_folder)
    else:
        run = Run.start(cfg, composed.overrides, composed.run_folder)
    try:
        check_nodes(cfg if cfg.stage.name in TRAINING_STAGES else {"model": cfg.model})
        if _would_fetch(cfg, run):
            metrics = {}
        else:
            metrics = importlib.import_module(f"eagle3.stages.{cfg.stage.name}").run(cfg, run)
        status = "dry run" if cfg.dry_run else "done"
        run.log.info("%s %s: %s", cfg.stage.name, status, _short(run.folder))
        run.finish(status, 0, metrics)
    except BaseException as error:
        return _failed(run, error)
    return 0


def _would_fetch(cfg: Config, run: Run) -> bool:
    """Whether a dry run ends with what would be fetched first: a packaged model or data set, on which ids depend."""
    if not cfg.dry_run or cfg.stage.name in WITHOUT_TARGET:
        return False
    cache, paths = assets.cache_folder(cfg.cache_dir), [cfg.model.path, cfg.model.tokenizer]
    if cfg.stage.name in PROMPT_STAGES:
        from eagle3.benchmarks import PACKAGED

        paths += [f"{assets.PREFIX}{name}" for name in cfg.evaluate.sets if name in PACKAGED]
    absent = assets.absent(paths, cache)
    if cfg.stage.name in ("prepare", "pipeline") and cfg.inputs.prepared is None:
        sources = [source.path for source in cfg.dataset.sources.values()]
        wanted = [asset for asset in assets.absent(sources, cache) if asset not in absent]
        if wanted and (absent or not _is_prepared(cfg, run)):
            absent += wanted
    if absent:
        names = ", ".join(f"{assets.PREFIX}{asset.name} ({asset.size_mb} MB)" for asset in absent)
        run.log.info("dry run: would fetch %s into %s first; what follows depends on it", names, cache)
    return bool(absent)


def _is_prepared(cfg: Config, run: Run) -> bool:
    """Whether the prepared set is complete, so that its sources are not read; asked when the model is there."""
    return importlib.import_module("eagle3.stages.prepare").prepared(cfg, run.artifacts).complete


def check_stage(name: str) -> None:
    """RequestError when there is no such stage."""
    if name not in stages.names():
        raise RequestError(
            f"stage.name: found {name!r}, expected one of {', '.join(stages.names())}; try stage=pipeline"
        )


def _failed(run: Run, error: BaseException) -> int:
    """Says in one line what happened, writes the whole of it to run.log, closes the run; returns the exit code."""
    stopped = next((cause for cause in _chain(error) if isinstance(cause, KeyboardInterrupt)), None)
    if stopped is not None:  # Lightning turns it into a SystemExit
        status, code = "interrupted", 1
        signal_name = "SIGTERM" if isinstance(stopped, Terminated) else "Ctrl-C"
        message = f"{run.cfg.stage.name} was stopped by {signal_name}; the same command goes on from what is complete"
    elif isinstance(error, Eagle3Error):
        status, code = "failed" if error.exit_code == 1 else "refused", error.exit_code
        message = str(error) or type(error).__name__
    else:
        status, code = "failed", 1
        message = f"{run.cfg.stage.name} failed: {' <- '.join(_causes(error))}"
        if any(map(disk_full, _chain(error))):
            message += "; the disk is full: make room and run the same command again, what is complete is kept"
    where = "" if code == 2 else f"\nfull traceback in {_short(run.log_file)}"
    try:
        run.file_only(message, error)
        run.finish(status, code, error=message)
    except OSError as lost:
        where = f"\nthe run folder {_short(run.folder)} could not be written either ({lost.strerror or lost})"
    return _refuse(message + where, code)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _causes(error: BaseException) -> Iterator[str]:
    for cause in _chain(error):
        text = " ".join(str(cause).split())
        yield f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _refuse(message: str, code: int) -> int:
    print(f"eagle3: {message}", file=sys.stderr)
    return code


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def arranged(arguments: Sequence[str]) -> list[str]:
    """The words of a command line as Hydra wants them: overrides in one block, --config-path absolute.

    Hydra refuses overrides on both sides of a flag, and takes a relative --config-path as relative to this module,
    where people mean the folder they are in. RequestError for a flag that there is not and for a folder that is none.
    """
    overrides, flags = [], []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif name in PATH_FLAGS and (equals or words):
            flags += [name, _config_folder(name, value if equals else words.pop(0))]
        elif word.startswith("--") and not any(flag.startswith(name) for flag in LONG_FLAGS):
            raise RequestError(explain_flag(name, value or (words[0] if words else "")))
        else:
            flags.append(word)
            if word in VALUE_FLAGS and words and "=" not in words[0]:
                flags.append(words.pop(0))
    return overrides + flags


def _config_folder(flag: str, given: str) -> str:
    """The folder that a flag names, absolute; that of a run may be given without its last words, as `stage=runs` has
    it."""
    if "://" in given or Path(given).is_dir():
        return given if "://" in given else str(Path(given).absolute())
    path = Path(given).absolute()
    begun = path.parent.iterdir() if path.parent.is_dir() else ()
    runs = sorted(each for each in begun if each.name.startswith(f"{path.name}-") and (each / "config.yaml").is_file())
    if len(runs) == 1:
        return str(runs[0])
    found = f"{len(runs)} runs begin so, {runs[0].name} for one" if runs else "no such folder"
    raise RequestError(
        f"{flag} {given}: {found}, expected one with a configuration, that of a run for example; `eagle3 stage=runs` "
        "lists them"
    )


@contextmanager
def _raising() -> Iterator[None]:
    """Makes Hydra raise what it would otherwise print, so that one place words it and picks the exit code."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@contextmanager
def _terminable() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that a scheduler's kill still leaves a result.json."""

    def stop(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
