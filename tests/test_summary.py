"""summary.csv and the screen: live, with every column, whoever runs the jobs."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3 import summary
from eagle3.records import HEADLINES


def write_job(folder: Path, name: str, **result: Any) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "result.json").write_text(json.dumps(result))


def read(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "summary.csv", newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def begin(folder: Path, name: str, process: int) -> None:
    (folder / name).mkdir()
    facts = {"process": process, "host": {"name": os.uname().nodename}}
    (folder / name / "provenance.json").write_text(json.dumps(facts))


def test_a_row_has_headlines_overrides_and_every_metric(tmp_path: Path) -> None:
    metrics = {"train": {"loss": 0.5, "tokens_per_s": 900.0, "ids": [1, 2]}, "evaluate": {"acceptance_length": 1.5}}
    write_job(tmp_path, "a", status="done", exit_code=0, seconds=1.0, metrics=metrics)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text("{ torn")
    summary.write(
        tmp_path, {"a": ["layers=late", "+x=1=2", "seed=1"], "b": ["layers.ids=[1,2]"], "c": ["layers=eagle"]}
    )
    found = read(tmp_path)
    assert found["a"] == {
        "job": "a",
        "status": "done",
        "layers": "late",
        "layer_ids": "",
        "acceptance_length": "1.5",
        "simulated_acceptance_length": "",
        "loss": "0.5",
        "tokens_per_s": "900.0",
        "seconds": "1.0",
        "exit_code": "0",
        "folder": str(tmp_path / "a"),
        "error": "",
        "x": "1=2",
        "seed": "1",
        "layers.ids": "",
        "train.loss": "0.5",
        "train.tokens_per_s": "900.0",
        "train.ids": "[1, 2]",
        "evaluate.acceptance_length": "1.5",
    }
    assert (found["b"]["layers"], found["b"]["status"]) == ("[1,2]", "starting")
    assert (found["c"]["layers"], found["c"]["status"]) == ("eagle", "waiting")


def test_the_layers_that_a_drafter_reads_come_from_its_manifest(tmp_path: Path) -> None:
    drafter = tmp_path / "artifacts" / "drafter" / "d1"
    drafter.mkdir(parents=True)
    (drafter / "manifest.json").write_text(json.dumps({"layer_ids": [2, 15, 27]}))
    write_job(tmp_path, "a", status="done", metrics={"loss": 1.0})
    entry = {"kind": "drafter", "id": "d1", "folder": str(drafter)}
    (tmp_path / "a" / "provenance.json").write_text(json.dumps({"artifacts": {"read": [], "wrote": [entry]}}))
    summary.write(tmp_path, {"a": ["layers=eagle"]})
    assert json.loads(read(tmp_path)["a"]["layer_ids"]) == [2, 15, 27]


def test_the_table_shows_only_headlines_that_somebody_has() -> None:
    found = [
        {"job": "a", "status": "done", "seconds": 61.0, "loss": 0.5, "tokens_per_s": 1148.2, "train.steps": 3},
        {"job": "b", "status": "running"},
    ]
    shown = summary.table(found, {"b": {"step": 7, "train/loss": 2.0}})
    assert [column.header for column in shown.columns] == ["job", "status", "time", "loss", "tokens per s"]
    assert [list(column.cells) for column in shown.columns] == [
        ["a", "b"],
        ["done", "running, step 7, loss 2.000"],
        ["1m01s", ""],
        ["0.500", ""],
        ["1,148", ""],
    ]
    assert set(HEADLINES) >= {"loss", "acceptance_length", "simulated_acceptance_length", "tokens_per_s"}


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_log_gets_a_line_for_each_job_that_begins_or_ends(tmp_path: Path) -> None:
    text = io.StringIO()
    index = {"a": ["layers=late"], "b": ["layers=eagle"]}
    with summary.Watch(tmp_path, index, list(index), Console(file=text, width=140)):
        begin(tmp_path, "a", os.getpid())
        wait_for(lambda: read(tmp_path)["a"]["status"] == "running")
        write_job(tmp_path, "a", status="done", seconds=2.0, metrics={"loss": 0.5})
        wait_for(lambda: read(tmp_path)["a"]["status"] == "done")
        write_job(tmp_path, "b", status="failed", seconds=1.0, error="train failed: RuntimeError: [oom]")
    assert text.getvalue().splitlines() == [
        "[1/2] a: running",
        "[1/2] a: done in 2.0s: loss 0.500",
        "[2/2] b: failed in 1.0s: train failed: RuntimeError: [oom]",
    ]
    assert read(tmp_path)["b"]["error"].endswith("[oom]")


def test_only_jobs_that_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = {str(seed): [f"seed={seed}"] for seed in range(4)}
    for name in ("0", "1", "2"):
        write_job(tmp_path, name, status="done", seconds=1.0)
    asked, rows = [], summary.rows
    monkeypatch.setattr(summary, "rows", lambda folder, index: asked.append([*index]) or rows(folder, index))
    with summary.Watch(tmp_path, index, list(index), Console(file=io.StringIO())):
        wait_for(lambda: len(asked) == 2)
        write_job(tmp_path, "3", status="done", seconds=2.0)
        wait_for(lambda: read(tmp_path)["3"]["status"] == "done")
    assert asked == [[*index], [*index], ["3"], [*index]]
    assert [row["seconds"] for row in read(tmp_path).values()] == ["1.0", "1.0", "1.0", "2.0"]


def test_a_summary_that_cannot_be_written_for_a_while_is_written_later(tmp_path: Path) -> None:
    index = {"a": ["seed=0"], "b": ["seed=1"]}
    with summary.Watch(tmp_path, index, list(index), Console(file=io.StringIO())):
        (tmp_path / "summary.csv").unlink()
        (tmp_path / "summary.csv").mkdir()
        write_job(tmp_path, "a", status="done", seconds=1.0)
        time.sleep(2 * summary.POLL_S)
        (tmp_path / "summary.csv").rmdir()
        write_job(tmp_path, "b", status="done", seconds=1.0)
        wait_for(lambda: (tmp_path / "summary.csv").exists() and read(tmp_path)["b"]["status"] == "done")
    assert read(tmp_path)["a"]["status"] == "done"


def test_a_terminal_gets_a_live_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    index = {"a": ["layers=late"]}
    begin(tmp_path, "a", os.getpid())
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 40, "train/loss": 3.5}\n{"step": 50, "tra')
    with summary.Watch(tmp_path, index, ["a"], Console(file=text, force_terminal=True, width=100)):
        wait_for(lambda: "step 40, loss 3.500" in text.getvalue())
    assert "[1/1]" not in text.getvalue()


def test_a_job_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    begin(tmp_path, "a", 2**22 + 1)
    summary.write(tmp_path, {"a": []})
    assert read(tmp_path)["a"]["status"] == "killed"
