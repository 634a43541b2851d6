"""MLflow: what runs leave in the output folder, read back with MLflow's own client; outages that delay nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow")

from mlflow.tracking import MlflowClient

from eagle3 import mlflow_runs
from eagle3.artifacts import Artifact
from eagle3.config import LoggerConfig
from eagle3.errors import RequestError
from eagle3.trackers import Identity, build_trackers
from tests.test_wandb import FailOnce
from tests.trained import copied, make_inputs, train_config, trained

# MLflow 3.17 with SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
NODE = {"_target_": "eagle3.mlflow_runs.MlflowLogger"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mlflow_runs.SERVER, raising=False)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's file without a run. Making its tables takes longer than all that follows; a test copies them."""
    folder = tmp_path_factory.mktemp("mlflow")
    client(folder).search_experiments()
    return folder / "mlflow.db"


def client(outputs: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{outputs}/mlflow.db")


def runs_in(outputs: Path) -> list[Any]:
    """The runs of the project, the oldest first."""
    reader = client(outputs)
    experiment = reader.get_experiment_by_name("eagle3")
    assert experiment is not None
    return list(reader.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]))


def steps_of(outputs: Path, run: Any, metric: str) -> list[int]:
    return [point.step for point in client(outputs).get_metric_history(run.info.run_id, metric)]


@pytest.fixture(scope="module")
def inputs(tiny_target: Path) -> Path:
    return make_inputs(tiny_target)


