"""Trackers behind their guard: outages, hangs, and what reaches them."""

from __future__ import annotations

import csv
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger

from eagle3 import trackers
from eagle3.config import LoggerConfig
from eagle3.errors import RequestError
from eagle3.trackers import Identity, SafeLogger, build_trackers, wandb_mode

CONFIG = {"seed": 1, "layers": {"ids": [2, 15, 27]}, "drafter": {"losses": {"soft_cross_entropy": 1.0}}}
IDENTITY = Identity("d1-0001", "layers=late")


class Tracker(Logger):
    """Notes what it is told; raises or hangs where `broken` says so."""

    def __init__(self, broken: str = "", hang_s: float = 0.0) -> None:
        super().__init__()
        self.broken, self.hang_s, self.calls = broken, hang_s, []
        if broken == "init":
            self._fail()

    def _fail(self) -> None:
        if self.hang_s:
            time.sleep(self.hang_s)
        else:
            raise ConnectionError("no route to the tracker")

    @property
    def name(self) -> str:
        return "tracker"

    @property
    def version(self) -> str:
        return "1"

    @property
    def experiment(self) -> Any:
        return self

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append(("config", params))
        if self.broken == "log":
            self._fail()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.calls.append(("metrics", step, dict(metrics)))
        if self.broken == "log":
            self._fail()

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))
        if self.broken == "finish":
            self._fail()


def use(tracker: SafeLogger, exit_code: int = 0) -> None:
    tracker.log_hyperparams(CONFIG)
    for step in range(5):
        tracker.log_metrics({"loss": 1.0}, step)
    tracker.close(exit_code)


def test_calls_reach_the_tracker_in_order() -> None:
    inner = Tracker()
    tracker = SafeLogger("mine", lambda: inner)
    tracker.log_hyperparams(CONFIG)
    tracker.log_metrics({"train/loss": 2.0}, 4)
    tracker.finalize("success")
    tracker.log_metrics({"train/loss": 1.0}, 5)  # Lightning's end of a fit is not the end of the run
    tracker.close(0)
    metrics = [("metrics", 4, {"train/loss": 2.0}), ("metrics", 5, {"train/loss": 1.0})]
    assert inner.calls == [("config", CONFIG), *metrics, ("finish", 0)]
    assert tracker.name == "mine"
    assert tracker.experiment is None


