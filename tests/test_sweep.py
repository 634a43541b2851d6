"""Sweeps: one child a job, one pass of the target for all layers, a live summary, no finished work repeated."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import MissingConfigException

from eagle3 import launchers, sweep
from eagle3.config import Config, LayersConfig, ModelConfig, StageConfig, register_schema
from eagle3.sweep import Job, job_names, union_requests
from eagle3.validation import explain
from tests.commands import eagle3, start, write_stages
from tests.test_pipeline import chats
from tests.trained import copied, make_inputs, train_words

# Light stand-ins for what the training stages build, so that a child need not import Lightning.
LIGHT = [
    *("trainer.lightning._target_=builtins.dict", "trainer.datamodule._target_=builtins.dict"),
    *("trainer.module._target_=builtins.dict", "drafter.module._target_=builtins.dict"),
    "logger.loggers.csv._target_=builtins.dict",
]
RECORDER = """
from pathlib import Path

def run(cfg, run):
    with open(Path(cfg.output_dir) / "worked.txt", "a") as file:
        print(cfg.stage.name, cfg.layers.name, cfg.layers.also, file=file)
    return {{}}

def check_config(cfg):
    pass

def prepared(cfg, artifacts):
    pass
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_stages(tmp_path_factory.mktemp("staged"))


def the_sweep(here: Path) -> Path:
    (folder,) = (here / "outputs" / "sweeps").iterdir()
    return folder


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "summary.csv", newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def result_of(here: Path, stage: str) -> str:
    (path,) = here.glob(f"outputs/runs/*/*-{stage}-*/result.json")
    return path.read_text()


def job_folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir() and path.name != "report"}


def test_job_folders_are_named_by_what_differs() -> None:
    """C1: only [A-Za-z0-9._=-], at most 255 bytes, distinct, whatever the values hold."""
    grids = [
        [["stage=train", "layers=eagle"], ["stage=train", "layers=late"]],
        [["layers.ids=[2,30,58]", "+experiment=a/b"], ["layers.ids=[1,15,45]", "+experiment=a/b"]],
        [["x=1/2"], ["x=1,2"], ["x='1 2'"], ["x=[1,2]"]],
        [[f"layers.ids=[{','.join(map(str, range(i, 200)))}]"] for i in range(3)],
        [["x=ü"], ["x=ö"]],
        [["layers=eagle"]],
        [["x=../../etc"], ["x=.."], ["x=."]],
    ]
    for grid in grids:
        names = job_names(grid)
        assert len(set(names)) == len(grid)
        for name in names:
            assert re.fullmatch(r"[A-Za-z0-9._=-]+", name)
            assert len(name.encode()) <= 255
            assert name not in (".", "..")
    assert job_names(grids[0]) == ["layers=eagle", "layers=late"]
    assert job_names(grids[1]) == ["layers.ids=2-30-58", "layers.ids=1-15-45"]


def test_job_folders_of_a_search_are_named_by_all_that_it_varies() -> None:
    """A search tells its jobs batch by batch: what is equal within one may differ in the next."""
    typed = ["+experiment=demo", "stage=train", "layers=eagle,late", "trainer.lr=interval(1e-4,1e-2)"]
    batches = [
        [["+experiment=demo", "stage=train", f"layers={name}", f"trainer.lr={lr}"] for name in ("eagle", "late")]
        for lr in (0.001, 0.002)
    ]
    names = [name for batch in batches for name in job_names(batch, typed)]
    assert names[0] == "layers=eagle-trainer.lr=0.001"
    assert len(set(names)) == 4
    assert job_names([batches[0][0]] * 2, typed) == [names[0]] * 2, "the same point again is the same job"


def test_a_field_that_stands_twice_on_the_command_line_is_named_by_its_last_value() -> None:
    typed = ["layers.ids=[1,3,5]", "layers.ids=[1,2,5],[2,3,4]"]
    jobs = [[typed[0], "layers.ids=[1,2,5]"], [typed[0], "layers.ids=[2,3,4]"]]
    assert job_names(jobs, typed) == ["layers.ids=1-2-5", "layers.ids=2-3-4"]


