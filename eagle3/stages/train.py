"""Stage train: stored states → drafter artifact (steps 5 and 6 of the walk).

Everything that can be wrong is found before the first batch: states of other tokens or of another target, layers that
are not stored, a data set without supervised text, a checkpoint that is not there. What is being trained grows in the
artifact's `.partial` folder, where an interrupted run finds its checkpoints again.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle3 import layers
from eagle3.artifacts import fsync_folder
from eagle3.batches import PackedDataModule
from eagle3.blueprint import new_drafter, state_scales, warm_drafter
from eagle3.checkpoint import Target, open_target
from eagle3.checkpoints import Checkpoint, Checkpoints, checkpoint_to_resume, complete_checkpoints
from eagle3.config import Config, build
from eagle3.drafter import WEIGHTS, Eagle3Drafter, load_drafter, save_drafter
from eagle3.errors import RequestError
from eagle3.loss import mix_losses
from eagle3.published import is_published
from eagle3.runs import Artifact, Artifacts, Run
from eagle3.stages import extract
from eagle3.store import StatesStore
from eagle3.tokens import Prepared
from eagle3.tracked import Gradients, Histogram
from eagle3.trackers import Identity, SafeLogger, build_trackers
from eagle3.trainer import Clock, build_callbacks, build_trainer, check_trainer, peak_memory_bytes, quiet_lightning
from eagle3.training import DrafterTraining
from eagle3.vocab import VocabMap
from eagle3.weights import Weights

MAKE = "eagle3 stage=train"
# What may differ between two runs of one artifact: it changes how the work is done, not what comes out.
OPERATIONAL = {
    "drafter": ("name",),
    "trainer": (
        *("name", "checkpoint_every_steps", "keep_checkpoints", "log_every_steps", "deterministic"),
        *("resume", "num_workers", "profile", "checkpoint_activations"),
    ),
}


def drafter(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The drafter artifact that this config leads to, made or not. RequestError when there are no states."""
    return _drafter(cfg, artifacts, open_target(cfg), source(cfg, artifacts))


