"""The step's clock and its count of needed work."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from eagle3.batches import pack
from eagle3.step_clock import PARTS, StepClock, needed_flops
from tests.drafters import make_document, make_shape


def test_parts_add_up_and_start_anew_after_each_reading() -> None:
    clock = StepClock(torch.device("cpu"))
    assert clock.read(None) == {}
    for _ in range(2):
        clock.start()
        for _ in PARTS[1:-1]:
            time.sleep(0.01)
            clock.mark()
        time.sleep(0.02)
        clock.end(tokens=100, rows=60, flops=1e9)
        time.sleep(0.03)
    found = clock.read(rate=1e12, ranks=2)
    assert found["time/forward_ms"] >= 10
    assert found["time/optimizer_ms"] >= 20
    assert found["time/data_ms"] >= 15  # two batches, one wait of 30 ms
    assert found["tokens_per_s"] * 60 == pytest.approx(found["supervised_rows_per_s"] * 100)
    assert found["tokens_per_s"] < 2 * 200 / 0.1
    assert 0 < found["mfu"] < 0.02
    assert clock.read(None) == {}


def test_needed_work_counts_only_rows_that_a_gradient_needs() -> None:
    """One document of 20 tokens, a span of 8: slots 11 … 17 at step 0, one fewer at each later step."""
    shape = make_shape()
    batch = pack([make_document(shape, [(12, 20)], 20, 1)], 3, with_layout=True)
    assert batch.layout is not None
    assert batch.layout.counts == (7, 6, 5)
    found = needed_flops(shape, batch.layout)
    h, q, kv, rows = 16, 16, 32, 18
    assert found["mlp"] == 6 * rows * 3 * h * 24
    assert found["head"] == 6 * rows * h * 23
    assert found["fc"] == 4 * 20 * 3 * h * h
    assert found["state_half"] == 6 * h * (rows * q + (20 + 11) * kv)
    seen = sum(sum(slot + 1 + k for slot in range(11, 18 - k)) for k in range(3))
    assert found["attention"] == 3.5 * 4 * seen * q
    assert found["teacher"] == 2 * len(np.arange(12, 19)) * h * 23
