"""Weights & Biases, as its users expect it: what a run leaves offline, read back with wandb's own messages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

pytest.importorskip("wandb")

from eagle3.artifacts import Artifact
from tests.commands import eagle3
from tests.trained import copied, make_inputs, train_config, train_words, trained
from tests.wandb_files import OfflineRun, offline_runs

STEP = "trainer/global_step"
OFFLINE = ("logger=wandb", "logger.mode=offline")


class FailOnce(Callback):
    """Raises in the middle of the first run that gets there."""

    def __init__(self, step: int, marker: str) -> None:
        self.step, self.marker = step, Path(marker)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("no more")


@pytest.fixture(scope="module")
def inputs(tiny_target: Path) -> Path:
    return make_inputs(tiny_target)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def run_folders(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "outputs/runs").glob("*/*-train-*") if path.is_dir())


def finished_run(folder: Path) -> OfflineRun:
    """The one offline run of a run folder, once wandb-core has written its end."""
    deadline = time.monotonic() + 100
    while True:
        (run,) = offline_runs(folder)
        if run.exit_codes or time.monotonic() > deadline:
            return run
        time.sleep(0.1)


def steps_of(run: OfflineRun, metric: str) -> list[int]:
    return [row[STEP] for row in run.history if metric in row]


@pytest.fixture(scope="module")
def whole(inputs: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[OfflineRun, Any, Path]:
    """A run from start to end, its drafter artifact and its folder."""
    folder = copied(inputs, tmp_path_factory.mktemp("whole") / "run")
    _, artifact, run = trained(train_config(folder, tiny_target, *OFFLINE, "logger.gradients=true"))
    return finished_run(run.folder), artifact, run.folder


def test_w5_the_whole_config_is_there_in_plain_values(whole: tuple[OfflineRun, Artifact, Path]) -> None:
    """C5: json.loads gave dicts and lists of plain values; nothing of OmegaConf, nothing missing."""
    offline, _, folder = whole
    assert offline.config["layers"]["ids"] == [1, 3, 4]
    assert offline.config["trainer"]["max_steps"] == 12
    assert offline.config["drafter"]["unroll_steps"] == 3
    assert offline.config["run_folder"] == str(folder)


def test_w7_metrics_stand_over_the_optimizer_step(whole: tuple[OfflineRun, Artifact, Path]) -> None:
    offline, _, _ = whole
    assert offline.axes["*"] == STEP
    assert steps_of(offline, "train/loss") == [2, 4, 6, 8, 10, 12]
    assert steps_of(offline, "train/lr") == [2, 4, 6, 8, 10, 12]
    assert steps_of(offline, "validation/simulated_acceptance_length") == [4, 8, 12]
    steps = [row[STEP] for row in offline.history if STEP in row]
    assert steps == sorted(steps)


def test_acceptance_by_position_is_a_plot(whole: tuple[OfflineRun, Artifact, Path]) -> None:
    offline, _, folder = whole
    (row,) = [row for row in offline.history if any(key.startswith("acceptance_by_position") for key in row)]
    table = next(value for value in row.values() if isinstance(value, dict) and value.get("_type") == "table-file")
    (file,) = (folder / "wandb").glob(f"offline-run-*/files/{table['path']}")
    found = json.loads(file.read_text())
    assert found["columns"] == ["position", "acceptance"]
    assert [position for position, _ in found["data"]] == [1, 2, 3]


def test_gradients_come_on_request(whole: tuple[OfflineRun, Artifact, Path]) -> None:
    offline, _, _ = whole
    rows = [row for row in offline.history if "gradients/fc.weight" in row]
    assert [row[STEP] for row in rows] == [2, 4, 6, 8, 10, 12]
    histogram = rows[0]["gradients/fc.weight"]
    assert histogram["_type"] == "histogram"
    assert sum(histogram["values"]) == 48 * 144


def test_the_drafter_is_an_artifact_with_its_lineage(whole: tuple[OfflineRun, Artifact, Path]) -> None:
    offline, drafter, _ = whole
    manifest = drafter.manifest()
    (states,) = [name for name in manifest["made_from"] if name.startswith("states/")]
    states = states.partition("/")[2]
    found = offline.artifacts
    assert set(found) == {f"drafter-{drafter.id}", f"states-{states}"}
    assert found[f"drafter-{drafter.id}"].type == "drafter"
    names = {entry.path for entry in found[f"drafter-{drafter.id}"].manifest.contents}
    assert names >= {"drafter.safetensors", "manifest.json", "states/manifest.json"}
    metadata = json.loads(found[f"drafter-{drafter.id}"].metadata)
    assert metadata["layer_ids"] == [1, 3, 4]
    assert metadata["states"] == states
    assert [entry.path for entry in found[f"states-{states}"].manifest.contents] == ["manifest.json"]


def test_a_finished_run_is_finished_and_measured_its_machine(whole: tuple[OfflineRun, Artifact, Path]) -> None:
    offline, drafter, folder = whole
    assert offline.exit_codes == [0]
    assert offline.run.display_name == folder.name
    assert offline.run.project == "eagle3"
    assert offline.run.run_id.startswith(drafter.id)
    assert not offline.run.run_group
    assert any("cpu" in name for name in offline.system_metrics)


def test_w2_a_run_that_fails_shows_as_failed_and_continues_as_the_same_run(
    inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = copied(inputs, tmp_path / "run")
    fails = f"+trainer.callbacks.stop={{_target_: tests.test_wandb.FailOnce, step: 7, marker: {tmp_path / 'failed'}}}"
    with pytest.raises(RuntimeError, match="no more"):
        trained(train_config(folder, tiny_target, *OFFLINE, fails))
    before = finished_run(run_folders(folder)[0])
    assert before.exit_codes == [1]
    assert steps_of(before, "train/loss") == [2, 4, 6]
    trained(train_config(folder, tiny_target, *OFFLINE, fails))
    after = finished_run(run_folders(folder)[1])
    assert after.run.run_id == before.run.run_id
    assert after.exit_codes == [0]
    assert steps_of(after, "train/loss") == [8, 10, 12]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_w3_a_sweeps_jobs_are_grouped_named_by_overrides_and_one_run_each_under_ddp(
    inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = copied(inputs, tmp_path / "sweep")
    words = train_words(folder, tiny_target, *OFFLINE, "hardware.devices=1,2", "trainer.max_steps=2")
    done = eagle3("-m", *words, "stage=train", cwd=folder, timeout_s=400)
    assert done.returncode == 0, done.stderr
    (sweep,) = (folder / "outputs/sweeps").iterdir()
    ids = set()
    for name in ("hardware.devices=1", "hardware.devices=2"):
        run = finished_run(sweep / name)
        assert run.run.display_name == name
        assert run.run.run_group == sweep.name
        assert run.config["layers"]["ids"] == [1, 3, 4]
        ids.add(run.run.run_id)
    assert len(ids) == 2


UNREACHABLE = """
import sys, time
from pathlib import Path
from eagle3 import trackers
from eagle3.config import LoggerConfig
trackers.CLOSE_TIMEOUT_S = 2.0
node = {"_target_": "lightning.pytorch.loggers.WandbLogger"}
cfg = LoggerConfig(name="wandb", mode="online", loggers={"wandb": node})
started = time.monotonic()
(tracker,) = trackers.build_trackers(cfg, Path(sys.argv[1]), {"seed": 1}, trackers.Identity("i", "n"))
tracker.log_metrics({"train/loss": 1.0}, 1)
told = time.monotonic() - started
tracker.close(0)
print(told, time.monotonic() - started)
"""


def test_w6_an_online_run_whose_server_hangs_costs_a_bounded_wait_and_the_process_ends(tmp_path: Path) -> None:
    """A key that no server knows, and a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # A service of its own: this process would wait at its end for what hangs in a shared one.
        env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        env |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        command = [sys.executable, "-c", UNREACHABLE, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told, closed = map(float, done.stdout.split()[-2:])
    # W&B itself would wait for 90 seconds.
    assert told < 20.0
    assert closed < 60.0
    assert "logger.loggers.wandb: init did not answer within 2 s" in done.stderr