def job(name: str, stage: str = "train", seed: int = 0, **layers) -> Job:
    cfg = Config(
        stage=StageConfig(stage), model=ModelConfig(name="m"), layers=LayersConfig(name=name, **layers), seed=seed
    )
    return Job(name, (f"layers={name}",), cfg)


def test_jobs_that_differ_in_layers_share_one_capture() -> None:
    jobs = [job("eagle"), job("late", fractions=[0.6, 0.75, 0.9]), job("own", ids=[1, 2]), job("eagle")]
    ((first, selections),) = union_requests(jobs)
    assert first is jobs[0]
    assert selections == [None, [0.6, 0.75, 0.9], [1, 2]]


def test_jobs_over_other_states_do_not_share_a_capture() -> None:
    other = job("late", stage="pipeline", fractions=[0.9])
    other.cfg.dataset.seed = 1
    assert union_requests([job("eagle", stage="pipeline"), other]) == []
    assert union_requests([job("eagle", stage="pipeline"), job("eagle", stage="pipeline")]) == []
    assert union_requests([job("eagle", stage="export"), job("late", stage="export", fractions=[0.9])]) == []
    # Drafter and trainer do not matter to states.
    trained = [job("eagle"), job("late", fractions=[0.9])]
    trained[1].cfg.trainer.lr = 0.5
    assert len(union_requests(trained)) == 1
    # Nor does the seed of training.
    assert len(union_requests([job("eagle"), job("late", fractions=[0.9], seed=1)])) == 1


def test_trainings_that_make_no_states_themselves_get_them_whatever_is_swept() -> None:
    alike = [job("eagle", seed=seed) for seed in (0, 1)]
    assert union_requests(alike) == [(alike[0], [None])]
    for each in alike:
        each.cfg.inputs.states = "7bb8"
    assert union_requests(alike) == []


def test_parallel_jobs_get_what_they_share_before_they_start() -> None:
    alike = [job("eagle", stage="pipeline", seed=seed) for seed in (0, 1)]
    assert union_requests(alike) == []
    ((first, selections),) = union_requests(alike, parallel=True)
    assert (first, selections) == (alike[0], [None])
    assert union_requests(alike[:1], parallel=True) == []


def test_the_same_grid_has_one_id_in_whatever_order() -> None:
    """S12: the same sweep leads to the same folder."""
    register_schema()
    launchers.register()

    def found(*overrides: str) -> str:
        cfg = compose("config", return_hydra_config=True)
        cfg.hydra.overrides.task = list(overrides)
        return sweep.sweep_id(_root_=cfg)

    with initialize_config_module("eagle3.conf", version_base="1.3"):
        first = found("layers=eagle,late", "trainer.lr=1e-3,1e-4")
        assert found("trainer.lr=1e-4,1e-3", "layers=late,eagle") == first
        assert found("layers=eagle,late", "trainer.lr=1e-3") != first
        assert found("layers=eagle,late") != found("layers='eagle,late'")
        assert found("layers=glob(*)") != first


def test_a_failed_job_stops_no_other_and_is_tried_again(tmp_path: Path, env: dict[str, str]) -> None:
    """S12: the same sweep again skips what is done and tries the rest; the earlier attempt is kept beside it."""
    (tmp_path / "outputs").mkdir()
    grid = ["-m", "stage.name=once", "layers=eagle,late,middle"]
    first = eagle3(*grid, cwd=tmp_path, env=env)
    assert first.returncode == 1
    assert "1 jobs of the sweep failed: layers=late (once failed: RuntimeError: not yet)" in first.stderr
    folder = the_sweep(tmp_path)
    assert job_folders(folder) == {"layers=eagle", "layers=late", "layers=middle"}
    assert {name: row["status"] for name, row in rows(folder).items()} == {
        "layers=eagle": "done",
        "layers=late": "failed",
        "layers=middle": "done",
    }
    assert "Traceback" in (folder / "layers=late" / "run.log").read_text()
    second = eagle3("-m", "layers=middle,late,eagle", "stage.name=once", cwd=tmp_path, env=env)
    assert second.returncode == 0, second.stderr
    assert the_sweep(tmp_path) == folder
    assert (tmp_path / "outputs" / "worked.txt").read_text().split() == ["eagle", "middle", "late"]
    assert {row["status"] for row in rows(folder).values()} == {"done"}
    assert "Traceback" in (folder / "layers=late.attempt-1" / "run.log").read_text()


