"""V5: the whole walk on one conversation drives real acceptance length to nearly k + 1, through export and decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stages import configure, run_stage


# One conversation leaves none to validate on, of which Lightning warns.
@pytest.mark.filterwarnings("ignore:Total length of .list. across ranks is zero")
def test_v5_overfitting_one_conversation_accepts_nearly_every_draft(tiny_target: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "Write a short story about a ship."}) + "\n")
    cfg = configure(
        "+experiment=smoke",
        "model=llama",
        f"model.path={tiny_target}",
        "dataset=jsonl",
        f"dataset.sources.train.path={asked}",
        "dataset.max_new_tokens=64",
        "dataset.validation_samples=0",
        "layers.ids=[1,3,4]",
        "trainer.max_epochs=300",
        "trainer.max_steps=300",
        "trainer.lr=1e-2",
        "trainer.log_every_steps=100",
        "trainer.checkpoint_every_steps=300",
        "trainer.validate_every_steps=300",
        f"evaluate.sets=[{asked}]",
        "evaluate.max_new_tokens=64",
        f"output_dir={tmp_path / 'outputs'}",
    )
    metrics = {stage: run_stage(stage, cfg)[0] for stage in ("prepare", "extract", "train", "export", "evaluate")}
    found = metrics["evaluate"]["sets"]["asked"]
    assert found["k"] == 3
    assert found["lossless"]
    assert found["acceptance_length_all"] > 3.6, metrics
    assert found["baselines"]["untrained"] < 1.5
    assert found["baselines"]["bigram"] < found["acceptance_length_all"]
