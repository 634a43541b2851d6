"""Two GPUs train what one does, by averaged gradients and in shards; ranks without documents keep up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import write_target
from tests.gpu.test_training import WIDTHS
from tests.test_train import assert_two_ranks_equal_one
from tests.trained import make_inputs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with SmolLM2's widths."""
    return write_target(tmp_path_factory.mktemp("smol") / "target", **WIDTHS)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_gpus_equal_one(strategy: str, target: Path, tmp_path: Path) -> None:
    """In fp32, so that only the order of sums differs; Adam makes a step of full size of a gradient that is near zero.
    Some rank's batch is empty."""
    both = ("hardware=gpu_1", "hardware.precision=32-true", "trainer.lr=1e-3")
    two = ("hardware.devices=2", f"hardware.training_strategy={strategy}")
    assert_two_ranks_equal_one(make_inputs(target), target, tmp_path, *two, both=both, atol=1e-3)
