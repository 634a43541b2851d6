"""How steps are timed on a GPU: each between two synchronisations, the median counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def time_steps(step: Callable[[], Any], steps: int, warmup: int) -> dict[str, float]:
    """Milliseconds of `step` (median, least), of a row of them without a pause, of the first; peak memory in GiB."""
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(warmup - 1):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - start))
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return {
        "first_step_s": round(first, 2),
        "median_ms": round(statistics.median(took), 2),
        "least_ms": round(min(took), 2),
        "unpaused_ms": round(1e3 * (time.perf_counter() - start) / steps, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }
