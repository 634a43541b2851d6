"""Checkpoints: complete or absent, and a resumed run is bit for bit the run that was never stopped."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3 import checkpoints, training_job
from eagle3.artifacts import Artifact, Artifacts
from eagle3.checkpoints import (
    AtomicCheckpointIO,
    check_checkpoint_room,
    checkpoint_to_resume,
    complete_checkpoints,
)
from eagle3.drafter import WEIGHTS
from eagle3.errors import RequestError, StageFailed, StoreError
from eagle3.stages import train
from tests.commands import eagle3
from tests.trained import Killed, copied, make_inputs, recorded, train_config, train_words, trained

KINDS = {
    "plain": (),
    "accumulated": ("trainer.accumulate=3", "trainer.max_steps=null", "trainer.max_epochs=5"),
}


@pytest.fixture(scope="session")
def inputs(tiny_target: Path) -> Path:
    """A prepared and extracted data set."""
    return make_inputs(tiny_target)


@pytest.fixture(scope="session")
def undisturbed(inputs: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Each kind of run, never stopped."""
    return {
        name: trained(train_config(copied(inputs, tmp_path_factory.mktemp("whole")), tiny_target, *overrides))[1]
        for name, overrides in KINDS.items()
    }


def killing(step: int) -> str:
    return f"+trainer.callbacks.kill={{_target_: tests.trained.KillAfter, step: {step}}}"


def copying(step: int, folder: Path) -> str:
    return f"+trainer.callbacks.copy={{_target_: tests.trained.CopyAt, step: {step}, folder: '{folder}'}}"


def recording(path: Path) -> str:
    return f"+trainer.callbacks.record={{_target_: tests.trained.Recorder, path: '{path}'}}"


def last_state(artifact: Artifact) -> dict[str, Any]:
    (checkpoint,) = complete_checkpoints(artifact.folder / "checkpoints")
    return AtomicCheckpointIO().load_checkpoint(checkpoint.folder)


def assert_same(mine: Any, theirs: Any, where: str = "") -> None:
    assert type(mine) is type(theirs), where
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, theirs), where
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            assert_same(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), where
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert mine == theirs, where


def assert_equal_artifacts(mine: Artifact, theirs: Artifact) -> None:
    """T13: weights, moments, schedule, counters, the best value and its drafter."""
    assert_same(load_file(mine.folder / WEIGHTS), load_file(theirs.folder / WEIGHTS))
    a, b = last_state(mine), last_state(theirs)
    for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers", "PackedDataModule", "callbacks"):
        assert_same(a[key], b[key], key)
    metrics, others = mine.manifest()["metrics"], theirs.manifest()["metrics"]
    for key in ("steps", "tokens", "loss", "simulated_acceptance_length", "best_step", "validation"):
        assert metrics[key] == others[key], key


def kill_and_resume(folder: Path, target: Path, step: int, *overrides: str) -> Artifact:
    """Runs until the kill, then again until the end. The kill is no part of the artifact's identity here."""
    with pytest.raises(Killed):
        trained(train_config(folder, target, killing(step), *overrides))
    (partial,) = (folder / "outputs/artifacts/drafter").glob("*.partial")
    # The callback that kills is part of the config; the same run without it has another id.
    cfg = train_config(folder, target, *overrides)
    wanted = train.drafter(cfg, Artifacts(folder / "outputs/artifacts"))
    partial.rename(wanted.partial)
    return trained(cfg)[1]


@pytest.mark.parametrize("step", [2, 4, 7, 11])
def test_t13_resume_equals_the_undisturbed_run(
    step: int, inputs: Path, tiny_target: Path, tmp_path: Path, undisturbed: dict[str, Artifact]
) -> None:
    """Killed before the first checkpoint (3), at a validation (4), between, and behind the last one (9)."""
    artifact = kill_and_resume(copied(inputs, tmp_path), tiny_target, step)
    assert_equal_artifacts(artifact, undisturbed["plain"])


@pytest.mark.parametrize("step", [5, 10])
def test_t13_resume_equals_the_undisturbed_run_with_accumulation(
    step: int, inputs: Path, tiny_target: Path, tmp_path: Path, undisturbed: dict[str, Artifact]
) -> None:
    """The last optimizer step has fewer batches than the others."""
    artifact = kill_and_resume(copied(inputs, tmp_path), tiny_target, step, *KINDS["accumulated"])
    assert_equal_artifacts(artifact, undisturbed["accumulated"])


