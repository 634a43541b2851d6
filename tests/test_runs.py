"""Run folders: one per attempt, never reused, with all that is needed to repeat and to trace the run."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from eagle3 import cli, runs
from eagle3.artifacts import write_json
from eagle3.config import Config, LayersConfig, ModelConfig, StageConfig
from eagle3.errors import RequestError
from eagle3.runs import Run, config_hash
from eagle3.stages import runs as runs_stage


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    cfg = Config(model=ModelConfig(name="llama/ü 1"), stage=StageConfig("train"), layers=LayersConfig(ids=[2, 3]))
    cfg.output_dir = str(tmp_path / "outputs")
    return cfg


def read(run: Run, name: str) -> dict:
    return json.loads((run.folder / name).read_text())


def test_a_run_leaves_plain_files_that_tell_everything(cfg: Config) -> None:
    """C5: everything in the run folder is plain."""
    run = Run.start(cfg, ["layers.ids=[2,3]", "+experiment=x"])
    prepared = run.artifacts.of("prepared", {"a": 1})
    run.artifacts.begin(prepared)
    run.artifacts.commit(prepared, {})
    run.read(prepared)
    states = run.artifacts.of("states", {"a": 1})
    run.artifacts.begin(states)
    run.artifacts.commit(states, {})
    run.wrote(states)
    run.read(states)
    run.note(engine={"name": "transformers", "version": "5"})
    run.record({"loss": 1.5}, step=3)
    with run.timed("capture"):
        pass
    run.finish("done", 0, {"samples": 3})

    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["layers"]["ids"] == [2, 3]
    assert yaml.safe_load((run.folder / "overrides.yaml").read_text()) == ["layers.ids=[2,3]", "+experiment=x"]
    result = read(run, "result.json")
    assert {k: result[k] for k in ("status", "stage", "exit_code", "metrics")} == {
        "status": "done",
        "stage": "train",
        "exit_code": 0,
        "metrics": {"samples": 3},
    }
    facts = read(run, "provenance.json")
    assert facts["config_hash"] == config_hash(cfg)
    assert facts["versions"]["torch"]
    assert facts["engine"]["version"] == "5"
    assert (facts["exit_code"], facts["status"]) == (0, "done")
    assert facts["seconds_of"]["capture"] >= 0
    assert {"name", "system", "processors", "memory_bytes"} <= facts["host"].keys()
    lineage = read(run, "artifacts.json")
    assert lineage == facts["artifacts"]
    assert [entry["id"] for entry in lineage["read"] + lineage["wrote"]] == [prepared.id, states.id]
    assert states.manifest()["made_from"] == [f"prepared/{prepared.id}"]
    assert states.manifest()["run"].endswith(run.folder.name)
    assert (run.folder / "states").resolve() == states.folder.resolve()
    line = json.loads((run.folder / "metrics.jsonl").read_text())
    assert (line["step"], line["loss"]) == (3, 1.5)


def test_a_hit_is_read_and_not_written(cfg: Config) -> None:
    for expected in ("wrote", "read"):
        run = Run.start(cfg, [])
        artifact = run.artifacts.of("prepared", {"a": 1})
        if not artifact.complete:
            run.artifacts.begin(artifact)
            run.artifacts.commit(artifact, {})
        run.wrote(artifact)
        run.finish("done", 0)
        assert [entry["id"] for entry in read(run, "artifacts.json")[expected]] == [artifact.id]


def test_a_second_artifact_of_a_kind_gets_a_link_of_its_own(cfg: Config) -> None:
    run = Run.start(cfg, [])
    for value in (1, 2, 2):
        run.read(run.artifacts.of("drafter", {"a": value}))
    run.finish("done", 0)
    assert len([path for path in run.folder.iterdir() if path.is_symlink()]) == 2


def test_a_run_folder_is_never_used_twice(cfg: Config, tmp_path: Path) -> None:
    """C8: the same folder with another config is refused, and the first run's config stays as it was."""
    run = Run.start(cfg, [], tmp_path / "mine")
    run.finish("done", 0)
    before = (run.folder / "config.yaml").read_text()
    cfg.seed = 7
    with pytest.raises(RequestError, match="holds a run already"):
        Run.start(cfg, [], tmp_path / "mine")
    assert (run.folder / "config.yaml").read_text() == before


