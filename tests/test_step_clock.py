"""The step's clock and its count of needed work."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from eagle3.step_clock import PARTS, StepClock, needed_flops
from tests.drafters import MLA, make_document, make_drafter, make_shape, pack


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


def test_needed_work_of_latent_attention_is_that_of_its_products() -> None:
    """Counted by torch on the drafter's own forward pass, where every row is needed at the one step."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = make_shape(**MLA)
    drafter = make_drafter(shape)
    batch = pack([make_document(shape, [(0, 20)], 20, 1)], 1, with_layout=True)
    assert batch.layout is not None
    found = needed_flops(shape, batch.layout)
    pair = torch.randn(18, 32, dtype=torch.float64)
    attention, positions = drafter.midlayer.self_attn, torch.arange(18)
    with FlopCounterMode(display=False) as counter:
        attention.queries(pair, drafter.rotary, positions)
        attention.columns(pair, drafter.rotary, positions)
    # Forward is a third of a weight's work; embedding halves lack the gradient of their input, hence a half.
    rows, columns = batch.layout.stacked, batch.layout.tokens
    latents = 7 * rows + 13 * columns
    assert found["state_half"] / 3 == 2 * 16 * latents
    expansion = found["latent_expansion"] / 3
    assert expansion == 2 * 4 * (rows * 7 * 10 + columns * 9 * 11)
    assert counter.get_total_flops() == 2 * 18 * (32 * (7 + 13) + 7 * 40 + 9 * 44)
    assert found["attention"] == 2 * batch.layout.seen * 4 * (4 * 10 + 3 * 5)
