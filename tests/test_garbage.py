"""Garbage is what no run that came to something holds: found with sizes and reasons, deleted only on request."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3 import garbage, records
from eagle3.artifacts import Artifact, Artifacts
from eagle3.config import Config, GcConfig
from eagle3.garbage import delete, survey
from eagle3.runs import Run
from tests.stages import configure, run_stage

DAY = 86400.0
WEEK = 7 * DAY


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return configure("layers=eagle", f"output_dir={tmp_path / 'outputs'}")


def make(run: Run, kind: str, name: str, size: int = 1000) -> Artifact:
    """An artifact of some bytes, made by a run out of all that it has read."""
    artifact = run.artifacts.of(kind, {"name": name})
    (run.artifacts.begin(artifact) / "data").write_bytes(b"x" * size)
    run.artifacts.commit(artifact, {})
    return run.wrote(artifact)


def age(root: Path, days: float) -> None:
    """Makes everything under a folder look as if it had happened some days earlier."""
    then = time.time() - days * DAY
    for path in [*root.rglob("*"), root]:
        if path.name == "provenance.json":
            facts = json.loads(path.read_text())
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(then))
            path.write_text(json.dumps(facts | {"started": stamp, "finished": stamp}))
        if not path.is_symlink():
            os.utime(path, (then, then))


def names(cfg: Config, younger_s: float = WEEK) -> dict[str, str]:
    """Why each piece of garbage can go, by its name."""
    return {each.name: each.why for each in survey(Path(cfg.output_dir), younger_s).garbage}


def test_a_finished_run_holds_what_it_used_and_what_that_was_made_from(cfg: Config) -> None:
    making, using = Run.start(cfg, []), Run.start(cfg, [])
    prepared, states = make(making, "prepared", "p"), make(making, "states", "s")
    lost = make(making, "states", "other")
    making.finish("failed", 1)
    using.read(states)
    using.finish("done", 0)
    age(Path(cfg.output_dir), 30)
    found = survey(Path(cfg.output_dir), WEEK)
    assert {each.name: each.why for each in found.garbage} == {
        f"states/{lost.id}": "made by a run that ended as failed, no finished run uses it"
    }
    assert found.garbage[0].size_bytes > 1000
    assert found.garbage[0].idle_s == pytest.approx(30 * DAY, abs=100)
    assert (found.kept, found.kept_bytes > 2000) == (2, True)
    shutil.rmtree(using.folder)  # the experiment is given up
    assert {*names(cfg)} == {
        f"prepared/{prepared.id}",
        f"states/{states.id}",
        f"states/{lost.id}",
        str(making.folder.relative_to(cfg.output_dir)),
    }
    assert names(cfg, 31 * DAY) == {}


def test_a_run_folder_elsewhere_holds_too(cfg: Config, tmp_path: Path) -> None:
    run = Run.start(cfg, [], tmp_path / "elsewhere")
    make(run, "prepared", "p")
    run.finish("done", 0)
    age(tmp_path, 30)
    assert names(cfg) == {}
    shutil.rmtree(tmp_path / "elsewhere")
    assert [*names(cfg).values()] == ["the run that made it is gone, no finished run uses it"]


def test_a_running_process_keeps_what_it_reads_and_what_it_makes(cfg: Config) -> None:
    run = Run.start(cfg, [])
    states = make(run, "states", "s")
    making = run.artifacts.of("drafter", {})
    run.artifacts.begin(making)
    age(Path(cfg.output_dir), 30)
    assert run.status == "running"
    assert names(cfg, 0.0) == {}
    run.finish("interrupted", 1)
    age(Path(cfg.output_dir), 30)
    assert names(cfg) == {
        f"drafter/{making.id}.partial": "never finished",
        f"states/{states.id}": "made by a run that ended as interrupted, no finished run uses it",
        str(run.folder.relative_to(cfg.output_dir)): "ended as interrupted, nothing that is kept came from it",
    }


def test_a_partial_artifact_is_as_old_as_its_newest_file(cfg: Config) -> None:
    run = Run.start(cfg, [])
    partial = run.artifacts.begin(run.artifacts.of("states", {}))
    (partial / "shard-00000.tmp").mkdir()
    (partial / "shard-00000.tmp" / "layer").touch()
    run.finish("interrupted", 1)
    age(Path(cfg.output_dir), 30)
    assert f"states/{partial.name}" in names(cfg)
    os.utime(partial / "shard-00000.tmp" / "layer")
    assert f"states/{partial.name}" not in names(cfg)


def test_jobs_of_sweeps_hold_and_stay(cfg: Config) -> None:
    root = Path(cfg.output_dir)
    run = Run.start(cfg, [], root / "sweeps" / "abc" / "layers=eagle")
    states = make(run, "states", "s")
    run.finish("done", 0)
    failed = Run.start(cfg, [], root / "sweeps" / "abc" / "layers=late")
    failed.finish("failed", 1)
    age(root, 30)
    assert names(cfg) == {}
    assert states.complete


def test_links_are_left_alone(cfg: Config, tmp_path: Path) -> None:
    """States can lie on another disk, behind a link."""
    (tmp_path / "disk").mkdir()
    states = Path(cfg.output_dir) / "artifacts" / "states"
    states.mkdir(parents=True)
    (states / "0123").symlink_to(tmp_path / "disk")
    assert names(cfg, 0.0) == {}


def test_the_stage_lists_and_deletes_only_when_told(cfg: Config) -> None:
    root = Path(cfg.output_dir)
    kept = Run.start(cfg, [])
    make(kept, "prepared", "p")
    kept.finish("done", 0)
    run = Run.start(cfg, [])
    lost = make(run, "states", "s", 5000)
    broken = make(run, "drafter", "d")
    (broken.folder / "manifest.json").write_text("{")
    run.finish("failed", 1)
    age(root, 9)

    metrics, listed = run_stage("gc", cfg)
    assert (metrics["found"], metrics["deleted"], metrics["kept"]) == (3, 0, 1)
    text = listed.log_file.read_text()
    assert f"states/{lost.id}" in text
    assert "9 days" in text
    assert "no readable manifest.json" in text
    assert "gc.delete=true" in text
    assert lost.complete
    told = dataclasses.replace(cfg, gc=GcConfig(delete=True))
    assert run_stage("gc", dataclasses.replace(told, dry_run=True))[0]["deleted"] == 0
    metrics, _ = run_stage("gc", told)
    assert metrics["deleted"] == 3
    assert metrics["freed_bytes"] == metrics["bytes"] > 6000
    assert [path.parent.name for path in (root / "artifacts").glob("*/*")] == ["prepared"]
    assert not run.folder.exists()
    assert kept.folder.exists()
    metrics, quiet = run_stage("gc", told)
    assert metrics["found"] == 0
    assert "nothing to delete; kept: 1 artifacts" in quiet.log_file.read_text()


def test_what_is_used_again_since_it_was_listed_stays(cfg: Config) -> None:
    run = Run.start(cfg, [])
    states = make(run, "states", "s")
    run.finish("failed", 1)
    age(Path(cfg.output_dir), 30)
    artifacts = Artifacts(Path(cfg.output_dir) / "artifacts")
    found = next(each for each in survey(Path(cfg.output_dir), WEEK).garbage if each.name.startswith("states"))
    again = Run.start(cfg, [])
    again.read(states)
    (kept,) = delete(artifacts, [found], WEEK)
    assert "is used again" in str(kept[1])
    assert states.complete
    again.finish("failed", 1)
    age(Path(cfg.output_dir), 30)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(artifacts.root), states.id], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert f"states/{states.id}" not in names(cfg)
        (kept,) = delete(artifacts, [found], WEEK)
        assert f"is being made by process {holder.pid} on" in str(kept[1])
        holder.kill()
    assert [*delete(artifacts, [found], WEEK)] == [(found, None)]
    assert not states.folder.exists()


def test_the_output_folder_is_looked_through_once_for_all_deletions(
    cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a thousand failed runs would be read a million times. Artifacts may lie on another disk, behind a link."""
    (tmp_path / "disk").mkdir()
    Path(cfg.output_dir).mkdir()
    (Path(cfg.output_dir) / "artifacts").symlink_to(tmp_path / "disk")
    for name in range(6):
        run = Run.start(cfg, [])
        make(run, "states", str(name))
        run.finish("failed", 1)
    age(Path(cfg.output_dir), 30)
    age(tmp_path / "disk", 30)
    read: list[Path] = []
    monkeypatch.setattr(garbage, "read_json", lambda path: read.append(path) or records.read_json(path))
    metrics, _ = run_stage("gc", dataclasses.replace(cfg, gc=GcConfig(delete=True)))
    assert metrics["deleted"] == 12
    assert len(read) == 12, "each manifest when it is listed and once more before the first deletion"
    assert [*(tmp_path / "disk" / "states").iterdir()] == []


HOLD = """
import sys, time
from pathlib import Path
from eagle3.artifacts import Artifact, Artifacts
root = Path(sys.argv[1])
with Artifacts(root).lock(Artifact("states", sys.argv[2], root / "states" / sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_deletion_that_was_cut_short_is_finished_the_next_time(cfg: Config) -> None:
    run = Run.start(cfg, [])
    states = make(run, "states", "s")
    run.finish("done", 0)
    states.folder.rename(states.folder.with_name(f"{states.id}.deleted"))
    assert names(cfg) == {f"states/{states.id}.deleted": "its deletion was cut short"}
    told = dataclasses.replace(cfg, gc=GcConfig(delete=True))
    assert run_stage("gc", told)[0]["deleted"] == 1
    assert [*(Path(cfg.output_dir) / "artifacts" / "states").iterdir()] == []
