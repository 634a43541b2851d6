"""The Lightning Trainer that a config means, and what runs beside it (around step 6 of the walk).

Users swap or extend it under `trainer.lightning`; what other fields of the config decide is refused there.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import StrategyRegistry

from eagle3.checkpoints import AtomicCheckpointIO
from eagle3.config import Config, root_cause
from eagle3.errors import RequestError
from eagle3.parts import Part
from eagle3.strategies import STRATEGY, strategy_named

# Arguments of the Lightning Trainer that other fields of the config decide.
OWNED = {
    "max_epochs": "trainer.max_epochs",
    "max_steps": "trainer.max_steps",
    "accumulate_grad_batches": "trainer.accumulate",
    "gradient_clip_val": "trainer.clip_norm",
    "val_check_interval": "trainer.validate_every_steps",
    "log_every_n_steps": "trainer.log_every_steps",
    "callbacks": "trainer.callbacks",
    "logger": "logger.loggers",
}
LIGHTNING = Part(
    "trainer.lightning",
    Trainer,
    "a lightning.pytorch.Trainer or a subclass",
    "leave trainer.lightning._target_ as it is in conf/trainer",
    default="lightning.pytorch.Trainer",
)


def check_trainer(cfg: Config) -> None:
    """RequestError when `trainer.lightning` sets what another field decides, when it or a callback is of another kind,
    when there is no such strategy or it cannot go with the optimizer, when a run would lack GPUs, or when Lightning
    takes a value for wrong."""
    for key, field in OWNED.items():
        if key in cfg.trainer.lightning:
            raise RequestError(f"trainer.lightning.{key}: is decided by {field}, set that instead")
    made_by = LIGHTNING.check(cfg.trainer.lightning)
    for name, node in cfg.trainer.callbacks.items():
        _callback(name).check(node)
    if "strategy" not in cfg.trainer.lightning:
        _check_strategy(cfg)
    found, wanted = torch.cuda.device_count(), cfg.hardware.devices
    if cfg.hardware.accelerator == "gpu" and found < wanted and not cfg.dry_run:
        raise RequestError(
            f"hardware.devices: found {wanted}, but this machine has {found} GPUs; try "
            f"{f'hardware.devices={found}' if found else 'hardware.accelerator=cpu'}, or look at CUDA_VISIBLE_DEVICES"
        )
    if made_by is Trainer:
        _try_trainer(cfg)


def _check_strategy(cfg: Config) -> None:
    name, lightnings = cfg.hardware.training_strategy, ["auto", *StrategyRegistry.available_strategies()]
    if name != STRATEGY and name.lower() not in lightnings:  # which reads it so
        names = sorted([STRATEGY, *lightnings])
        close = difflib.get_close_matches(name.lower(), names, n=1) or ["auto"]
        raise RequestError(
            f"hardware.training_strategy: found {name!r}, expected one of {', '.join(names)}; try "
            f"hardware.training_strategy={close[0]}"
        )
    if name == STRATEGY and cfg.trainer.optimizer == "muon":
        raise RequestError(
            f"trainer.optimizer: found muon with hardware.training_strategy={STRATEGY}, which keeps weights in shards, "
            "expected adamw there, since muon needs whole matrices; try hardware.training_strategy=ddp"
        )


def _callback(name: str) -> Part[Callback]:
    where = f"trainer.callbacks.{name}"
    hint = f"name its class: '+{where}={{_target_: package.Class}}'"
    return Part(where, Callback, "a lightning.pytorch.Callback", hint, all=True)


def _try_trainer(cfg: Config) -> None:
    """Lightning looks at values and strategies when its Trainer is made, which is cheap; ours need no trial."""
    ours = set(cfg.trainer.lightning) <= {"_target_"} and cfg.hardware.training_strategy in ("auto", "ddp", STRATEGY)
    if ours or cfg.dry_run:
        return
    # Determinism would hold for the whole process, and what comes before training may do without.
    lightning = {key: value for key, value in cfg.trainer.lightning.items() if key != "deterministic"}
    tried = replace(cfg, trainer=replace(cfg.trainer, deterministic=False, lightning=lightning))
    try:
        with quiet_lightning():
            build_trainer(tried, Path(), [], [])
    except Exception as error:
        raise RequestError(
            f"trainer.lightning: Lightning makes no Trainer of this, with hardware.accelerator="
            f"{cfg.hardware.accelerator} and hardware.training_strategy={cfg.hardware.training_strategy} "
            f"({root_cause(error)}); correct these, or leave out what was added to trainer.lightning"
        ) from error


def build_callbacks(cfg: Config) -> list[Callback]:
    """The callbacks that the user added. RequestError for an entry that makes none."""
    return [_callback(name).build(node) for name, node in cfg.trainer.callbacks.items()]


def build_trainer(cfg: Config, folder: Path, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> Trainer:
    """The Trainer of `trainer.lightning`, told what the rest of the config says as far as it does not say otherwise."""
    node = cfg.trainer.lightning
    swappable: dict[str, Any] = {
        "accelerator": cfg.hardware.accelerator,
        "devices": cfg.hardware.devices,
        "strategy": strategy_named(cfg.hardware.training_strategy),
        "precision": cfg.hardware.precision,
        "deterministic": cfg.trainer.deterministic,
        "plugins": [AtomicCheckpointIO(), *_environment()],
    }
    return LIGHTNING.build(
        node,
        **{key: value for key, value in swappable.items() if key not in node},
        # One pass over the plan, which holds all epochs and ends at trainer.max_steps.
        max_epochs=1,
        accumulate_grad_batches=cfg.trainer.accumulate,
        val_check_interval=cfg.trainer.validate_every_steps * cfg.trainer.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        logger=list(loggers) or False,
        callbacks=[*callbacks, StepProfile(folder)] if cfg.trainer.profile else list(callbacks),
    )


def _environment() -> list[ClusterEnvironment]:
    """In a SLURM job of one task (submitit's, say) Lightning has to start the ranks, as on any machine; left alone it
    takes SLURM's task for the only rank."""
    return [LightningEnvironment()] if os.environ.get("SLURM_NTASKS") == "1" else []


class StepProfile(Callback):
    """Profiles a few training steps, once the first have compiled what they need: in `folder` the timeline
    `profile.json` (for Perfetto or chrome://tracing) and the table `profile.txt`."""

    BEFORE, STEPS = 4, 3

    def __init__(self, folder: Path) -> None:
        self.folder, self._seen = folder, 0
        self._running: torch.profiler.profile | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Starts behind the first steps."""
        if self._seen == self.BEFORE and trainer.is_global_zero:
            self._running = torch.profiler.profile(acc_events=True)  # else torch warns that it forgets
            self._running.start()
        self._seen += 1

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Writes what was found."""
        if self._running is None or self._seen < self.BEFORE + self.STEPS:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._running.stop()
        self._running.export_chrome_trace(str(self.folder / "profile.json"))
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._running.key_averages().table(sort_by=order, row_limit=40)
        (self.folder / "profile.txt").write_text(table)
        self._running = None


class Clock(Callback):
    """Moves the progress bar and measures tokens/s: all of training but its validations."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self.advance = advance
        self.tokens, self.seconds, self._since = 0, 0.0, 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks a second, in this process; None when it trained nothing."""
        return round(self.tokens / self.seconds, 1) if self.tokens and self.seconds else None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """The clock runs."""
        self._since = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """The clock stops."""
        self.seconds += time.monotonic() - self._since

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """The clock runs again."""
        self._since = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts."""
        self.tokens += batch.tokens * trainer.world_size
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or batch_idx + 1 == trainer.num_training_batches:
            self.advance(1)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """The clock stops for good."""
        self.seconds += time.monotonic() - self._since


def peak_memory_bytes() -> int:
    """The most memory in use so far: the GPU's where there is one, else this process's resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keeps Lightning's chatter off the terminal; its warnings stay, but for three that no user can act on."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        # On any machine of a SLURM cluster: a run that was not started by srun starts its ranks by itself.
        warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
