"""Simulated acceptance length on scripted drafters."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3.acceptance import Walk, walk
from eagle3.slots import supervised_slots


def rows(length: int, start: int, stop: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Supervised flags [R, steps] and slots [R] of one span."""
    mask = np.zeros(length, dtype=bool)
    mask[start:stop] = True
    flags = supervised_slots(np.arange(length), mask, steps)
    slots = np.flatnonzero(flags.any(0))
    return flags[:, slots].T, slots


def test_right_for_two_then_wrong_is_exactly_three() -> None:
    """V4."""
    flags, slots = rows(40, 5, 36, 5)  # 30 tokens to draft: ten rounds of 2 + 1
    hits = flags & (np.arange(5) < 2)
    assert walk(hits, slots, [(5, 36)], 5) == Walk(10, 20)


def test_rounds_jump_and_do_not_average_over_slots() -> None:
    """Hits at every other slot only, half of all: serving jumps from hit to hit and never sees the misses between."""
    flags, slots = rows(30, 4, 26, 1)
    even = flags & (slots % 2 == 1)[:, None]
    assert walk(even, slots, [(4, 26)], 1) == Walk(11, 11)
    # The other half: the first slot misses, the rest is as before.
    assert walk(~even & flags, slots, [(4, 26)], 1) == Walk(11, 10)


def test_at_most_k_drafts_a_round_and_none_past_the_end() -> None:
    flags, slots = rows(20, 4, 16, 4)
    assert walk(flags, slots, [(4, 16)], 1) == Walk(6, 6)
    assert walk(flags, slots, [(4, 16)], 3) == Walk(3, 9)  # 11 tokens to draft: 3 + 1, 3 + 1, 3
    assert walk(flags, slots, [(4, 16)], 4) == Walk(3, 9)  # 4 + 1, 4 + 1, 1


def test_hits_count_only_in_a_row() -> None:
    flags, slots = rows(20, 4, 16, 3)
    hits = flags.copy()
    hits[:, 1] = False
    assert walk(hits, slots, [(4, 16)], 3) == walk(flags, slots, [(4, 16)], 1)


def test_several_spans_and_a_span_at_the_start() -> None:
    mask = np.zeros(20, dtype=bool)
    mask[0:4] = mask[8:12] = mask[15:16] = True
    flags = supervised_slots(np.arange(20), mask, 2)
    slots = np.flatnonzero(flags.any(0))
    spans = [(0, 4), (8, 12), (15, 16)]
    # [0, 4): slot 0 drafts tokens 2 and 3. [8, 12): slot 7 drafts 9 and 10, the target adds 11. [15, 16): none.
    assert walk(flags[:, slots].T, slots, spans, 2) == Walk(2, 4)


@pytest.mark.parametrize("k", [1, 3])
def test_nothing_to_draft_is_no_round(k: int) -> None:
    empty = np.zeros((0, 3), dtype=bool)
    assert walk(empty, np.zeros(0, dtype=int), [], k) == Walk(0, 0)