@pytest.mark.parametrize(
    ("kind", "moment"), [("plain", "save_drafter"), ("plain", "commit"), ("accumulated", "save_drafter")]
)
def test_killed_between_the_last_step_and_the_artifact(
    kind: str,
    moment: str,
    inputs: Path,
    tiny_target: Path,
    tmp_path: Path,
    undisturbed: dict[str, Artifact],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S8: nothing is trained again, and the artifact is the same."""
    folder = copied(inputs, tmp_path)
    cfg = train_config(folder, tiny_target, *KINDS[kind])

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(training_job if moment == "save_drafter" else Artifacts, moment, die)
        with pytest.raises(Killed):
            trained(cfg)
    _, artifact, run = trained(cfg)
    assert_equal_artifacts(artifact, undisturbed[kind])
    assert not (run.folder / "metrics.jsonl").exists()


def test_t14_each_sample_once_an_epoch_over_both_runs(
    inputs: Path, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, record = copied(inputs, tmp_path), tmp_path / "seen.jsonl"
    overrides = ("trainer.max_epochs=2", "trainer.max_steps=null", recording(record))
    kill_and_resume(folder, tiny_target, 7, *overrides)
    lines = recorded(record)
    resumed = [line["batch"] for line in lines].index(6, 7)
    before, after = lines[:resumed], lines[resumed:]
    assert "going on at batch 6 of" in caplog.text
    assert [line["batch"] for line in after] == list(range(6, 6 + len(after)))
    used = [sample for line in before[:6] + after for sample in line["samples"]]
    assert len(used) == 40
    assert set(used[:20]) == set(used[20:])
    assert len(set(used)) == 20


KILL_IN_SAVE = """
import os, signal, sys
from pathlib import Path
from eagle3 import checkpoints
from tests.trained import train_config, trained

saved = checkpoints.torch.save

def save(state, file):
    if "step-00000009" in file.name:
        file.write(b"torn")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    saved(state, file)

checkpoints.torch.save = save
trained(train_config(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def killed_in_save(moment: str, folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a run while it writes the checkpoint of step 9: by a real kill -9, or by an exception at a later moment."""
    if moment == "payload":
        command = [sys.executable, "-W", "ignore", "-c", KILL_IN_SAVE, str(folder), str(target)]
        killed = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        return
    module, name = (checkpoints, "write_json") if moment == "manifest" else (checkpoints.os, "rename")
    original = getattr(module, name)

    def die(path: Path, *arguments: Any) -> Any:
        if "step-00000009" in str(path):
            raise Killed
        return original(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        with pytest.raises(Killed):
            trained(train_config(folder, target))


@pytest.mark.parametrize("moment", ["payload", "manifest", "rename"])
def test_s8_kill_in_the_middle_of_a_save(
    moment: str,
    inputs: Path,
    tiny_target: Path,
    tmp_path: Path,
    undisturbed: dict[str, Artifact],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Killed while the checkpoint of step 9 is written: the one of step 6 is taken, which is said; bit-equal."""
    folder = copied(inputs, tmp_path)
    killed_in_save(moment, folder, tiny_target, monkeypatch)
    (partial,) = (folder / "outputs/artifacts/drafter").glob("*.partial")
    assert (partial / "checkpoints/step-00000009.tmp").is_dir()
    (partial / "checkpoints/step-00000003.old").mkdir()  # of a kill in the middle of a removal
    cfg = train_config(folder, tiny_target)
    artifacts = Artifacts(folder / "outputs/artifacts")
    with pytest.raises(RequestError, match="half-written"):
        artifacts.resolve("drafter", None, lambda: train.drafter(cfg, artifacts), "make")
    metrics, artifact, _ = trained(cfg)
    assert "step-00000009.tmp: an unfinished checkpoint, ignored" in caplog.text
    assert caplog.text.count("an unfinished checkpoint") == 4, "what is left over goes with the next save"
    assert "at step 6" in caplog.text
    assert metrics["steps"] == 12
    assert_equal_artifacts(artifact, undisturbed["plain"])
    assert [path.name for path in (artifact.folder / "checkpoints").iterdir()] == ["step-00000012"]


def test_a_full_disk_is_said_with_folder_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself says "unexpected pos 704 vs 598"; /dev/full is as full as a disk can be."""
    monkeypatch.setattr(checkpoints, "STATE", "/dev/full")
    with pytest.raises(StageFailed) as caught:
        AtomicCheckpointIO().save_checkpoint({"global_step": 4, "x": torch.zeros(10_000)}, tmp_path / "step-00000004")
    words = str(caught.value)
    assert words.startswith(f"{tmp_path}: the disk is full, checkpoint step-00000004 could not be written (")
    assert "B are free); make room" in words
    assert "trainer.keep_checkpoints" in words
    assert complete_checkpoints(tmp_path) == []


def test_room_for_checkpoints_is_looked_for_before_training(tmp_path: Path) -> None:
    """As many weights as the disk has bytes: checkpoints of 12 bytes a weight cannot fit, two drafters of 4 neither."""
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(RequestError, match=r"training, with 3 checkpoints at once, will need .*B, but .*B are free"):
        check_checkpoint_room(tmp_path / "checkpoints", free, keep=2, coming=9)
    check_checkpoint_room(tmp_path / "checkpoints", free // 40, keep=2, coming=1)
    with pytest.raises(RequestError, match="with 3 checkpoints"):
        check_checkpoint_room(tmp_path / "checkpoints", free // 40, keep=2, coming=9)
    for step in (1, 2, 3):
        (tmp_path / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-0000000{step}" / "state.pt").touch()
    check_checkpoint_room(tmp_path / "checkpoints", free // 40, keep=2, coming=9)


def test_old_checkpoints_go_only_when_a_newer_one_is_complete(
    inputs: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S8: a save that fails takes nothing away; at most `keep_checkpoints` are left."""
    folder = copied(inputs, tmp_path)
    saved = AtomicCheckpointIO.save_checkpoint

    def full_disk(self: Any, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        if checkpoint["global_step"] == 12:
            raise OSError(28, "No space left on device")
        saved(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trained(train_config(folder, tiny_target))
    (partial,) = (folder / "outputs/artifacts/drafter").glob("*.partial")
    assert [c.step for c in complete_checkpoints(partial / "checkpoints")] == [6, 9]


def test_t15_checkpoints_hold_plain_values_only(undisturbed: dict[str, Artifact]) -> None:
    artifact = undisturbed["plain"]
    path = artifact.folder / "checkpoints/step-00000012/state.pt"
    state = torch.load(path, weights_only=True)
    assert {name.removeprefix("drafter.") for name in state["state_dict"]} == set(load_file(artifact.folder / WEIGHTS))
    assert all(m.dtype == torch.float32 for m in state["state_dict"].values() if m.is_floating_point())
    data = path.read_bytes()
    for name in (b"omegaconf", b"DictConfig", b"eagle3.config", b"eagle3.training"):
        assert name not in data


@pytest.mark.parametrize("damage", ["state cut", "state gone", "manifest cut", "manifest gone", "foreign manifest"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str, undisturbed: dict[str, Artifact], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = undisturbed["plain"].folder / "checkpoints/step-00000012"
    for step in (3, 12):
        shutil.copytree(source, tmp_path / f"step-{step:08d}")
    manifest = json.loads((source / "manifest.json").read_text())
    (tmp_path / "step-00000003/manifest.json").write_text(json.dumps({**manifest, "step": 3}))
    broken = tmp_path / "step-00000012"
    if damage == "state cut":
        (broken / "state.pt").write_bytes((broken / "state.pt").read_bytes()[:-1])
    elif damage == "state gone":
        (broken / "state.pt").unlink()
    elif damage == "manifest cut":
        (broken / "manifest.json").write_text('{"step": 12')
    elif damage == "manifest gone":
        (broken / "manifest.json").unlink()
    else:
        (broken / "manifest.json").write_text('{"step": 12}')
    with caplog.at_level(logging.WARNING):
        assert [c.step for c in complete_checkpoints(tmp_path)] == [3]
    assert "step-00000012: a damaged checkpoint, ignored" in caplog.text


def test_torn_bytes_of_the_right_length_are_found_when_read(undisturbed: dict[str, Artifact], tmp_path: Path) -> None:
    shutil.copytree(undisturbed["plain"].folder / "checkpoints/step-00000012", tmp_path / "step-00000012")
    path = tmp_path / "step-00000012/state.pt"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=r"state\.pt: cannot be read"):
        AtomicCheckpointIO().load_checkpoint(path.parent)


def test_a_checkpoint_of_an_earlier_version_says_what_to_do(undisturbed: dict[str, Artifact], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step-00000012"
    shutil.copytree(undisturbed["plain"].folder / "checkpoints/step-00000012", folder)
    state = torch.load(folder / "state.pt", weights_only=True)
    del state["oov_memory"]
    torch.save(state, folder / "state.pt")
    with pytest.raises(StoreError, match=r"state\.pt: found no oov_memory.*trainer\.resume=false and .*resume_from$"):
        AtomicCheckpointIO().load_checkpoint(folder)
    shutil.copy(undisturbed["plain"].folder / WEIGHTS, tmp_path)
    with pytest.raises(StoreError, match=f"or from its weights with drafter.warm_start={tmp_path}$"):
        AtomicCheckpointIO().load_checkpoint(folder)


def test_s9_a_checkpoint_that_is_not_there_is_an_error(undisturbed: dict[str, Artifact], tmp_path: Path) -> None:
    """T16, S9: the folder and what is in it are named."""
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(RequestError, match=r"trainer\.resume_from: found no .*expected a drafter artifact"):
            checkpoint_to_resume(folder, "trainer.resume_from")
    stored = undisturbed["plain"].folder / "checkpoints"
    shutil.copytree(stored, tmp_path / "checkpoints")
    (tmp_path / "checkpoints/step-00000012/state.pt").unlink()
    with pytest.raises(RequestError, match="step-00000012"):
        checkpoint_to_resume(tmp_path, "trainer.resume_from")
    for given in (undisturbed["plain"].folder, stored, stored / "step-00000012"):
        assert checkpoint_to_resume(given, "trainer.resume_from").step == 12


def test_training_longer_goes_on_from_the_last_step(
    inputs: Path, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`trainer.resume_from`: a new id, its lineage kept; weights, moments and position are those of the shorter run."""
    folder, record = copied(inputs, tmp_path), tmp_path / "seen.jsonl"
    _, short, _ = trained(train_config(folder, tiny_target))
    cfg = train_config(folder, tiny_target, f"trainer.resume_from={short.id}")
    with pytest.raises(RequestError, match=r"trainer\.resume_from: .* was trained for 12 steps, this run ends at 12"):
        train.check_config(cfg)
    cfg.trainer.max_steps, cfg.trainer.max_epochs = None, 1  # counted when the data are read
    with pytest.raises(RequestError, match=r"trainer\.resume_from: .* was trained for 12 steps, this run ends at \d+;"):
        trained(cfg)
    with pytest.raises(RequestError, match=r"trainer\.accumulate: found 2, expected 1"):
        trained(train_config(folder, tiny_target, f"trainer.resume_from={short.id}", "trainer.accumulate=2"))
    words = rf"^trainer\.resume_from=deadbeef: found nothing at .*, expected a complete .* \(there: {short.id}\)"
    with pytest.raises(RequestError, match=words):
        trained(train_config(folder, tiny_target, "trainer.resume_from=deadbeef"))
    longer = ("trainer.max_steps=20", "trainer.lr=1e-3", f"trainer.resume_from={short.id}", recording(record))
    longer = (*longer, "trainer.betas=[0.8,0.9]", "trainer.weight_decay=0.1")
    metrics, long, _ = trained(train_config(folder, tiny_target, *longer))
    assert f"training {short.id} longer, from its step 12" in caplog.text
    assert long.id != short.id
    assert long.manifest()["resumed_from"] == short.id
    assert f"drafter/{short.id}" in long.manifest()["made_from"]
    assert metrics["steps"] == 20
    lines = recorded(record)
    assert [line["step"] for line in lines] == list(range(12, 20))
    assert lines[0]["batch"] == 12
    # The rate is that of this run's config at step 12 of 20, not the end of the shorter schedule.
    assert 0 < lines[-1]["lr"] < lines[0]["lr"] < 1e-3
    optimizer = last_state(long)["optimizer_states"][0]
    assert {int(state["step"]) for state in optimizer["state"].values()} == {20}
    # So are the other settings, over those that the checkpoint remembers.
    assert [tuple(group["betas"]) for group in optimizer["param_groups"]] == [(0.8, 0.9)] * 2
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]


def test_t13_longer_training_that_improves_nothing_keeps_the_best_of_the_shorter_run(
    inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """T13, at a rate that spoils the weights; over validation samples of another measure there is no best to keep."""
    folder = copied(inputs, tmp_path)
    before, short, _ = trained(train_config(folder, tiny_target))
    spoiling = (f"trainer.resume_from={short.id}", "trainer.max_steps=14", "trainer.lr=10", "trainer.clip_norm=1e9")
    after, long, _ = trained(train_config(folder, tiny_target, *spoiling))
    assert after["steps"] == 14
    for name in ("best_step", "simulated_acceptance_length", "validation"):
        assert after[name] == before[name]
    assert_same(load_file(long.folder / WEIGHTS), load_file(short.folder / WEIGHTS))
    other, _, _ = trained(train_config(folder, tiny_target, *spoiling, "drafter.unroll_steps=2"))
    assert other["best_step"] == 14


def test_e13_training_on_from_a_drafter_of_another_target(
    inputs: Path, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E13: its optimizer state must not go on; its weights may, and it is said."""
    folder = copied(inputs, tmp_path)
    _, first, _ = trained(train_config(folder, tiny_target, "trainer.max_steps=2"))
    manifest = json.loads((first.folder / "manifest.json").read_text())
    manifest["target"]["quantization"] = "fp8"
    (first.folder / "manifest.json").write_text(json.dumps(manifest))
    differing = "was trained for another target.*quantization 'fp8' there, None here"
    with pytest.raises(RequestError, match=rf"^trainer\.resume_from: .*{first.id} {differing}.*drafter\.warm_start"):
        trained(train_config(folder, tiny_target, f"trainer.resume_from={first.id}"))
    _, second, _ = trained(train_config(folder, tiny_target, f"drafter.warm_start={first.id}", "trainer.max_steps=1"))
    assert re.search(rf"drafter\.warm_start: .*{first.id} {differing}", caplog.text)
    assert second.manifest()["warm_start"] == first.id


def test_t16_a_leftover_is_used_or_dropped_as_configured_and_it_is_said(
    inputs: Path, tiny_target: Path, tmp_path: Path, undisturbed: dict[str, Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(inputs, tmp_path)
    with pytest.raises(Killed):
        trained(train_config(folder, tiny_target, killing(8)))
    (partial,) = (folder / "outputs/artifacts/drafter").glob("*.partial")
    cfg = train_config(folder, tiny_target, "trainer.resume=false")
    partial.rename(train.drafter(cfg, Artifacts(folder / "outputs/artifacts")).partial)
    _, artifact, _ = trained(cfg)
    assert "starting afresh; 2 checkpoints of an earlier run, up to step 6, go" in caplog.text
    assert_equal_artifacts(artifact, undisturbed["plain"])


@pytest.mark.slow
def test_t13_sharded_training_resumes(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Two ranks that each hold half of weights and moments; their checkpoints hold the whole. What a kill at step 7
    would leave is copied while the undisturbed run works."""
    left = tmp_path / "left"
    sharded = ("hardware.devices=2", "hardware.training_strategy=fsdp2", copying(7, left))

    def train_in(folder: Path) -> Path:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        done = eagle3(*train_words(folder, tiny_target, *sharded), "stage=train", cwd=folder, env=env)
        assert done.returncode == 0, done.stderr
        (drafter,) = (path for path in (folder / "outputs/artifacts/drafter").iterdir() if path.is_dir())
        return drafter

    whole = train_in(copied(inputs, tmp_path / "whole"))
    assert [checkpoint.step for checkpoint in complete_checkpoints(left / "checkpoints")] == [3, 6]
    killed = copied(inputs, tmp_path / "killed")
    shutil.copytree(left, killed / "outputs/artifacts/drafter" / f"{whole.name}.partial")
    resumed = train_in(killed)
    (log,) = killed.glob("outputs/runs/*/*-train-*/run.log")
    assert f"resuming {whole.name} at step 6" in log.read_text()
    assert_equal_artifacts(Artifact("drafter", whole.name, resumed), Artifact("drafter", whole.name, whole))