START = """
import sys
from eagle3.config import Config, ModelConfig, StageConfig
from eagle3.runs import Run
cfg = Config(model=ModelConfig(name="m"), stage=StageConfig("train"))
cfg.output_dir = sys.argv[1]
sys.stdin.readline()
for _ in range(5):
    run = Run.start(cfg, [])
    print(run.folder)
    run.finish("done", 0)
"""


def test_processes_started_together_get_folders_of_their_own(tmp_path: Path) -> None:
    """C8: no two runs share a folder, however close they start."""
    command = [sys.executable, "-c", START, str(tmp_path)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        folders += process.communicate(timeout=250)[0].split()
    assert len(set(folders)) == 10


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_an_unwritable_output_folder_is_one_clear_line(cfg: Config, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    cfg.output_dir = str(tmp_path / "file" if where == "a file" else tmp_path / "file" / "deeper")
    with pytest.raises(RequestError, match=r"output_dir=.*cannot write there") as caught:
        Run.start(cfg, [])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", ["runs", "gc", "train"])
def test_on_a_full_disk_those_that_only_look_work_all_the_same(
    stage: str, cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc is what makes room there. The others leave no half of a run."""
    cfg.stage.name = stage
    root = Path(cfg.output_dir)
    (root / "artifacts").mkdir(parents=True)
    (tmp_path / "room").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "room"))

    def full(path: Path, value: Any) -> None:
        if path.is_relative_to(root):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, value)

    monkeypatch.setattr(runs, "write_json", full)
    handlers = list(logging.getLogger().handlers)
    if stage == "train":
        with pytest.raises(RequestError, match=r"output_dir=.*: the disk is full, .*; `eagle3 stage=gc` lists"):
            Run.start(cfg, [])
        assert "EAGLE3_RUN_FOLDER" not in os.environ
    else:
        run = Run.start(cfg, [])
        run.finish("done", 0)
        assert run.folder.is_relative_to(tmp_path / "room")
        assert run.artifacts.root == root / "artifacts"
    assert logging.getLogger().handlers == handlers
    assert not list((root / "runs").glob("*/*"))


def test_a_helper_rank_joins_the_folder_and_changes_nothing(cfg: Config) -> None:
    """C4: rank 1 makes no folder and no result of its own."""
    run = Run.start(cfg, [])
    helper = Run.attach(cfg, rank=1)
    assert helper.folder == run.folder
    helper.read(helper.artifacts.of("states", {"a": 1}))
    helper.record({"loss": 1.0})
    helper.log.info("from rank 1")
    helper.finish("failed", 1, error="x")
    assert not (run.folder / "result.json").exists()
    run.finish("done", 0)
    assert read(run, "artifacts.json") == {"read": [], "wrote": []}
    assert "from rank 1" in (run.folder / "rank-1.log").read_text()
    assert len(list((Path(cfg.output_dir) / "runs").glob("*/*"))) == 1


def test_a_helper_rank_without_a_run_says_how_to_start(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE3_RUN_FOLDER", raising=False)
    with pytest.raises(RequestError, match="start eagle3 itself"):
        Run.attach(cfg, rank=1)


def test_the_log_has_what_the_terminal_has_and_more(cfg: Config, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.start(cfg, [])
    run.log.info("a line with [brackets] and 50% of it")
    run.log.warning("careful")
    run.log.debug("detail")
    logging.getLogger("another.library").info("their line")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("a warning", stacklevel=1)
    table = Table("column")
    table.add_row("cell")
    run.show(table)
    run.file_only("it failed", RuntimeError("the traceback"))
    run.finish("done", 0)
    text = run.log_file.read_text()
    for part in ("[brackets]", "careful", "detail", "their line", "a warning", "cell", "RuntimeError: the traceback"):
        assert part in text
    out, err = capsys.readouterr()
    assert "a line with [brackets] and 50% of it\nwarning: careful\n" in err
    assert "detail" not in err
    assert "cell" in out
    logging.getLogger("eagle3").info("after the run")
    assert "after the run" not in run.log_file.read_text()


def test_the_tables_show_runs_and_artifacts_as_they_are(cfg: Config, tmp_path: Path) -> None:
    """`stage=runs` shows killed runs, and half-written and broken artifacts as such."""
    run = Run.start(cfg, [])
    prepared, states, broken = (run.artifacts.of(kind, {}) for kind in ("prepared", "states", "drafter"))
    for artifact in (prepared, broken):
        (run.artifacts.begin(artifact) / "data").write_bytes(b"x" * 1500)
        run.artifacts.commit(artifact, {})
    (broken.folder / "manifest.json").write_text("{")
    run.artifacts.begin(states)
    run.read(prepared)
    run.finish("failed", 1, error="x")
    killed = Run.start(cfg, [])
    killed.finish("done", 0)
    (killed.folder / "result.json").unlink()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    facts = read(killed, "provenance.json") | {"process": int(gone.stdout)}
    (killed.folder / "provenance.json").write_text(json.dumps(facts))

    root = Path(cfg.output_dir)
    rows = runs_stage.run_rows(root)
    assert [row["status"] for row in rows] == ["failed", "killed"]
    assert rows[0]["read"] == [f"prepared/{prepared.id[:8]}"]
    table = {row["name"]: row["status"] for row in runs_stage.artifact_rows(root / "artifacts")}
    assert table == {
        f"prepared/{prepared.id}": "complete",
        f"states/{states.id}": "partial",
        f"drafter/{broken.id}": "broken: unreadable manifest.json",
    }
    report = Run.start(cfg, [])
    metrics = runs_stage.run(cfg, report)
    report.finish("done", 0, metrics)
    assert (metrics["runs"], metrics["artifacts"]) == (2, 3)
    assert metrics["bytes"] > 3000
    assert prepared.id in report.log_file.read_text()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_names_in_the_tables_can_be_copied_whole(
    width: int, cfg: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No name is broken over two lines on a narrow terminal, and a run is found again by what the table calls it."""
    run = Run.start(cfg, [])
    made = [run.artifacts.of(kind, {}) for kind in ("prepared", "states", "drafter", "export")]
    for artifact in made:
        run.artifacts.begin(artifact)
        run.artifacts.commit(artifact, {"made_from": [f"{a.kind}/{a.id}" for a in made]})
        run.wrote(artifact)
    run.finish("done", 0)
    report = Run.start(cfg, [])
    report.console = Console(width=width)
    capsys.readouterr()
    runs_stage.run(cfg, report)
    report.finish("done", 0)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    (name,) = {word for word in printed.split() if word.startswith("runs/")}
    for artifact in made:
        assert f"{artifact.kind}/{artifact.id} " in printed
        assert f"{artifact.kind}/{artifact.id[:8]} " in printed or width == 80
    assert cli.arranged(["-cp", f"{cfg.output_dir}/{name}"]) == ["-cp", str(run.folder)]


def test_looking_into_a_folder_that_is_not_there_does_not_make_it(cfg: Config) -> None:
    for stage in ("runs", "gc"):
        looking = replace(cfg, stage=StageConfig(name=stage))
        with pytest.raises(RequestError, match=r"output_dir=.*: no such folder"):
            Run.start(looking, [])
        assert not Path(cfg.output_dir).exists()


def test_a_run_of_another_host_is_not_judged(cfg: Config) -> None:
    run = Run.start(cfg, [])
    run.finish("done", 0)
    (run.folder / "result.json").unlink()
    facts = read(run, "provenance.json")
    assert runs_stage.run_rows(Path(cfg.output_dir))[0]["status"] == "running"
    facts["host"]["name"] = "elsewhere"
    (run.folder / "provenance.json").write_text(json.dumps(facts))
    assert runs_stage.run_rows(Path(cfg.output_dir))[0]["status"] == "no result"
    (run.folder / "provenance.json").write_text("{")
    assert runs_stage.run_rows(Path(cfg.output_dir))[0]["status"] == "broken"
    assert os.environ.get("EAGLE3_RUN_FOLDER") is None