def source(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The states to train on."""
    given = cfg.inputs.states
    expected = extract.states(cfg, artifacts) if given is None else Artifact("states", given, artifacts.root)
    return artifacts.resolve("states", given, expected, extract.MAKE)


def _drafter(cfg: Config, artifacts: Artifacts, target: Target, states: Artifact) -> Artifact:
    settings = {
        group: {key: value for key, value in dataclasses.asdict(getattr(cfg, group)).items() if key not in without}
        for group, without in OPERATIONAL.items()
    }
    for group, field in (("drafter", "warm_start"), ("trainer", "resume_from")):
        given = settings[group][field]
        settings[group][field] = None if given is None else _trained(artifacts, given, f"{group}.{field}").id
    identity = {
        "states": states.id,
        "layer_ids": list(layer_ids(cfg, target)),
        **settings,
        "seed": cfg.seed,
        "ranks": ranks(cfg),
        "precision": cfg.hardware.precision,
    }
    return artifacts.of("drafter", identity)


def _trained(artifacts: Artifacts, given: str, where: str) -> Artifact:
    """A complete drafter artifact by id or folder; for a warm start also a published drafter's folder."""
    folder = Path(given).expanduser().resolve()
    if where == "drafter.warm_start" and is_published(folder):
        return Artifact("drafter", Weights(folder).digest(), folder)
    found = artifacts.resolve("drafter", given, Artifact("drafter", given, artifacts.root), MAKE, where)
    if not (found.folder / WEIGHTS).is_file():
        raise RequestError(f"{where}: {found.folder} holds no {WEIGHTS}, expected a trained drafter; see stage=runs")
    return found


def _origin(cfg: Config, artifacts: Artifacts, target: Target) -> Artifact | None:
    """The drafter that this one goes on from."""
    given, longer = cfg.drafter.warm_start, cfg.trainer.resume_from
    if longer is None:
        return None if given is None else _trained(artifacts, given, "drafter.warm_start")
    if given is not None:
        raise RequestError(
            "drafter.warm_start: cannot go with trainer.resume_from, which brings its own weights; leave one out"
        )
    origin = _trained(artifacts, longer, "trainer.resume_from")
    if differing := _other_target(origin, target):
        raise RequestError(
            f"trainer.resume_from: {origin.folder} was trained for another target ({differing}), expected the same; "
            "configure that one, or take only its weights with drafter.warm_start"
        )
    return origin


def _other_target(origin: Artifact, target: Target) -> str:
    """How the target that a drafter was trained for differs; what others have published does not say which it was."""
    trained_for = origin.manifest().get("target") if origin.complete else None
    return "" if trained_for is None else target.differences(trained_for)


def _previous(cfg: Config, origin: Artifact | None) -> Checkpoint | None:
    """The checkpoint of `trainer.resume_from`."""
    if cfg.trainer.resume_from is None or origin is None:
        return None
    checkpoint = checkpoint_to_resume(origin.folder, "trainer.resume_from")
    before, now = checkpoint.manifest["accumulate"], cfg.trainer.accumulate
    if before != now:
        raise RequestError(
            f"trainer.accumulate: found {now}, expected {before}, with which trainer.resume_from="
            f"{cfg.trainer.resume_from} counted its steps; try trainer.accumulate={before}"
        )
    return checkpoint


def layer_ids(cfg: Config, target: Target) -> tuple[int, ...]:
    """The layers that this drafter reads."""
    return extract.selections(cfg.layers, target.shape.num_layers)[0]


def ranks(cfg: Config) -> int:
    """The number of training processes."""
    return cfg.hardware.devices * int(cfg.trainer.lightning.get("num_nodes", 1))


def check_config(cfg: Config) -> None:
    """RequestError for what can be wrong with the training before there are states to train on."""
    check_trainer(cfg)
    mix_losses(cfg.drafter.losses)
    artifacts = Artifacts(Path(cfg.output_dir).absolute() / "artifacts", attached=True)
    _previous(cfg, _origin(cfg, artifacts, open_target(cfg)))


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Trains. Returns `steps, tokens, tokens_per_s, loss, simulated_acceptance_length, peak_memory_bytes` and more."""
    target = open_target(cfg)
    states = source(cfg, run.artifacts)
    artifact = _drafter(cfg, run.artifacts, target, states)
    if artifact.complete or not (cfg.dry_run or run.artifacts.claim(artifact)):
        run.log.info("train: hit, %s is complete", artifact.folder)
        run.wrote(artifact)
        return artifact.manifest()["metrics"]
    job = _Job(cfg, run, target, states, artifact)
    job.announce()
    if cfg.dry_run:
        return {}
    return job.train()


class _Job:
    """One training run, from checked inputs to a committed artifact."""

    def __init__(self, cfg: Config, run: Run, target: Target, states: Artifact, artifact: Artifact) -> None:
        self.cfg, self.run, self.target, self.states, self.artifact = cfg, run, target, states, artifact
        check_trainer(cfg)
        run.read(states)
        self.store = StatesStore.open(states.folder)
        self.store.check_target(target)
        self.layer_ids = layer_ids(cfg, target)
        absent = [i for i in self.layer_ids if i not in self.store.layer_ids]
        if absent:
            raise RequestError(
                f"layers: {states.folder} holds layers {list(self.store.layer_ids)}, the drafter reads "
                f"{list(self.layer_ids)}; run `{extract.MAKE} layers.ids={list(self.layer_ids)}` to add {absent}"
            )
        given = cfg.inputs.prepared or self.store.manifest["prepared"]
        prepared = run.artifacts.resolve(
            "prepared", given, Artifact("prepared", given, run.artifacts.root), "eagle3 stage=prepare"
        )
        run.read(prepared)
        self.prepared = Prepared.open(prepared.folder)
        self.store.verify(self.prepared)
        self.origin = _origin(cfg, run.artifacts, target)
        self.previous = _previous(cfg, self.origin)
        if self.origin is not None and self.previous is not None:
            run.read(self.origin)
        elif self.origin is not None and (differing := _other_target(self.origin, target)):
            run.log.warning("drafter.warm_start: %s was trained for another target: %s", self.origin.folder, differing)
        self.scales: list[float] | None = None
        self.drafter, self.vocab = self._new_drafter()
        self.data = self._data()
        self.first_step = 0

    def _new_drafter(self) -> tuple[Eagle3Drafter, VocabMap]:
        cfg = self.cfg
        if self.origin is not None:
            return warm_drafter(cfg.drafter, self.target, self.prepared, self.layer_ids, self.origin.folder)
        self.scales = state_scales(self.store, self.layer_ids)
        return new_drafter(cfg.drafter, self.target, self.prepared, self.layer_ids, cfg.seed, self.scales)

    def _data(self) -> PackedDataModule:
        cfg = self.cfg
        data = build(
            cfg.trainer.datamodule or {"_target_": "eagle3.batches.PackedDataModule"},
            "trainer.datamodule",
            prepared=self.prepared,
            store=self.store,
            layer_ids=self.layer_ids,
            in_draft_vocab=None if self.vocab.is_full else self.vocab.t2d.numpy(),
            unroll_steps=cfg.drafter.unroll_steps,
            mask_alignment=cfg.drafter.mask_alignment,
            batch_tokens=cfg.trainer.batch_tokens,
            epochs=cfg.trainer.max_epochs,
            max_steps=cfg.trainer.max_steps,
            accumulate=cfg.trainer.accumulate,
            seed=cfg.seed,
            rank=self.run.rank,
            ranks=ranks(cfg),
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
            f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} ({self.coverage():.2%} of the supervised tokens"
            f"{padded})",
            f"{len(data.train_rows)} samples, {tokens:,} tokens an epoch, {int(data.supervised[:, 0].sum()):,} "
            f"first drafts supervised; {len(data.validation_rows)} validation samples"
            + (f"; left out: {left_out}" if left_out else ""),
            f"{plan.steps} optimizer steps of {self.cfg.trainer.accumulate} x {plan.ranks} batches of up to "
            f"{plan.batch_tokens:,} tokens, {self.cfg.drafter.unroll_steps} unroll steps",
        ]
        for line in lines:
            self.run.log.info("train: %s", line)

    def coverage(self) -> float:
        """The share of the train split's supervised tokens that the drafter can draft."""
        return self.vocab.coverage(self.prepared.token_counts())

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
            tracker.log_drafter(self.artifact, self.states)
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
        module = build(
            cfg.trainer.module or {"_target_": "eagle3.training.DrafterTraining"},
            "trainer.module",
            drafter=self.drafter,
            teacher=self.target.teacher_head(_teacher_dtype(cfg)),
            drafter_config=cfg.drafter,
            trainer_config=cfg.trainer,
            steps=steps,
            report=self._reporter(trackers, checkpoints),
        )
        if not isinstance(module, DrafterTraining):
            raise RequestError(
                f"trainer.module: {cfg.trainer.module.get('_target_')} made a {type(module).__name__}, expected an "
                "eagle3.training.DrafterTraining or a subclass; leave trainer.module as it is in conf/trainer"
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
        assert self.origin is not None
        before = self.origin.manifest()["identity"]
        same = before["states"] == self.states.id and before["drafter"]["unroll_steps"] == self.cfg.drafter.unroll_steps
        checkpoints.train_longer(start.manifest["best"] if same else None, self.origin.folder / WEIGHTS, self.run.rank)

    def _reporter(self, trackers: list[SafeLogger], checkpoints: Checkpoints) -> Any:
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
            with open(save_drafter(kept, folder), "rb") as file:
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
        manifest = {
            "metrics": metrics,
            "shape": shape.plain(),
            "target": self.target.fingerprint(),
            "layer_ids": list(shape.layer_ids),
            "layer_convention": layers.CONVENTION,
            "vocabulary": {
                "size": shape.draft_vocab_size,
                "of": shape.vocab_size,
                "coverage": self.coverage(),
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
