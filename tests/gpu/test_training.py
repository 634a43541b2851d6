"""stage=train on a GPU: what it learns and logs beside the CPU's run, killed and resumed, guarded, profiled.

The target has SmolLM2-135M's widths, so that heads are 64 wide; documents and batches differ in length throughout.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from eagle3.artifacts import Artifact
from eagle3.errors import StageFailed
from eagle3.stages import extract
from tests.conftest import write_target
from tests.stages import run_stage
from tests.test_checkpoints import assert_equal_artifacts, kill_and_resume, last_state
from tests.test_train import LATENT
from tests.trained import copied, make_inputs, train_config, trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTHS: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
GPU = ("hardware=gpu_1", "hardware.batch_tokens=1024", "trainer.lr=1e-3")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with SmolLM2's widths."""
    return write_target(tmp_path_factory.mktemp("smol") / "target", **WIDTHS)


@pytest.fixture(scope="module")
def inputs(target: Path) -> Path:
    """Answers and states, made on the CPU."""
    return make_inputs(target)


def lines_of(run: Any) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


class FusedAndAhead(Callback):
    """Checks that training runs on what this machine has: the written-out step, batches already on the device."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert pl_module.fused is not None
        assert batch.layout is not None
        assert batch.hidden_states.is_cuda


CHECKED = "+trainer.callbacks.checked={_target_: tests.gpu.test_training.FusedAndAhead}"


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_it_learns_what_the_cpu_learns_and_logs_what_is_promised(inputs: Path, target: Path, tmp_path: Path) -> None:
    _, _, run = trained(train_config(copied(inputs, tmp_path / "gpu"), target, *GPU, CHECKED))
    _, _, other = trained(train_config(copied(inputs, tmp_path / "cpu"), target, "trainer.lr=1e-3"))
    mine, theirs = lines_of(run), lines_of(other)
    assert len(mine) == len(theirs) > 8
    for here, there in zip(mine, theirs, strict=True):
        kind = "validation" if "validation/loss" in here else "train"
        assert here[f"{kind}/loss"] == pytest.approx(there[f"{kind}/loss"], rel=0.05)
    losses = [line["train/loss"] for line in mine if "train/loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    logged, validated = mine[-2], mine[-1]
    per_step = ("loss", "accuracy_conditional", "accuracy_unconditional")
    names = ["tokens_per_s", "supervised_rows_per_s", "mfu", "peak_memory_bytes", "grad_norm", "lr"]
    names += [f"time/{part}_ms" for part in ("data", "forward", "backward", "optimizer")]
    names += [f"{name}/step_{k}" for name in per_step for k in range(3)]
    assert [name for name in names if f"train/{name}" not in logged] == []
    assert all(logged[f"train/{name}"] >= 0 for name in names)
    assert 0 < logged["train/mfu"] < 1
    assert 1 <= validated["validation/simulated_acceptance_length"] <= 4


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_latent_attention_learns_what_it_learns_on_the_cpu(inputs: Path, target: Path, tmp_path: Path) -> None:
    latent = (*LATENT, "trainer.lr=1e-3")
    exact = (*latent, "hardware.precision=32-true")  # by the written-out step, in the CPU's precision
    cfg = train_config(copied(inputs, tmp_path / "gpu"), target, *GPU, *exact)
    other = train_config(copied(inputs, tmp_path / "cpu"), target, *latent)
    mine, theirs = (lines_of(trained(each)[2]) for each in (cfg, other))
    for here, there in zip(mine, theirs, strict=True):
        if "train/loss" in here:
            assert here["train/loss"] == pytest.approx(there["train/loss"], rel=1e-3)


def test_resume_is_bit_equal_when_deterministic(inputs: Path, target: Path, tmp_path: Path) -> None:
    """Killed before the first checkpoint, between two, behind a validation."""
    exact = (*GPU, "trainer.deterministic=true")
    whole = trained(train_config(copied(inputs, tmp_path / "whole"), target, *exact))[1]
    for step in (2, 5, 8):
        artifact = kill_and_resume(copied(inputs, tmp_path / f"killed-{step}"), target, step, *exact)
        assert_equal_artifacts(artifact, whole)


def weights_of(artifact: Artifact) -> torch.Tensor:
    """All weights of a drafter behind its last step, as one row. (Its artifact's are those of the best validation.)"""
    tensors = last_state(artifact)["state_dict"]
    return torch.cat([tensor.flatten().cpu() for tensor in tensors.values() if tensor.is_floating_point()])


def apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far two drafters' weights lie apart, as a share of their norm."""
    return float((mine - theirs).norm() / theirs.norm())


def test_resume_is_within_the_spread_of_identical_runs(inputs: Path, target: Path, tmp_path: Path) -> None:
    """Without `trainer.deterministic`: a killed run ends no further from the undisturbed ones than twice as far as
    these lie apart. 1e-5 is for runs that happen to be equal; a run that loses its moments ends about 1e-2 away."""
    whole = [
        weights_of(trained(train_config(copied(inputs, tmp_path / f"whole-{number}"), target, *GPU))[1])
        for number in range(3)
    ]
    spread = max(apart(*pair) for pair in itertools.combinations(whole, 2))
    for step in (2, 5, 8):
        resumed = weights_of(kill_and_resume(copied(inputs, tmp_path / f"killed-{step}"), target, step, *GPU))
        assert min(apart(resumed, other) for other in whole) <= 2 * spread + 1e-5, step


def test_a_gradient_that_is_not_finite_stops_training(inputs: Path, target: Path, tmp_path: Path) -> None:
    """Read with the next line of the log, it still names the step; nothing was learned from it."""
    spoil = "+trainer.callbacks.spoil={_target_: tests.test_training.Spoil, step: 2}"
    with pytest.raises(StageFailed, match=r"optimizer step 3 is not finite .*eagle3 stage=verify"):
        trained(train_config(copied(inputs, tmp_path), target, *GPU, spoil))


def test_profile_and_reading_processes(inputs: Path, target: Path, tmp_path: Path) -> None:
    cfg = train_config(copied(inputs, tmp_path), target, *GPU, CHECKED, "trainer.profile=true", "trainer.num_workers=1")
    _, _, run = trained(cfg)
    text = (run.folder / "profile.json").read_text()
    assert "_attend" in text
    assert "_adamw" in text
    assert "_columns" in (run.folder / "profile.txt").read_text()


def test_states_of_the_gpus_engine_are_the_cpus(inputs: Path, target: Path, tmp_path: Path) -> None:
    """The transformers engine captures on a GPU too."""
    import shutil

    from eagle3.artifacts import Artifacts
    from eagle3.store import StatesStore

    folder = copied(inputs, tmp_path)
    (prepared,) = (folder / "outputs/artifacts/prepared").iterdir()
    (states,) = (folder / "outputs/artifacts/states").iterdir()
    theirs = StatesStore.open(Path(shutil.move(states, tmp_path / "theirs")))
    cfg = train_config(folder, target, *GPU, f"inputs.prepared={prepared.name}")
    run_stage("extract", cfg)
    mine = StatesStore.open(extract.states(cfg, Artifacts(folder / "outputs/artifacts")).folder)
    for sample_id in theirs.sample_ids:
        here, there = mine.read(sample_id, mine.layer_ids), theirs.read(sample_id, mine.layer_ids)
        for layer, found in here.items():
            assert float((found - there[layer]).norm() / there[layer].norm()) < 1e-2
