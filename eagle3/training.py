"""Training the drafter: what happens in a step, written as a LightningModule (walk: steps 5 and 6).

The loss of a step is the sum over unroll steps k of decay^k times the mean over the rows supervised at k, over all
ranks and all accumulated batches: every batch brings these counts along, so no rank waits for another to learn them and
accumulation equals the big batch. Weights, moments and softmax are fp32.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from eagle3.acceptance import walk
from eagle3.batches import PackedBatch
from eagle3.checkpoint import TargetHead
from eagle3.config import DrafterConfig, TrainerConfig
from eagle3.drafter import Eagle3Drafter
from eagle3.errors import RequestError, StageFailed
from eagle3.fused_step import FusedStep, obstacle
from eagle3.linear_loss import DraftTeacher
from eagle3.loss import UnrollLoss, mix_losses, mix_weights, unroll_loss
from eagle3.oov_memory import OovMemory
from eagle3.optimizers import ClippedAdamW, MuonAdamW
from eagle3.slots import spans
from eagle3.step_clock import StepClock, matrix_rate, needed_flops
from eagle3.trainer import peak_memory_bytes

log = logging.getLogger("eagle3")

ROWS, LOSS, HITS, OOV, PATH_ROWS, PATH_HITS = range(6)
# Optimizer steps within which some row has to have a loss.
FIRST_STEPS = 10


def learning_rate_factor(step: int, steps: int, warmup_ratio: float, min_lr_ratio: float) -> float:
    """The learning rate of optimizer step `step` (from 0) as a fraction of the peak: linear warm-up, then cosine.

    The first step already learns, and so does the last of `steps`, behind which the cosine ends.
    """
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


class Tally:
    """Sums over supervised rows, one line a step: rows, loss, hits, teachers outside the vocabulary, and the rows that
    are reached by hits alone with their hits. fp64 [steps, 6], so that counts stay exact."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.sums = torch.zeros(steps, 6, dtype=torch.float64, device=device)

    def add(self, batch: PackedBatch, result: UnrollLoss) -> None:
        """Adds one batch's rows."""
        slots = batch.slots
        sizes = [len(rows) for rows in slots.supervised_rows]
        reached: Tensor | None = None  # [T] bool: all drafts so far hit
        parts = zip(
            *(slots.supervised_rows, result.hits.split(sizes), result.row_losses.split(sizes), result.oov.split(sizes)),
            strict=True,
        )
        for k, (rows, hits, losses, oov) in enumerate(parts):
            path = torch.ones_like(hits) if reached is None else reached[rows]
            counts = (torch.ones_like(hits), losses, hits, oov, path, path & hits)
            self.sums[k] += torch.stack([count.sum(dtype=torch.float64) for count in counts])
            reached = torch.zeros(batch.tokens, dtype=torch.bool, device=hits.device)
            reached[rows] = path & hits

    def metrics(self, decay: float) -> dict[str, float]:
        """loss, and for each step its loss, accuracies over the full vocabulary and share of masked teachers.

        `accuracy_unconditional` counts all supervised rows of a step, `accuracy_conditional` those whose earlier drafts
        all hit, which is what serving meets.
        """
        found: dict[str, float] = {}
        total = 0.0
        for k, line in enumerate(self.sums.tolist()):
            rows = max(line[ROWS], 1.0)
            total += decay**k * line[LOSS] / rows
            found[f"loss/step_{k}"] = line[LOSS] / rows
            found[f"accuracy_unconditional/step_{k}"] = line[HITS] / rows
            found[f"accuracy_conditional/step_{k}"] = line[PATH_HITS] / max(line[PATH_ROWS], 1.0)
        all_rows = max(float(self.sums[:, ROWS].sum()), 1.0)
        return {"loss": total, "oov_fraction": float(self.sums[:, OOV].sum()) / all_rows, **found}


