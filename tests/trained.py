"""A small prepared and extracted data set on the tiny target, and training runs on it."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from eagle3.artifacts import Artifact
from eagle3.checkpoints import Checkpoints
from eagle3.config import Config
from eagle3.runs import Run
from eagle3.stages import train
from tests.stages import configure, run_stage

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "one",
    "two",
    "ships",
    "sail",
    "to",
    "Paris",
]


def write_prompts(path: Path, count: int, seed: int = 0) -> Path:
    """Prompts of 2 to 25 words, which the target will answer itself."""
    rng = random.Random(seed)
    rows = [{"prompt": f"{number}: " + " ".join(rng.choices(WORDS, k=rng.randint(2, 25)))} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@functools.cache
def make_inputs(target: Path) -> Path:
    """A prepared and extracted data set beside the tiny target, made once a session; copy from it."""
    folder = target.parent / "inputs-to-train-on"
    folder.mkdir()
    write_prompts(folder / "rows.jsonl", 24)
    cfg = train_config(folder, target)
    for stage in ("prepare", "extract"):
        run_stage(stage, cfg)
    return folder


def train_config(folder: Path, target: Path, *overrides: str) -> Config:
    """A training run of 12 steps with everything every few steps."""
    return configure(*train_words(folder, target, *overrides))


def train_words(folder: Path, target: Path, *overrides: str) -> list[str]:
    """The command line of `train_config`."""
    return [
        "model=llama",
        f"model.path={target}",
        "dataset=custom",
        f"+dataset.sources.rows.path={folder / 'rows.jsonl'}",
        "dataset.max_new_tokens=24",
        "dataset.max_length=256",
        "dataset.validation_samples=4",
        "layers.ids=[1,3,4]",
        "drafter.draft_vocab_size=300",
        "drafter.unroll_steps=3",
        "store.dtype=float32",
        "trainer.batch_tokens=160",
        "trainer.max_epochs=50",
        "trainer.max_steps=12",
        "trainer.lr=3e-3",
        "trainer.validate_every_steps=4",
        "trainer.checkpoint_every_steps=3",
        "trainer.log_every_steps=2",
        f"output_dir={folder / 'outputs'}",
        *overrides,
    ]


def copied(inputs: Path, folder: Path) -> Path:
    """A folder of one's own with the same artifacts."""
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    return folder


def trained(cfg: Config) -> tuple[dict[str, Any], Artifact, Run]:
    """Trains; returns the metrics, the drafter artifact and the run."""
    metrics, run = run_stage("train", cfg)
    return metrics, train.drafter(cfg, run.artifacts), run


class Killed(BaseException):
    """What stands for a kill -9 inside the test's own process: nothing of ours may catch it or clean up."""


class KillAfter(Callback):
    """Ends the run right after optimizer step `step`, before anything is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise Killed


class CopyAt(Callback):
    """Copies what lies on the disk right after optimizer step `step` into `folder`, unless that is there."""

    def __init__(self, step: int, folder: str) -> None:
        self.step, self.folder = step, Path(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.is_global_zero and not self.folder.exists():
            (checkpoints,) = (callback for callback in trainer.callbacks if isinstance(callback, Checkpoints))
            shutil.copytree(checkpoints.folder.parent, self.folder)


class Recorder(Callback):
    """Appends each batch's sample ids and the learning rate that was used to a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        line = {
            "batch": batch_idx,
            "step": trainer.global_step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "samples": list(batch.sample_ids),
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def recorded(path: Path) -> list[dict[str, Any]]:
    """What `Recorder` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]