def test_a_run_has_its_config_its_curves_and_its_lineage(
    inputs: Path, tables: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = copied(inputs, tmp_path / "run")
    shutil.copy(tables, folder / "outputs")
    _, drafter, run = trained(train_config(folder, tiny_target, "logger=mlflow"))
    (found,) = runs_in(folder / "outputs")
    assert found.info.run_name == run.folder.name
    assert found.info.status == "FINISHED"
    assert found.data.params["layers/ids"] == "[1, 3, 4]"
    assert found.data.params["trainer/max_steps"] == "12"
    assert found.data.params["run_folder"] == str(run.folder)
    # Metrics stand over the optimizer step.
    assert steps_of(folder / "outputs", found, "train/loss") == [2, 4, 6, 8, 10, 12]
    assert steps_of(folder / "outputs", found, "validation/simulated_acceptance_length") == [4, 8, 12]
    # What made it: the drafter without its weights, which lie beside, and the states' manifest.
    kept = Path(found.info.artifact_uri.removeprefix("file://"))
    assert {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()} == {
        "config.json",
        "drafter/manifest.json",
        "states/manifest.json",
    }
    assert json.loads((kept / "config.json").read_text())["drafter"]["unroll_steps"] == 3
    assert found.data.tags["eagle3.drafter"] == str(drafter.folder)
    assert Path(found.data.tags["eagle3.states"]).is_dir()


def test_a_run_that_fails_shows_as_failed_and_continues_as_the_same_run(
    inputs: Path, tables: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = copied(inputs, tmp_path / "run")
    shutil.copy(tables, folder / "outputs")
    marker = tmp_path / "failed"
    fails = f"+trainer.callbacks.stop={{_target_: tests.test_wandb.{FailOnce.__name__}, step: 7, marker: {marker}}}"
    with pytest.raises(RuntimeError, match="no more"):
        trained(train_config(folder, tiny_target, "logger=mlflow", fails))
    (before,) = runs_in(folder / "outputs")
    assert before.info.status == "FAILED"
    assert steps_of(folder / "outputs", before, "train/loss") == [2, 4, 6]
    # A parameter may change between attempts; MLflow keeps the first value, config.json has the newest.
    again = train_config(folder, tiny_target, "logger=mlflow", fails, "trainer.keep_checkpoints=3")
    _, _, run = trained(again)
    (after,) = runs_in(folder / "outputs")
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    assert steps_of(folder / "outputs", after, "train/loss") == [2, 4, 6, 8, 10, 12]
    config = Path(after.info.artifact_uri.removeprefix("file://")) / "config.json"
    assert json.loads(config.read_text())["run_folder"] == str(run.folder)


BESIDE = """
    import sys
    from pathlib import Path
    from eagle3 import trackers
    from eagle3.config import LoggerConfig
    cfg = LoggerConfig(name="mlflow", loggers={"mlflow": {"_target_": "eagle3.mlflow_runs.MlflowLogger"}})
    identity = trackers.Identity(sys.argv[1], f"layers={sys.argv[1]}", "5eed")
    (tracker,) = trackers.build_trackers(cfg, Path("job"), {"output_dir": "."}, identity)
    tracker.log_metrics({"train/loss": 1.0}, 1)
    tracker.close(0)
"""


def test_jobs_beside_each_other_share_one_file_and_their_sweeps_tag(tmp_path: Path) -> None:
    """Both find no file and no experiment, and would make them at once."""
    command = [sys.executable, "-c", textwrap.dedent(BESIDE)]
    jobs = [
        subprocess.Popen([*command, name], cwd=tmp_path, stderr=subprocess.PIPE, text=True) for name in ("one", "two")
    ]
    said = [job.communicate(timeout=250)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert not any("logger.loggers.mlflow" in text for text in said), said
    found = runs_in(tmp_path)
    assert {run.info.run_name for run in found} == {"layers=one", "layers=two"}
    assert {run.data.tags["eagle3.sweep"] for run in found} == {"5eed"}
    assert {run.info.status for run in found} == {"FINISHED"}


def test_tags_of_the_config_join_ours(tables: Path, tmp_path: Path) -> None:
    shutil.copy(tables, tmp_path)
    cfg = LoggerConfig(name="mlflow", project="mine", loggers={"mlflow": {**NODE, "tags": {"team": "speed"}}})
    (tracker,) = build_trackers(cfg, tmp_path, {"output_dir": str(tmp_path)}, Identity("d-1", "job"))
    tracker.close(0)
    reader = client(tmp_path)
    experiment = reader.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = reader.search_runs([experiment.experiment_id])
    assert (run.data.tags["team"], run.data.tags["eagle3.training"]) == ("speed", "d-1")


def test_a_server_is_used_when_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {
        "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db?timeout=60",
        "artifact_location": (tmp_path / "mlflow").as_uri(),
    }
    assert mlflow_runs.store("auto", tmp_path) == local
    with pytest.raises(RequestError, match=r"logger\.mode: found online, expected MLFLOW_TRACKING_URI"):
        mlflow_runs.store("online", tmp_path)
    monkeypatch.setenv(mlflow_runs.SERVER, "http://tracking:5000")
    assert mlflow_runs.store("auto", tmp_path) == {"tracking_uri": "http://tracking:5000"}
    assert mlflow_runs.store("offline", tmp_path) == local


def test_weights_go_to_a_server(tables: Path, tmp_path: Path) -> None:
    """A database of one's own stands for the server: what is told to a client is the same."""
    shutil.copy(tables, tmp_path)
    for kind, name in (("drafter", "drafter.safetensors"), ("states", "shard")):
        (tmp_path / kind).mkdir()
        for file in (name, "manifest.json"):
            (tmp_path / kind / file).write_text("{}")
    store = mlflow_runs.store("offline", tmp_path)
    logger = mlflow_runs.MlflowLogger("d-1", experiment_name="eagle3", **store)
    _ = logger.experiment
    logger._tracking_uri = "http://tracking:5000"
    logger.log_drafter(*(Artifact(kind, kind, tmp_path / kind) for kind in ("drafter", "states")))
    (run,) = runs_in(tmp_path)
    kept = Path(run.info.artifact_uri.removeprefix("file://"))
    assert {path.name for path in (kept / "drafter").iterdir()} == {"drafter.safetensors", "manifest.json"}


UNREACHABLE = """
    import sys, time
    from pathlib import Path
    from eagle3 import trackers
    from eagle3.config import LoggerConfig
    trackers.CLOSE_TIMEOUT_S = 2.0
    cfg = LoggerConfig(name="mlflow", loggers={"mlflow": {"_target_": "eagle3.mlflow_runs.MlflowLogger"}})
    started = time.monotonic()
    (tracker,) = trackers.build_trackers(cfg, Path("job"), {"output_dir": "."}, trackers.Identity("i", "n"))
    tracker.log_metrics({"train/loss": 1.0}, 1)
    told = time.monotonic() - started
    tracker.close(0)
    print(told, time.monotonic() - started)
"""


def test_a_server_that_never_answers_costs_a_bounded_wait_and_the_process_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {**os.environ, mlflow_runs.SERVER: f"http://127.0.0.1:{server.getsockname()[1]}"}
        command = [sys.executable, "-c", textwrap.dedent(UNREACHABLE)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told, closed = map(float, done.stdout.split()[-2:])
    # MLflow itself would wait for minutes.
    assert told < 20.0
    assert closed < 60.0
    assert "logger.loggers.mlflow: init did not answer within 2 s" in done.stderr
