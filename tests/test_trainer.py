"""The Lightning Trainer as a config means it, where machines differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from eagle3.errors import RequestError
from eagle3.trainer import build_trainer, check_trainer, quiet_lightning
from tests.stages import configure


def test_a_slurm_job_of_one_task_starts_its_ranks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a sweep by submitit is one task; what SLURM tells of tasks must not be taken for the ranks."""
    for name, value in {"JOB_ID": "7", "NTASKS": "1", "NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "eagle3")
    with quiet_lightning():
        trainer = build_trainer(configure("hardware.devices=2"), tmp_path, [], [])
    assert trainer.num_devices == 2
    environment = trainer.strategy.cluster_environment  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(environment, LightningEnvironment)
    assert not environment.creates_processes_externally


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("hardware.training_strategy=fsdp", r"training_strategy=fsdp \(.*requires a GPU accelerator"),
        ("+trainer.lightning.accelerator=abacus", r"^trainer\.lightning: Lightning makes no Trainer.*abacus"),
        ("+trainer.lightning.precision=eight", r"^trainer\.lightning: Lightning makes no Trainer.*eight"),
        ("+trainer.lightning.limit_train_batches=all", r"^trainer\.lightning: Lightning makes no Trainer"),
        (
            "+trainer.callbacks.x={_target_: lightning.pytorch.callbacks.EarlyStopping}",
            r"^trainer\.callbacks\.x: .*EarlyStopping is not given what it needs \(.*'monitor'\), found \[\]; add",
        ),
    ],
)
def test_what_lightning_will_not_take_is_found_by_the_check(wrong: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_trainer(configure(wrong))


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("words", ["trainer.deterministic=true", "+trainer.lightning.deterministic=true"])
def test_a_trial_leaves_nothing_behind(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "as it was")
    try:
        check_trainer(configure(words, "+trainer.lightning.limit_val_batches=2"))
        assert not torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == "as it was"
    finally:
        torch.use_deterministic_algorithms(before)
