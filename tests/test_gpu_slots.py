"""GPUs for jobs that run side by side: disjoint, waited for, given back by a dead owner."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from eagle3 import gpu_slots
from eagle3.errors import RequestError


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5f/a")
    monkeypatch.setattr(gpu_slots.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_slots, "POLL_S", 0.02)


def test_jobs_side_by_side_get_different_gpus() -> None:
    with gpu_slots.gpu_slots(1) as first, gpu_slots.gpu_slots(1) as second:
        assert [env["CUDA_VISIBLE_DEVICES"] for env in (first, second)] == ["4", "GPU-5f/a"]
        assert first["PATH"]
    with gpu_slots.gpu_slots(2) as both:
        assert both["CUDA_VISIBLE_DEVICES"] == "4,GPU-5f/a"


def test_a_job_waits_until_its_gpus_are_free() -> None:
    got: list[str] = []

    def job() -> None:
        with gpu_slots.gpu_slots(2) as env:
            got.append(env["CUDA_VISIBLE_DEVICES"])

    with gpu_slots.gpu_slots(1):
        waiting = threading.Thread(target=job)
        waiting.start()
        waiting.join(0.2)
        assert not got
        # It holds none of what it cannot use.
        with gpu_slots.gpu_slots(1) as other:
            assert other["CUDA_VISIBLE_DEVICES"] == "GPU-5f/a"
    waiting.join(10)
    assert got == ["4,GPU-5f/a"]


def test_a_job_without_gpus_keeps_its_environment_and_one_with_too_many_is_refused() -> None:
    with gpu_slots.gpu_slots(0) as env:
        assert env["CUDA_VISIBLE_DEVICES"] == "4,GPU-5f/a"
    with (
        pytest.raises(RequestError, match=r"needs 3 GPUs, this machine has 2 .*hardware\.devices=2"),
        gpu_slots.gpu_slots(3),
    ):
        pass


def test_without_a_scheduler_all_gpus_of_the_machine_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpu_slots, "DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    assert gpu_slots.visible_gpus() == ["0", "1"]