PARENT = """
import sys
from eagle3 import cli
code = cli.command()
assert "torch" not in sys.modules, "the parent imported torch"
sys.exit(code)
"""


def test_lists_are_swept_one_job_each(tmp_path: Path, env: dict[str, str]) -> None:
    """C1, C2: two lists are two jobs, each with a list of three ints; an index maps folders to overrides."""
    command = [sys.executable, "-c", PARENT, "-m", "stage.name=echo", "layers.ids=[2,30,58],[1, 15, 45]"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = the_sweep(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    assert index == {
        "layers.ids=2-30-58": ["stage.name=echo", "layers.ids=[2,30,58]"],
        "layers.ids=1-15-45": ["stage.name=echo", "layers.ids=[1,15,45]"],
    }
    assert job_folders(folder) == set(index)
    for name, ids in (("layers.ids=2-30-58", [2, 30, 58]), ("layers.ids=1-15-45", [1, 15, 45])):
        config = (folder / name / "config.yaml").read_text()
        assert "ids:\n" + "".join(f"  - {i}\n" for i in ids) in config
        assert json.loads((folder / name / "result.json").read_text())["metrics"]["loss"] == 0.5
    assert not (tmp_path / "outputs" / "runs").exists()


def test_all_jobs_are_checked_before_the_first_starts(tmp_path: Path, env: dict[str, str]) -> None:
    done = eagle3("-m", "stage.name=echo", "trainer.lr=1e-3,-1", "layers=eagle,late", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "no job was started, 2 are wrong" in done.stderr
    assert "job trainer.lr=-1-layers=late: trainer.lr: found -1.0" in done.stderr
    assert not list(tmp_path.iterdir()), "what was refused leaves nothing"


def test_layers_that_the_target_lacks_are_found_before_the_first_job(tmp_path: Path, env: dict[str, str]) -> None:
    """Known without torch, from the config.json of a local checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 10}}))
    words = ["-m", "stage=train", "model=llama", "model.path=.", "layers.ids=[1,2,3],[2,30,58]"]
    done = eagle3(*words, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "no job was started, 1 are wrong" in done.stderr
    assert "layers.ids: found 30 in [2, 30, 58]" in done.stderr


def test_ranks_of_a_swept_job_start_no_sweep(tmp_path: Path, env: dict[str, str]) -> None:
    """C4: a 2-value sweep with 2 ranks makes exactly 2 run folders; all ranks agree on folder and config hash."""
    done = eagle3("-m", "stage.name=ranks", "layers=eagle,late", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    folder = the_sweep(tmp_path)
    assert job_folders(folder) == {"layers=eagle", "layers=late"}
    for name in job_folders(folder):
        seen = [(folder / name / f"seen-by-{rank}").read_text() for rank in (0, 1)]
        assert seen[0] == seen[1]
        assert seen[0].startswith(str(folder / name))
    assert not (tmp_path / "outputs" / "runs").exists()


def test_a_pipeline_sweep_passes_the_target_once(tmp_path: Path) -> None:
    """One prepare and one extract for the union of the layers, then the jobs; a finished sweep starts nothing."""
    env = write_stages(tmp_path)
    stages = ("prepare", "extract", "train", "export", "evaluate")
    for name in stages:
        (tmp_path / "more_stages" / f"{name}.py").write_text(RECORDER.format())
    site = tmp_path / "sitecustomize.py"
    site.write_text(site.read_text().replace("append(", "insert(0, "))
    (tmp_path / "outputs").mkdir()
    grid = ["-m", "layers=eagle,late", *LIGHT]
    done = eagle3(*grid, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    worked = (tmp_path / "outputs" / "worked.txt").read_text().splitlines()
    assert worked[:2] == ["prepare eagle []", "extract eagle [None, [0.6, 0.75, 0.9]]"]
    jobs = [f"{stage} {layers} []" for layers in ("eagle", "late") for stage in stages]
    assert worked[2:] == jobs
    assert eagle3(*grid, cwd=tmp_path, env=env).returncode == 0
    assert (tmp_path / "outputs" / "worked.txt").read_text().splitlines() == worked


def test_a_stopped_sweep_stops_its_job_and_goes_on_later(tmp_path: Path, env: dict[str, str]) -> None:
    grid = ["-m", "stage.name=slow", "layers=eagle,late"]
    parent = start(*grid, cwd=tmp_path, env=env)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("outputs/sweeps/*/layers=eagle/waiting")):
        assert parent.poll() is None, parent.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = eagle3(*grid, cwd=tmp_path, env=env)
    assert again.returncode == 2
    assert f"is being made by process {parent.pid}" in again.stderr
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=120)
    assert parent.returncode == 1
    folder = the_sweep(tmp_path)
    assert job_folders(folder) == {"layers=eagle"}
    assert {name: row["status"] for name, row in rows(folder).items()} == {
        "layers=eagle": "interrupted",
        "layers=late": "waiting",
    }


def test_another_launcher_runs_children_too(tmp_path: Path, env: dict[str, str]) -> None:
    """joblib, submitit and the like call a function for each job, which must not run the stage in their process."""
    words = ["-m", "hydra/launcher=basic", "layers=late,eagle", "stage.name=boom"]
    done = eagle3(*words, cwd=tmp_path, env=env)
    assert done.returncode == 1
    folder = the_sweep(tmp_path)
    assert {name: row["status"] for name, row in rows(folder).items()} == {
        "layers=late": "done",
        "layers=eagle": "failed",
    }
    assert (folder / "layers=eagle" / "config.yaml").exists()
    assert "1 jobs of the sweep failed: layers=eagle" in done.stderr


VALUED = """
    def run(cfg, run):
        if cfg.seed == 13:
            raise RuntimeError("thirteen")
        return {"simulated_acceptance_length": 1.0 + cfg.trainer.lr + (cfg.layers.name == "late")}
    """


@pytest.fixture
def valued(tmp_path: Path) -> dict[str, str]:
    """The environment in which a stage named `valued` reports an acceptance length."""
    env = write_stages(tmp_path)
    (tmp_path / "more_stages" / "valued.py").write_text(textwrap.dedent(VALUED))
    return env


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_a_parallel_sweep_has_the_same_folders_and_summary(
    launcher: str, tmp_path: Path, valued: dict[str, str]
) -> None:
    """Joblib here; submitit and ray stand for clusters. A failing job stops no other; any launcher goes on with it."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    grid = ["-m", "stage.name=valued", "seed=0,13"]
    done = eagle3(*grid, f"hydra/launcher={launcher}", cwd=tmp_path, env=valued)
    assert done.returncode == 1, done.stderr
    assert "1 jobs of the sweep failed" in done.stderr
    folder = the_sweep(tmp_path)
    assert {name: row["status"] for name, row in rows(folder).items()} == {"seed=0": "done", "seed=13": "failed"}
    assert "Traceback" in (folder / "seed=13" / "run.log").read_text()
    assert "Traceback" not in (folder / "seed=0" / "run.log").read_text()
    assert (folder / "report.html").is_file()
    again = eagle3(*grid, cwd=tmp_path, env=valued)
    assert "1 of them done already" in again.stderr
    assert the_sweep(tmp_path) == folder


def test_a_search_maximizes_the_acceptance_length(tmp_path: Path, valued: dict[str, str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2", "stage.name=valued"]
    words += ["hydra.sweeper.sampler.seed=1", "layers=eagle,late", "trainer.lr=tag(log,interval(1e-4,1e-2))"]
    refused = eagle3(*words, cwd=tmp_path, env=valued)
    assert refused.returncode == 2
    assert "hydra.sweeper.direction: found minimize, expected maximize" in refused.stderr
    done = eagle3(*words, "hydra.sweeper.direction=maximize", cwd=tmp_path, env=valued)
    assert done.returncode == 0, done.stderr
    folder = the_sweep(tmp_path)
    found = rows(folder)
    assert len(found) == 4
    best = max(float(row["simulated_acceptance_length"]) for row in found.values())
    result = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert result["best_value"] == best
    assert result["best_params"]["layers"] == "late"


def test_a_search_captures_all_layers_that_it_may_try_before_its_first_job(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    env = write_stages(tmp_path)
    for name in ("prepare", "extract", "train"):
        (tmp_path / "more_stages" / f"{name}.py").write_text(RECORDER.format().replace("{}", "{'loss': 1.0}"))
    site = tmp_path / "sitecustomize.py"
    site.write_text(site.read_text().replace("append(", "insert(0, "))
    (tmp_path / "outputs").mkdir()
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=2", *LIGHT]
    words += ["hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1", "stage=train", "layers=choice(eagle,late)"]
    eagle3(*words, cwd=tmp_path, env=env)
    worked = (tmp_path / "outputs" / "worked.txt").read_text().splitlines()
    assert sum(line.startswith("extract") for line in worked) == 1
    assert worked[0].startswith("prepare ")
    assert json.loads(worked[1].split(maxsplit=2)[2].replace("None", "null")) in (
        [None, [0.6, 0.75, 0.9]],
        [[0.6, 0.75, 0.9], None],
    )


def test_a_search_ends_when_more_of_its_jobs_fail_than_it_may(tmp_path: Path, valued: dict[str, str]) -> None:
    """Only when somebody asks for it: without, a failing job stops no other."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=2", "seed=13"]
    words += ["hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1", "stage.name=valued"]
    words += ["trainer.lr=interval(1e-4,1e-2)"]
    ended = eagle3(*words, "hydra.sweeper.max_failure_rate=0.5", cwd=tmp_path, env=valued)
    assert ended.returncode == 1
    assert (
        "hydra.sweeper.max_failure_rate: 1 of the last 1 jobs failed, more than 0.5 of them; the search ends here"
        in (ended.stderr)
    )
    assert "1 jobs of the sweep failed: trainer.lr=" in ended.stderr
    folder = the_sweep(tmp_path)
    assert len(rows(folder)) == 1
    assert (folder / "report.html").is_file()
    went_on = eagle3(*words, cwd=tmp_path, env=valued)
    assert went_on.returncode == 1
    assert "2 jobs of the sweep failed" in went_on.stderr


def test_a_job_of_several_tasks_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    """Each task would run the whole job; the ranks of a training are its own children."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["-m", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=8", "stage.name=echo", "seed=0,1"]
    done = eagle3(*words, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "hydra.launcher.tasks_per_node: found 8, expected 1" in done.stderr


@pytest.mark.slow
def test_a_sweep_of_trainings_is_one_command_and_so_is_its_dry_run(tiny_target: Path, tmp_path: Path) -> None:
    """In a new folder: it prepares and captures first. A dry run says so, ends with 0 and counts as nothing done."""
    words = ["-m", "+experiment=smoke", "model=llama", f"model.path={tiny_target}", "dataset=jsonl", "stage=train"]
    words += [f"dataset.sources.train.path={chats(tmp_path / 'train.jsonl', 12)}", "layers.ids=[1,3,4],[2,3,5]"]
    for _ in range(2):
        dry = eagle3(*words, "dry_run=true", cwd=tmp_path)
        assert dry.returncode == 0, dry.stderr
        assert "dry run: shared by all jobs and made first: stage=extract layers.also=[[1,3,4],[2,3,5]]" in dry.stderr
        assert "done already" not in dry.stderr
        assert "report" not in dry.stderr
        assert job_folders(the_sweep(tmp_path)) == {"layers.ids=1-3-4", "layers.ids=2-3-5"}
        assert {row["status"] for row in rows(the_sweep(tmp_path)).values()} == {"dry run"}
        assert not (tmp_path / "outputs/artifacts").exists()
    words[-1] = "layers.ids=[1,3,4],[1,2,3]"
    assert eagle3(*words, cwd=tmp_path).returncode == 0
    assert len(list(tmp_path.glob("outputs/artifacts/drafter/*/manifest.json"))) == 2
    # Now there are states, without layer 5.
    words[-1] = "layers.ids=[1,3,4],[2,3,5]"
    dry = eagle3(*words, "dry_run=true", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    (log,) = tmp_path.glob("outputs/sweeps/*/layers.ids=2-3-5/run.log")
    assert "would train on layers [2, 3, 5], once the sweep has stored them" in log.read_text()
    page = eagle3("stage=report", cwd=tmp_path)
    assert "layers.ids=1-2-3" in Path(json.loads(result_of(tmp_path, "report"))["metrics"]["page"]).read_text()
    assert page.returncode == 0


@pytest.mark.slow
def test_jobs_side_by_side_that_need_the_same_drafter_train_it_once(tiny_target: Path, tmp_path: Path) -> None:
    """What they differ in comes after training: one trains, the other waits for it and says so."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    folder = copied(make_inputs(tiny_target), tmp_path / "same")
    words = train_words(folder, tiny_target, "stage=train", "evaluate.k=1,2")
    done = eagle3("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *words, cwd=folder, timeout_s=250)
    assert done.returncode == 0, done.stderr
    (sweep_folder,) = (folder / "outputs" / "sweeps").iterdir()
    logs = [(sweep_folder / name / "run.log").read_text() for name in ("evaluate.k=1", "evaluate.k=2")]
    assert sum("step 12/12" in text for text in logs) == 1
    assert sum("train: hit" in text for text in logs) == 1
    assert len(list((folder / "outputs/artifacts/drafter").glob("*/manifest.json"))) == 1


def test_a_launcher_that_is_not_installed_names_its_extra() -> None:
    error = MissingConfigException("not found", missing_cfg_file="hydra/launcher/ray", options=["basic", "process"])
    assert explain(error) == "hydra/launcher=ray: its plugin is not installed; run `pip install 'eagle3[ray]'`"


@pytest.mark.slow
def test_each_job_of_a_pipeline_sweep_trains_exports_and_evaluates_after_one_pass_of_the_target(
    tiny_target: Path, tmp_path: Path
) -> None:
    """The real stages: real acceptance lengths in the summary and the report, states from a single run."""
    asked = f"+dataset.sources.asked={{path: {chats(tmp_path / 'asked.jsonl', 3, first=50)}, role: heldout}}"
    words = ["-m", "+experiment=smoke", "model=llama", f"model.path={tiny_target}", "dataset=jsonl", asked]
    words += [f"dataset.sources.train.path={chats(tmp_path / 'train.jsonl', 12)}", "layers.ids=[1,3,4],[2,3,5]"]
    done = eagle3(*words, cwd=tmp_path, timeout_s=280)
    assert done.returncode == 0, done.stderr
    folder = the_sweep(tmp_path)
    found = rows(folder)
    assert set(found) == {"layers.ids=1-3-4", "layers.ids=2-3-5"}
    for name, row in found.items():
        assert row["status"] == "done"
        assert 1 <= float(row["acceptance_length"]) <= 4
        assert int(row["evaluate.rounds"]) > 0
        assert Path(row["export.folder"], "config.json").is_file()
        wrote = json.loads((folder / name / "artifacts.json").read_text())["wrote"]
        assert [entry["kind"] for entry in wrote] == ["drafter", "export"]
    page = (folder / "report.html").read_text()
    assert "simulated acceptance length" not in page.split("</div>")[0], "the verdict is about what was decoded"
    # Of all runs, those of the jobs among them, one passed the target; its states have the layers of both.
    passes = [log for log in tmp_path.glob("outputs/**/run.log") if " prepared samples = " in log.read_text()]
    assert [log.parent.parent.parent.name for log in passes] == ["runs"]
    (states,) = tmp_path.glob("outputs/artifacts/states/*/manifest.json")
    assert set(json.loads(states.read_text())["layer_ids"]) >= {1, 2, 3, 4, 5}