class DrafterTraining(LightningModule):
    """The drafter, its teacher and its optimizer.

    `steps` is the number of optimizer steps of the whole run, `report(step, metrics, split)` takes the metrics of the
    rows of all ranks, on the axis of optimizer steps.
    """

    target_ids: Tensor | None
    decays: Tensor

    def __init__(
        self,
        drafter: Eagle3Drafter,
        teacher: TargetHead,
        drafter_config: DrafterConfig,
        trainer_config: TrainerConfig,
        steps: int,
        report: Callable[[int, dict[str, float], str], None],
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.teacher = teacher.requires_grad_(False)
        self.settings, self.recipe = drafter_config, trainer_config
        self.steps, self.report = steps, report
        self.row_loss = mix_losses(drafter_config.losses)
        self.grad_norm = float("nan")
        self._norms: list[tuple[int, Tensor]] = []  # of optimizer steps, counted from 1
        self.fused: FusedStep | None = None
        drafter.midlayer.recompute = trainer_config.checkpoint_activations  # where training goes the plain way
        self.oov_memory = OovMemory()
        self.validation: dict[str, float] = {}
        self.register_buffer("target_ids", drafter.target_ids, persistent=False)
        decays = [drafter_config.step_decay**k for k in range(drafter_config.unroll_steps)]
        self.register_buffer("decays", torch.tensor(decays), persistent=False)
        # Nothing of these ever changes: ranks need not send the target's embedding and head to each other.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self, [name for name, _ in self.named_buffers()]
        )

    def unroll(self, batch: PackedBatch) -> UnrollLoss:
        """Unroll and loss of one batch."""
        weights = self.decays / batch.row_counts.clamp_min(1)
        if self.fused is not None and batch.layout is not None:
            return self.drafter(self.fused, batch, batch.layout, weights)
        return self.drafter(self._plain_loss, batch, weights)

    def _plain_loss(self, batch: PackedBatch, weights: Tensor) -> UnrollLoss:
        drafter = self.drafter
        # A checkpoint holds one rank's memory, and without its own another rank would go on with other roundings.
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        remember = self.target_ids is not None and self.device.type == "cpu" and alone
        outside = self.oov_memory.recall(batch) if remember else None
        teacher = self.teacher if outside is None else self._draft_teacher
        hidden = drafter.unroll(batch.input_ids, batch.hidden_states, batch.position_ids, batch.slots, batch.blocks)
        result = drafter.lm_head(
            hidden,
            lambda rows: unroll_loss(
                rows,
                drafter.lm_head.weight,
                batch.final_states,
                lambda states: teacher(states.to(teacher.weight.dtype)),
                batch.slots,
                weights,
                self.target_ids,
                None if self.target_ids is None else drafter.t2d,
                self.row_loss,
                self.settings.oov,
                outside=outside,
            ),
        )
        if remember and outside is None:
            self.oov_memory.learn(batch, result)
        return result

    @cached_property
    def _draft_teacher(self) -> TargetHead:
        assert self.target_ids is not None
        return self.teacher.rows(self.target_ids)

    def on_train_start(self) -> None:
        """What the config says holds, also over what a checkpoint of a shorter run remembers."""
        for optimizer, scheduler in zip(self.trainer.optimizers, self.trainer.lr_scheduler_configs, strict=True):
            for group, fresh in zip(optimizer.param_groups, self._groups(), strict=True):
                group.update({key: value for key, value in fresh.items() if key != "params"})
            scheduler.scheduler.base_lrs = [self.recipe.lr for _ in optimizer.param_groups]
            factor = self._factor(self.global_step)
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.lr * factor
        self._tally = Tally(self.settings.unroll_steps, self.device)
        self._learns, self._judged_at = False, self.global_step + FIRST_STEPS
        self._clock = StepClock(self.device)
        self._rate = matrix_rate(self.device) if self.device.type == "cuda" else None

    def on_train_batch_start(self, batch: PackedBatch, batch_idx: int) -> None:
        """The clock of the log starts."""
        self._clock.start()

    def on_before_backward(self, loss: Tensor) -> None:
        """Forward is done."""
        self._clock.mark()

    def on_after_backward(self) -> None:
        """Backward is done."""
        self._clock.mark()

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """This rank's part of the optimizer step's loss."""
        result = self.unroll(batch)
        self._tally.add(batch, result)
        # Lightning divides by the accumulated batches and averages over ranks; the row counts have done both already.
        return result.loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the norm over all weights and keeps it for the log. StageFailed when it is not finite."""
        plain = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(plain, ClippedAdamW):
            norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip_norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self._norms.append((self.global_step + 1, norm))
            self._read_norms()
            return
        # Read when the log is written: to wait for it here would let the GPU run dry. A step whose norm is not finite
        # changes no weight.
        self._norms.append((self.global_step + 1, plain.clip_to(self.recipe.clip_norm)))

    def _read_norms(self) -> None:
        """Keeps the last norm. StageFailed when one since the last reading is not finite."""
        steps, norms = zip(*self._norms, strict=True)
        self._norms.clear()
        for step, norm in zip(steps, torch.stack(norms).tolist(), strict=True):
            self.grad_norm = norm
            if not math.isfinite(norm):
                raise StageFailed(
                    f"trainer: the gradient of optimizer step {step} is not finite ({norm}), so nothing was learned "
                    "from it; check the states with `eagle3 stage=verify`, or try a lower trainer.lr"
                )

    def on_train_batch_end(self, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        """Reports at the end of every `log_every_steps`-th optimizer step and of the last."""
        step = self.global_step
        layout = batch.layout
        flops = 0.0 if layout is None else sum(needed_flops(self.drafter.shape, layout).values())
        self._clock.end(batch.tokens, sum(len(rows) for rows in batch.slots.supervised_rows), flops)
        if not self._steps_here(batch_idx) or (step % self.recipe.log_every_steps and step != self.steps):
            return
        if self._norms:
            self._read_norms()
        self._tally.sums = self._over_ranks(self._tally.sums)
        metrics = self._tally.metrics(self.settings.step_decay)
        # The optimizer's rate is already that of the next step.
        rate = self.recipe.lr * self._factor(step - 1)
        metrics |= self._clock.read(self._rate, self.trainer.world_size)
        metrics |= {"grad_norm": self.grad_norm, "lr": rate, "peak_memory_bytes": peak_memory_bytes()}
        self.report(step, metrics, "train")
        self._check_learning(step, metrics["oov_fraction"])
        self._tally = Tally(self.settings.unroll_steps, self.device)

    def _check_learning(self, step: int, oov_fraction: float) -> None:
        """StageFailed when no row so far had a loss: training would go on at a loss of 0 and learn nothing."""
        self._learns = self._learns or self.settings.oov == "keep" or oov_fraction < 1
        if not self._learns and (step >= self._judged_at or step == self.steps):
            raise StageFailed(
                f"drafter.oov=mask: up to step {step} no supervised row had a loss, since the target's own choice lies "
                f"outside the draft vocabulary of {self.drafter.shape.draft_vocab_size:,} tokens in each; look at it "
                "with `eagle3 stage=vocab`, raise drafter.draft_vocab_size, or start without drafter.warm_start"
            )

    def _steps_here(self, batch_idx: int) -> bool:
        accumulate = self.trainer.accumulate_grad_batches
        return (batch_idx + 1) % accumulate == 0 or batch_idx + 1 == self.trainer.num_training_batches

    def on_validation_epoch_start(self) -> None:
        """Starts counting."""
        self._validation_tally = Tally(self.settings.unroll_steps, self.device)
        # For each k the rounds and the accepted drafts of the walk.
        self._walks = torch.zeros(self.settings.unroll_steps, 2, dtype=torch.float64, device=self.device)
        self._broken_sample: str | None = None  # the first, on this rank, with a loss that is not finite

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        """Counts losses and hits, and walks each span as serving would, for every k up to the unroll's steps."""
        result = self.unroll(batch)
        self._validation_tally.add(batch, result)
        slots, hits = hits_by_slot(batch, result)
        mask, bounds = batch.loss_mask.cpu().numpy(), batch.cu_seqlens.tolist()
        found = [spans(mask[a:b]) + a for a, b in itertools.pairwise(bounds)]
        all_spans = np.concatenate([*found, np.empty((0, 2), dtype=np.int64)])
        walks = [walk(hits, slots, all_spans, k + 1) for k in range(self.settings.unroll_steps)]
        self._walks += torch.tensor(walks, dtype=torch.float64, device=self.device)
        if self._broken_sample is None:
            broken = torch.cat(batch.slots.supervised_rows)[~result.row_losses.isfinite()].tolist()
            if broken:
                self._broken_sample = batch.sample_ids[bisect.bisect_right(bounds, min(broken)) - 1]

    def on_validation_epoch_end(self) -> None:
        """Reports, and leaves the metrics where callbacks find them. StageFailed when the loss is not finite."""
        self._validation_tally.sums = self._over_ranks(self._validation_tally.sums)
        metrics = self._validation_tally.metrics(self.settings.step_decay)
        for k, (rounds, accepted) in enumerate(self._over_ranks(self._walks).tolist(), 1):
            metrics[f"simulated_acceptance_length/k_{k}"] = 1 + accepted / max(rounds, 1.0)
        metrics["simulated_acceptance_length"] = metrics[f"simulated_acceptance_length/k_{self.settings.unroll_steps}"]
        if not math.isfinite(metrics["loss"]):
            # Before anything counts it: hits are finite whatever the numbers behind them, so it could be the best.
            where = f", first that of sample {self._broken_sample}" if self._broken_sample else ""
            raise StageFailed(
                f"trainer: the loss of the validation at step {self.global_step} is not finite ({metrics['loss']})"
                f"{where}; check the states with `eagle3 stage=verify`, or try a lower trainer.lr"
            )
        self.validation = metrics
        self.log_dict({f"validation/{name}": value for name, value in metrics.items()}, logger=False)
        self.report(self.global_step, metrics, "validation")

    def _over_ranks(self, sums: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(sums, reduce_op="sum") if self.trainer.world_size > 1 else sums

    def _factor(self, step: int) -> float:
        return learning_rate_factor(step, self.steps, self.recipe.warmup_ratio, self.recipe.min_lr_ratio)

    def _groups(self) -> list[dict[str, Any]]:
        """Matrices and norms, which are not decayed; with Muon the head by itself."""
        head = self.drafter.lm_head.weight
        matrices = [p for p in self.drafter.parameters() if p.ndim > 1]
        norms = [p for p in self.drafter.parameters() if p.ndim <= 1]
        common = {"lr": self.recipe.lr, "weight_decay": self.recipe.weight_decay}
        adamw = {**common, "betas": tuple(self.recipe.betas)}
        if self.recipe.optimizer == "adamw":
            return [{"params": matrices, **adamw}, {"params": norms, **adamw, "weight_decay": 0.0}]
        return [
            {"params": [p for p in matrices if p is not head], **common, "muon": True},
            {"params": [head], **adamw},
            {"params": norms, **adamw, "weight_decay": 0.0},
        ]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer and a schedule that moves with its steps. Parameters have come to their device by now."""
        if self.drafter.fc.weight.is_cuda:
            self._fuse()
        optimizer: torch.optim.Optimizer
        if self.recipe.optimizer == "muon":
            if isinstance(self.drafter.fc.weight, DTensor):
                raise RequestError(
                    "trainer.optimizer: found muon with weights in shards, expected them whole, as it needs "
                    "whole matrices; try hardware.training_strategy=ddp"
                )
            optimizer = MuonAdamW(self._groups())
        elif self.fused is not None:
            optimizer = ClippedAdamW(self._groups(), self.fused.copies)
        else:
            optimizer = torch.optim.AdamW(self._groups(), fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _fuse(self) -> None:
        """Takes the written-out step where this drafter and precision have one; says so where they have none."""
        precision = str(self.trainer.precision)
        if reason := obstacle(self.drafter, precision):
            log.warning("trainer: takes the plain, slower step instead of that of the kernels for GPUs: %s", reason)
            return
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
        teacher = DraftTeacher(self.teacher.normed, self.teacher.weight, self.target_ids)
        self.teacher.weight = teacher.weight[:0]  # the rows live on in their new order
        self.fused = FusedStep(
            self.drafter,
            teacher,
            dtype,
            mix_weights(self.settings.losses),
            self.settings.oov == "mask",
            recompute=self.recipe.checkpoint_activations,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what is known about the teacher's tokens."""
        checkpoint["oov_memory"] = self.oov_memory.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts Lightning's counters between two batches, behind the last validation that was due.

        Wherever in its loop Lightning was when the checkpoint was written (in a hook of the batch or of the validation,
        at the last batch of a run that now goes on), what follows is the next batch.
        """
        self.oov_memory.load_state_dict(checkpoint["oov_memory"])
        batches = checkpoint["global_step"] * self.recipe.accumulate
        loops = checkpoint["loops"]["fit_loop"]
        done = {"ready": batches, "started": batches, "processed": batches, "completed": batches}
        loops["epoch_loop.batch_progress"].update(total=dict(done), current=dict(done), is_last_batch=False)
        running = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        loops["epoch_progress"].update(total=dict(running), current=dict(running))
        nothing = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
        loops["epoch_loop.val_loop.batch_progress"].update(
            total=dict(nothing), current=dict(nothing), is_last_batch=False
        )


def hits_by_slot(batch: PackedBatch, result: UnrollLoss) -> tuple[np.ndarray, np.ndarray]:
    """The slots of a batch's first step [R], as packed positions, and their hits at each step, bool [R, steps]."""
    slots = batch.slots
    first = slots.rows[0]
    table = torch.zeros(batch.tokens, slots.steps, dtype=torch.bool, device=result.hits.device)
    rows = torch.cat(slots.supervised_rows)
    table[rows, slots.steps_of] = result.hits
    return first.cpu().numpy(), table[first].cpu().numpy()
