"""One training run: drafter, data and Lightning's Trainer, from checked inputs to an artifact (walk: steps 5 and 6).

`stages/train` says what is trained on and under which id; it comes here, and to Lightning, only when there is something
to train.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from eagle3 import layers
from eagle3.artifacts import Artifact, fsync_folder
from eagle3.batches import PackedDataModule
from eagle3.blueprint import NETWORK, new_drafter, state_scales, warm_drafter
from eagle3.checkpoint import Target
from eagle3.checkpoints import Checkpoint, Checkpoints, check_checkpoint_room, complete_checkpoints
from eagle3.config import Config
from eagle3.disk_room import writing
from eagle3.drafter import WEIGHTS, Eagle3Drafter, load_drafter, save_drafter
from eagle3.errors import RequestError
from eagle3.loss import mix_losses
from eagle3.parts import Part
from eagle3.prepared import Prepared
from eagle3.runs import Run
from eagle3.store import StatesStore
from eagle3.tracked import Gradients, Histogram
from eagle3.trackers import Identity, SafeLogger, build_trackers
from eagle3.trainer import (
    Clock,
    build_callbacks,
    build_trainer,
    check_trainer,
    peak_memory_bytes,
    quiet_lightning,
)
from eagle3.training import DrafterTraining
from eagle3.vocab import VocabMap, coverage_words

MODULE = Part(
    "trainer.module",
    DrafterTraining,
    "an eagle3.training.DrafterTraining or a subclass",
    "leave trainer.module as it is in conf/trainer",
    default="eagle3.training.DrafterTraining",
)
DATA = Part(
    "trainer.datamodule",
    PackedDataModule,
    "an eagle3.batches.PackedDataModule or a subclass",
    "leave trainer.datamodule as it is in conf/trainer",
    default="eagle3.batches.PackedDataModule",
)


def check_settings(cfg: Config) -> None:
    """RequestError for what is wrong with a training whatever it is trained on."""
    NETWORK.check(cfg.drafter.module)
    MODULE.check(cfg.trainer.module)
    DATA.check(cfg.trainer.datamodule)
    check_trainer(cfg)
    mix_losses(cfg.drafter.losses)


def origin_field(cfg: Config) -> str:
    """Where the config names the drafter to go on from."""
    return "drafter.warm_start" if cfg.trainer.resume_from is None else "trainer.resume_from"


@dataclass(frozen=True)
class TrainingInputs:
    """What is trained on, checked against each other.

    `layer_ids` are the target's layers that the drafter reads, `origin` the drafter that it goes on from, `previous`
    the checkpoint to begin at (trainer.resume_from), `ranks` the number of training processes.
    """

    target: Target
    states: Artifact
    store: StatesStore
    prepared: Prepared
    layer_ids: tuple[int, ...]
    origin: Artifact | None
    previous: Checkpoint | None
    ranks: int


class TrainingJob:
    """One training run, from checked inputs to a committed artifact."""

    def __init__(self, cfg: Config, run: Run, artifact: Artifact, inputs: TrainingInputs) -> None:
        self.cfg, self.run, self.artifact, self.inputs = cfg, run, artifact, inputs
        self.target, self.prepared, self.previous = inputs.target, inputs.prepared, inputs.previous
        self.scales: list[float] | None = None
        self.drafter, self.vocab = self._new_drafter()
        self.data = self._data()
        self.first_step = 0

    def _new_drafter(self) -> tuple[Eagle3Drafter, VocabMap]:
        cfg, inputs = self.cfg.drafter, self.inputs
        if inputs.origin is not None:
            where = origin_field(self.cfg)
            return warm_drafter(cfg, inputs.target, inputs.prepared, inputs.layer_ids, inputs.origin.folder, where)
        self.scales = state_scales(inputs.store, inputs.layer_ids)
        return new_drafter(cfg, inputs.target, inputs.prepared, inputs.layer_ids, self.cfg.seed, self.scales)

    def _data(self) -> PackedDataModule:
        cfg = self.cfg
        data = DATA.build(
            cfg.trainer.datamodule,
            prepared=self.prepared,
            store=self.inputs.store,
            layer_ids=self.inputs.layer_ids,
            in_draft_vocab=None if self.vocab.is_full else self.vocab.t2d.numpy(),
            unroll_steps=cfg.drafter.unroll_steps,
            mask_alignment=cfg.drafter.mask_alignment,
            batch_tokens=cfg.trainer.batch_tokens,
            epochs=cfg.trainer.max_epochs,
            max_steps=cfg.trainer.max_steps,
            accumulate=cfg.trainer.accumulate,
            seed=cfg.seed,
            rank=self.run.rank,
            ranks=self.inputs.ranks,
            num_workers=cfg.trainer.num_workers,
            pin_memory=cfg.hardware.accelerator == "gpu",
        )
        if self.previous is not None and self.previous.step >= data.plan.steps:
            raise RequestError(
                f"trainer.resume_from: {self.cfg.trainer.resume_from} was trained for {self.previous.step} steps, this "
                f"run ends at {data.plan.steps}; expected more: raise trainer.max_epochs or trainer.max_steps"
            )
        return data

    def announce(self) -> None:
        """What will be trained, in a few lines."""
        data, plan, shape = self.data, self.data.plan, self.drafter.shape
        tokens = int(self.prepared.lengths[data.train_rows].sum())
        weights = sum(p.numel() for p in self.drafter.parameters())
        padded = f"; {self.vocab.padded:,} ids that occur in none fill it up" if self.vocab.padded else ""
        left_out = ", ".join(f"{count} with {reason}" for reason, count in data.skipped.items() if count)
        lines = [
            f"drafter {self.artifact.id}: {weights:,} weights, layers {list(shape.layer_ids)}, draft vocabulary "
            f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} ({coverage_words(*self.coverage)}"
            f"{padded})",
            f"{len(data.train_rows)} samples, {tokens:,} tokens an epoch, {int(data.supervised[:, 0].sum()):,} "
            f"first drafts supervised; {len(data.validation_rows)} validation samples"
            + (f"; left out: {left_out}" if left_out else ""),
            f"{plan.steps} optimizer steps of {self.cfg.trainer.accumulate} x {plan.ranks} batches of up to "
            f"{plan.batch_tokens:,} tokens, {self.cfg.drafter.unroll_steps} unroll steps",
        ]
        for line in lines:
            self.run.log.info("train: %s", line)

    @cached_property
    def coverage(self) -> tuple[float, float | None]:
        """The share of the supervised tokens that the drafter can draft, of the train split, which its vocabulary was
        built from, and of the validation split; None where there is none."""
        counts = self.prepared.token_counts("validation")
        of_validation = self.vocab.coverage(counts) if counts.any() else None
        return self.vocab.coverage(self.prepared.token_counts()), of_validation

    def train(self) -> dict[str, Any]:
        """Fits, keeps the best drafter, commits the artifact."""
        cfg, run = self.cfg, self.run
        left_over = complete_checkpoints(self.artifact.partial / "checkpoints") if run.rank == 0 else []
        if left_over and not cfg.trainer.resume:
            run.log.info(
                "train: trainer.resume=false, starting afresh; %d checkpoints of an earlier run, up to step %d, go",
                *(len(left_over), left_over[-1].step),
            )
        folder = run.artifacts.begin(self.artifact, resume=cfg.trainer.resume)
        start = self._start(folder / "checkpoints")
        # Every rank looks: where srun started them, the others would wait for one that refused alone.
        weights = sum(p.numel() for p in self.drafter.parameters() if p.requires_grad)
        left = self.data.plan.steps - (0 if start is None else start.step)
        coming = math.ceil(left / cfg.trainer.checkpoint_every_steps)
        check_checkpoint_room(folder / "checkpoints", weights, cfg.trainer.keep_checkpoints, coming)
        torch.manual_seed(cfg.seed)
        trackers: list[SafeLogger] = []
        if run.rank == 0:
            identity = Identity.of(run.folder, folder, self.artifact.id)
            trackers = build_trackers(cfg.logger, run.folder, dataclasses.asdict(cfg), identity)
            run.trackers += trackers
        checkpoints, clock, module = self._fit(folder, start, trackers)
        if run.rank > 0:
            return {}
        metrics = self._finish(folder, checkpoints, clock, module)
        for tracker in trackers:
            tracker.log_positions(_positions(metrics["validation"]), metrics["steps"])
            tracker.log_drafter(self.artifact, self.inputs.states)
        return metrics

    def _start(self, folder: Path) -> Checkpoint | None:
        """The checkpoint to go on from, said in the log."""
        found = complete_checkpoints(folder)
        if found:
            self.run.log.info("train: resuming %s at step %d", self.artifact.id, found[-1].step)
            return found[-1]
        if self.previous is not None:
            self.run.log.info(
                "train: training %s longer, from its step %d", self.cfg.trainer.resume_from, self.previous.step
            )
        return self.previous

    def _fit(
        self, folder: Path, start: Checkpoint | None, trackers: list[SafeLogger]
    ) -> tuple[Checkpoints, Clock, DrafterTraining]:
        cfg, steps = self.cfg, self.data.plan.steps
        checkpoints = Checkpoints(
            folder / "checkpoints",
            cfg.trainer.checkpoint_every_steps,
            cfg.trainer.keep_checkpoints,
            cfg.trainer.accumulate,
            cfg.trainer.validate_every_steps,
        )
        module = MODULE.build(
            cfg.trainer.module,
            drafter=self.drafter,
            teacher=self.target.teacher_head(_teacher_dtype(cfg)),
            drafter_config=cfg.drafter,
            trainer_config=cfg.trainer,
            steps=steps,
            report=self._reporter(trackers, checkpoints),
        )
        self.first_step = 0 if start is None else start.step
        if start is not None and start is self.previous:
            self._train_longer(start, checkpoints)
        with self.run.progress(steps - self.first_step, "steps", "train") as advance:
            clock = Clock(advance)
            callbacks = [checkpoints, clock]
            if cfg.logger.gradients and trackers:
                callbacks.append(Gradients(partial(_log_histograms, trackers), cfg.trainer.log_every_steps))
            callbacks += build_callbacks(cfg)
            with quiet_lightning():
                trainer = build_trainer(cfg, self.run.folder, callbacks, trackers)
                trainer.fit(
                    module, datamodule=self.data, ckpt_path=None if start is None else start.folder, weights_only=True
                )
        return checkpoints, clock, module

    def _train_longer(self, start: Checkpoint, checkpoints: Checkpoints) -> None:
        """The shorter run's best drafter stays the one to beat where it was measured on the same samples and steps."""
        origin = self.inputs.origin
        assert origin is not None
        before, steps = origin.manifest()["identity"], self.cfg.drafter.unroll_steps
        same = before["states"] == self.inputs.states.id and before["drafter"]["unroll_steps"] == steps
        checkpoints.train_longer(start.manifest["best"] if same else None, origin.folder / WEIGHTS, self.run.rank)

    def _reporter(
        self, trackers: list[SafeLogger], checkpoints: Checkpoints
    ) -> Callable[[int, dict[str, float], str], None]:
        """Takes metrics to the log, metrics.jsonl and the trackers, on the axis of optimizer steps."""

        def report(step: int, metrics: dict[str, float], split: str) -> None:
            if self.run.rank > 0:
                return
            named = {f"{split}/{name}": value for name, value in metrics.items()}
            self.run.record(named, step)
            for tracker in trackers:
                tracker.log_metrics(named, step)
            words = f"loss {metrics['loss']:.4f}"
            words += f", accuracy {metrics['accuracy_unconditional/step_0']:.1%} at the first draft"
            if split == "validation":
                length = metrics["simulated_acceptance_length"]
                words += f", simulated acceptance length {length:.3f} (k {self.cfg.drafter.unroll_steps})"
                self.run.log.info("validation at step %d: %s", step, words)
            else:
                words += f", gradient norm {metrics['grad_norm']:.3g}, lr {metrics['lr']:.2e}"
                self.run.log.info("step %d/%d: %s", step, self.data.plan.steps, words)
                checkpoints.loss = metrics["loss"]

        return report

    def _finish(self, folder: Path, checkpoints: Checkpoints, clock: Clock, module: DrafterTraining) -> dict[str, Any]:
        """Writes the artifact: the drafter of the best validation, the last checkpoint, the manifest."""
        best, source = checkpoints.best, checkpoints.best_folder
        if source is not None and not (source / WEIGHTS).is_file():
            # A run that was killed behind these lines has written the drafter already.
            kept = load_drafter(folder, self.drafter.embedding)
        else:
            kept = module.drafter if source is None else load_drafter(source, self.drafter.embedding)
            with writing(folder, "the drafter"), open(save_drafter(kept, folder), "rb") as file:
                os.fsync(file.fileno())
            fsync_folder(folder)
        checkpoints.drop_all_but_last()
        measured = {} if best is None else best["metrics"]
        metrics = {
            "steps": self.data.plan.steps,
            "tokens": checkpoints.tokens,
            "tokens_per_s": clock.tokens_per_s,
            "loss": checkpoints.loss,
            "simulated_acceptance_length": measured.get("simulated_acceptance_length"),
            "peak_memory_bytes": peak_memory_bytes(),
            "best_step": None if best is None else best["step"],
            "validation": measured,
            "state_scales": self.scales,
        }
        shape = kept.shape
        coverage, validation_coverage = self.coverage
        manifest = {
            "metrics": metrics,
            "shape": shape.plain(),
            "target": self.target.fingerprint(),
            "layer_ids": list(shape.layer_ids),
            "layer_convention": layers.CONVENTION,
            "vocabulary": {
                "size": shape.draft_vocab_size,
                "of": shape.vocab_size,
                "coverage": coverage,
                "validation_coverage": validation_coverage,
                "padded": self.vocab.padded,
                "tokenizer_hash": self.vocab.tokenizer_hash,
            },
            "resumed_from": self.cfg.trainer.resume_from,
            "warm_start": self.cfg.drafter.warm_start,
            "samples": {"train": len(self.data.train_rows), "validation": len(self.data.validation_rows)},
            "left_out": self.data.skipped,
        }
        self.run.artifacts.commit(self.artifact, manifest)
        self.run.wrote(self.artifact)
        chosen = "" if best is None else f", of step {best['step']} (best validation)"
        self.run.log.info("train: %s%s", self.artifact.folder, chosen)
        return metrics


def _positions(validation: dict[str, float]) -> list[float]:
    """The share of drafts accepted at each position among those whose earlier drafts were."""
    return [value for name, value in validation.items() if name.startswith("accuracy_conditional/step_")]


def _log_histograms(trackers: list[SafeLogger], histograms: dict[str, Histogram], step: int) -> None:
    for tracker in trackers:
        tracker.log_histograms(histograms, step)


def _teacher_dtype(cfg: Config) -> torch.dtype:
    """The teacher computes as the drafter does."""
    return torch.bfloat16 if cfg.hardware.precision.startswith("bf16") else torch.float32
