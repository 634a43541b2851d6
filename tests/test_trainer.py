"""The Lightning Trainer as a config means it, where machines differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from eagle3.trainer import build_trainer, quiet_lightning
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
