"""A small prepared and extracted data set on the tiny target, and training runs on it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from eagle3.config import Config
from eagle3.runs import Artifact, Run
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


def write_conversations(path: Path, count: int, seed: int = 0) -> Path:
    """Alpaca-like rows with answers of 2 to 30 words."""
    rng = random.Random(seed)
    rows = [
        {
            "instruction": f"{number}: " + " ".join(rng.choices(WORDS, k=rng.randint(2, 8))),
            "output": " ".join(rng.choices(WORDS, k=rng.randint(2, 30))),
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_inputs(folder: Path, target: Path, count: int = 24) -> Path:
    """Prepares and extracts; returns the output folder to copy from."""
    write_conversations(folder / "rows.jsonl", count)
    cfg = train_config(folder, target)
    for stage in ("prepare", "extract"):
        run_stage(stage, cfg)
    return folder


def train_config(folder: Path, target: Path, *overrides: str) -> Config:
    """A training run of 12 steps with everything every few steps."""
    return configure(
        "model=llama",
        f"model.path={target}",
        "dataset=custom",
        f"+dataset.sources.rows.path={folder / 'rows.jsonl'}",
        "dataset.answers=given",
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
    )


def copied(inputs: Path, folder: Path) -> Path:
    """A folder of one's own with the same artifacts."""
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    return folder


def trained(cfg: Config) -> tuple[dict[str, Any], Artifact, Run]:
    """Trains; returns the metrics, the drafter artifact and the run."""
    metrics, run = run_stage("train", cfg)
    return metrics, train.drafter(cfg, run.artifacts), run