def test_w2_a_failed_run_is_finished_as_failed() -> None:
    inner = Tracker()
    use(SafeLogger("mine", lambda: inner), exit_code=1)
    assert inner.calls[-1] == ("finish", 1)


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_w6_a_tracker_that_raises_costs_one_warning_of_its_kind(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        use(SafeLogger("mine", lambda: Tracker(broken)))
    assert [record.getMessage() for record in caplog.records] == [
        f"logger.loggers.mine: {broken} failed (ConnectionError: no route to the tracker); training goes on"
    ]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_w6_a_tracker_that_hangs_delays_no_training_and_its_end_not_for_long(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    started, hang_s = time.monotonic(), 100.0
    tracker = SafeLogger("mine", lambda: Tracker(broken, hang_s=hang_s), close_timeout_s=1.0)
    tracker.log_hyperparams(CONFIG)
    for step in range(1000):
        tracker.log_metrics({"loss": 1.0}, step)
    assert time.monotonic() - started < hang_s / 4
    with caplog.at_level(logging.WARNING):
        tracker.close(0)
    assert time.monotonic() - started < hang_s / 2
    (record,) = caplog.records
    assert f"logger.loggers.mine: {broken} did not answer within" in record.getMessage()
    assert tracker.experiment is None


def test_w6_a_tracker_that_hangs_for_days_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 10)
    tracker = SafeLogger("mine", lambda: Tracker("init", hang_s=100.0), close_timeout_s=0.1)
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            tracker.log_metrics({"loss": 1.0}, step)
    assert [record.getMessage() for record in caplog.records] == [
        "logger.loggers.mine: init has not answered for a long time and is left alone from here on"
    ]


def test_a_missing_package_is_an_outage_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Logger:
        raise ModuleNotFoundError("No module named 'wandb'")

    use(SafeLogger("wandb", make))
    assert "No module named 'wandb'" in caplog.text


def test_csv_is_written_as_it_happens_with_the_whole_config(tmp_path: Path) -> None:
    node = {"_target_": "lightning.pytorch.loggers.CSVLogger"}
    (tracker,) = build_trackers(LoggerConfig(name="csv", loggers={"csv": node}), tmp_path, CONFIG, IDENTITY)
    tracker.log_metrics({"train/loss": 3.0}, 2)
    tracker.log_metrics({"validation/loss": 2.5}, 2)
    tracker.log_metrics({"train/loss": 2.0}, 4)
    rows: list[dict[str, str]] = []
    until, file = time.monotonic() + 30, tmp_path / "csv/metrics.csv"
    while len(rows) < 3 and time.monotonic() < until:
        time.sleep(0.01)
        rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    assert [row["step"] for row in rows] == ["2", "2", "4"]
    assert rows[1]["validation/loss"] == "2.5"
    tracker.close(0)
    assert "run_folder" in (tmp_path / "csv/hparams.yaml").read_text()


def test_tensorboard_writes_below_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    node = {"_target_": "lightning.pytorch.loggers.TensorBoardLogger"}
    (tracker,) = build_trackers(LoggerConfig(name="tb", loggers={"tensorboard": node}), tmp_path, CONFIG, IDENTITY)
    tracker.log_metrics({"train/loss": 3.0}, 2)
    tracker.close(0)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_wandb_goes_online_only_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert wandb_mode("auto") == "online"
    assert wandb_mode("offline") == "offline"
    monkeypatch.delenv("WANDB_API_KEY")
    for host, server, mode in (
        ("api.forge.coreweave.com", None, "online"),
        ("wandb.example.org", None, "online"),
        ("github.com", None, "offline"),
        ("tracking.example.org", "https://tracking.example.org/", "online"),
        ("api.wandb.ai", "https://tracking.example.org", "offline"),
    ):
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password key\n")
        monkeypatch.setenv("WANDB_BASE_URL", server or "")
        assert wandb_mode("auto") == mode
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"


def test_wandb_online_without_a_key_is_offline_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would ask for one on the terminal, and the run would wait for nobody."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with caplog.at_level(logging.WARNING):
        assert wandb_mode("online") == "offline"
    assert "logger.mode: found online, but no key of W&B" in caplog.text


def test_a_logger_that_cannot_be_imported_is_a_wrong_request(tmp_path: Path) -> None:
    node = {"_target_": "lightning.pytorch.loggers.NoSuchLogger"}
    with pytest.raises(RequestError, match=r"logger\.loggers\.mine\._target_"):
        build_trackers(LoggerConfig(name="x", loggers={"mine": node}), tmp_path, CONFIG, IDENTITY)


def test_fields_of_the_config_win_over_what_we_offer(tmp_path: Path) -> None:
    node = {"_target_": "lightning.pytorch.loggers.CSVLogger", "name": "elsewhere", "prefix": "p"}
    (tracker,) = build_trackers(LoggerConfig(name="csv", loggers={"csv": node}), tmp_path, CONFIG, IDENTITY)
    tracker.log_metrics({"loss": 1.0}, 1)
    tracker.close(0)
    assert "p-loss" in (tmp_path / "elsewhere/metrics.csv").read_text()


def test_the_config_that_trackers_get_is_plain_json(tmp_path: Path) -> None:
    """C5."""
    inner = Tracker()
    use(SafeLogger("mine", lambda: inner))
    json.dumps(inner.calls[0][1])


def test_a_resumed_training_finds_its_identity_and_a_fresh_one_gets_its_own(tmp_path: Path) -> None:
    partial, sweep = tmp_path / "d1.partial", tmp_path / "sweeps" / "5eed"
    partial.mkdir()
    job = sweep / "layers=late"
    job.mkdir(parents=True)
    (sweep / "index.json").write_text(json.dumps({job.name: ["layers=late"]}))
    first = Identity.of(job, partial, "d1")
    assert (first.name, first.group) == ("layers=late", "5eed")
    assert first.id.startswith("d1-")
    alone = tmp_path / "12-00-00-train-tiny"
    assert Identity.of(alone, partial, "d1") == Identity(first.id, alone.name, None)
    (partial / "tracker.json").unlink()
    assert Identity.of(job, partial, "d1").id != first.id


def test_a_tracker_has_one_thread_that_ends_with_it() -> None:
    tracker = SafeLogger("gone", lambda: Tracker())
    tracker.close(0)
    deadline = time.monotonic() + 60
    while any(thread.name == "tracker-gone" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
