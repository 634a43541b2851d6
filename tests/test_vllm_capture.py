"""What a capture by vLLM reports of its time and memory, and the end of one whose rows never come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_capture import WRITERS, batch_bytes, memory_bytes, throughput
from eagle3.errors import EngineError
from tests.conftest import random_samples
from tests.stub import Stub, changed


def rank(**numbers: float) -> dict[str, Any]:
    found = {"bytes": 600, "model_s": 8.0, "copy_s": 1.0, "wait_s": 0.5, "write_s": 2.0}
    memory = {"ring_bytes": 30, "working_bytes": 40, "needed_bytes": 90, "device_bytes": 100}
    return {**found, **memory, "key_value_bytes": 30, **numbers}


def test_shares_are_of_the_seconds_and_rates_of_all_ranks() -> None:
    ranks = [rank(), rank(bytes=200, model_s=6.0, write_s=6.0, working_bytes=50)]
    found = throughput({"seconds": 10.0, "tokens": 100, "ranks": ranks}, forecast_tokens_per_s=20.0)
    assert (found["tokens_per_s"], found["bytes_per_s"], found["of_forecast"]) == (10.0, 80, 0.5)
    assert (found["model_share"], found["copy_share"], found["wait_share"]) == (0.7, 0.1, 0.05)
    assert found["write_share"] == pytest.approx(0.4 / WRITERS)
    assert found["written_share"] == [0.75, 0.25]
    assert (found["ring_bytes"], found["working_bytes"]) == (30, 50)


def test_the_memory_that_was_needed_leaves_out_the_spare_room_for_keys_and_values() -> None:
    report = {"ranks": [rank(), rank(needed_bytes=94, device_bytes=99)]}
    assert memory_bytes(report, key_values=5) == 69
    assert memory_bytes(report, key_values=5, name="device_bytes") == 75
    assert memory_bytes({"ranks": [rank(needed_bytes=0)]}, key_values=5) == 0


def test_a_batch_needs_what_is_neither_weights_nor_keys_and_values_nor_libraries() -> None:
    loaded = [{"weight_bytes": 20, "context_bytes": 4}, {"weight_bytes": 25, "context_bytes": 4}]
    assert batch_bytes({"ranks": [rank(), rank()]}, loaded) == 36
    assert batch_bytes({"ranks": [rank(needed_bytes=0)]}, loaded[:1]) == 0


def test_rows_that_never_come_end_a_capture(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is finished and every row that came is written, but a rank never reports a shard."""
    load = changed("eagle3_poll", "{**old(), 'finished': [], 'open_samples': 3}")
    cfg, target = Stub(tiny_target, tmp_path, monkeypatch).configured(load=load)
    with (
        VllmEngine(cfg, target, log_file=tmp_path / "engine.log") as engine,
        pytest.raises(
            EngineError, match=r"^vllm: all requests are finished, but 3 samples of \['shard-.*'\] lack rows"
        ),
    ):
        list(engine.capture(random_samples([20] * 5), (1, 6)))
