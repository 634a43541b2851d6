"""What only some trackers can show: distributions, tables and artifacts (beside the walk).

Each function takes a Lightning logger and does nothing for one whose tracker has no such thing. `trackers` calls them
in the tracker's thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from numpy.typing import NDArray

from eagle3.artifacts import MANIFEST, Artifact
from eagle3.mlflow_runs import MlflowLogger

BINS = 64
STEP = "trainer/global_step"  # the axis that Lightning's WandbLogger gives to every metric


@dataclass(frozen=True)
class Histogram:
    """Counts between edges: `counts` int64 [BINS], `edges` float64 [BINS + 1]."""

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]

    @classmethod
    def of(cls, values: torch.Tensor) -> Histogram:
        """The distribution of a tensor's finite elements, counted where the tensor lies."""
        flat = values.detach().float().flatten()
        flat = flat[flat.isfinite()]
        low, high = (float(bound) for bound in flat.aminmax()) if len(flat) else (0.0, 0.0)
        if low == high:
            high = low + 1.0
        counts = torch.histc(flat, BINS, low, high).cpu().numpy().astype(np.int64)
        return cls(counts, np.linspace(low, high, BINS + 1))


class Gradients(Callback):
    """Reports the distribution of each weight's gradient, before it is clipped, every so many optimizer steps."""

    def __init__(self, report: Callable[[dict[str, Histogram], int], None], every_steps: int) -> None:
        self.report, self.every_steps = report, every_steps

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Lightning's hook, after the backward passes of an optimizer step."""
        step = trainer.global_step + 1
        if step % self.every_steps:
            return
        weights = pl_module.drafter.named_parameters()
        found = {f"gradients/{name}": Histogram.of(p.grad) for name, p in weights if p.grad is not None}
        self.report(found, step)


def log_histograms(logger: Any, histograms: Mapping[str, Histogram], step: int) -> None:
    """To W&B and TensorBoard."""
    experiment = logger.experiment
    if _is_wandb(experiment):
        import wandb

        shown = {name: wandb.Histogram(np_histogram=(h.counts, h.edges)) for name, h in histograms.items()}
        experiment.log({**shown, STEP: step})
    elif hasattr(experiment, "add_histogram_raw"):
        for name, h in histograms.items():
            middles = (h.edges[1:] + h.edges[:-1]) / 2
            experiment.add_histogram_raw(
                name,
                min=h.edges[0],
                max=h.edges[-1],
                num=int(h.counts.sum()),
                sum=float((middles * h.counts).sum()),
                sum_squares=float((middles**2 * h.counts).sum()),
                bucket_limits=h.edges[1:].tolist(),
                bucket_counts=h.counts.tolist(),
                global_step=step,
            )


def log_positions(logger: Any, rates: Sequence[float], step: int) -> None:
    """To W&B, as a table and a line plot of it."""
    experiment = logger.experiment
    if rates and _is_wandb(experiment):
        import wandb

        rows = [[position, rate] for position, rate in enumerate(rates, 1)]
        table = wandb.Table(columns=["position", "acceptance"], data=rows)
        title = "Acceptance by position (validation samples)"
        plot = wandb.plot.line(table, "position", "acceptance", title=title)
        experiment.log({"acceptance_by_position": plot, STEP: step})


def log_drafter(logger: Any, drafter: Artifact, states: Artifact) -> None:
    """To W&B: the drafter's folder without checkpoints, made from an artifact that holds the states' manifest.

    Hidden states themselves stay where they are: their manifest says which they were. MLflow's logger has its own way.
    """
    if isinstance(logger, MlflowLogger):
        logger.log_drafter(drafter, states)
    experiment = logger.experiment
    if not _is_wandb(experiment):
        return
    import wandb

    source = wandb.Artifact(f"states-{states.id}", type="states", metadata={"folder": str(states.folder)})
    source.add_file(str(states.folder / MANIFEST))
    if experiment.offline:
        experiment.log_artifact(source)  # offline nothing can be used, only logged beside
    else:
        experiment.use_artifact(source)
    manifest = drafter.manifest()
    metadata = {key: manifest.get(key) for key in ("layer_ids", "layer_convention", "shape", "metrics", "made_from")}
    made = wandb.Artifact(f"drafter-{drafter.id}", type="drafter", metadata={**metadata, "states": states.id})
    for path in sorted(drafter.folder.iterdir()):
        if path.is_file():
            made.add_file(str(path), policy="immutable")  # as artifacts are; else wandb copies all of it first
    made.add_file(str(states.folder / MANIFEST), name="states/manifest.json")
    experiment.log_artifact(made)


def abandon_wandb() -> None:
    """Ends the helper process of a W&B that hangs, so that the interpreter's exit does not wait for it.

    What was logged is in its files on disk, and `wandb sync` uploads it another time.
    """
    own = str(os.getpid())
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == own and b"wandb-core" in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


def _is_wandb(experiment: Any) -> bool:
    return type(experiment).__module__.partition(".")[0] == "wandb"
