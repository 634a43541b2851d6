"""The counters of speculative decoding: engines summed, readings subtracted, contradictions refused."""

from __future__ import annotations

import pytest

from eagle3.engines.vllm_counters import DraftCounters
from eagle3.errors import EngineError

NAMES = ("drafts", "draft_tokens", "accepted_tokens")


def reading(*engines: tuple[int, int, int, list[int]]) -> list[tuple[str, dict[str, str], list[int]]]:
    """As `llm.get_metrics()` lists them: each counter once for each engine."""
    found = []
    for number, (*counts, positions) in enumerate(engines):
        labels = {"engine": str(number), "model_name": "m"}
        found += [(f"vllm:spec_decode_num_{name}", labels, [c]) for name, c in zip(NAMES, counts, strict=True)]
        found.append(("vllm:spec_decode_num_accepted_tokens_per_pos", labels, list(positions)))
    return found


def test_v2_engines_are_summed_and_readings_subtracted() -> None:
    before = DraftCounters.of(reading((10, 30, 12, [7, 4, 1]), (4, 12, 3, [2, 1, 0])))
    assert before == DraftCounters(14, 42, 15, (9, 5, 1))
    after = DraftCounters.of(reading((20, 60, 20, [12, 6, 2]), (5, 15, 6, [3, 2, 1])))
    acceptance = after.since(before).acceptance()
    assert acceptance.reached == (11, 6, 3, 2)
    assert acceptance.acceptance_length == pytest.approx(1 + 11 / 11)
    assert sum(rate or 0.0 for rate in acceptance.unconditional) == pytest.approx(acceptance.accepted_drafts)


def test_v2_positions_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(EngineError, match=r"15 accepted .*\[9, 5, 2\] by position"):
        DraftCounters(14, 42, 15, (9, 5, 2)).acceptance()


def test_a_server_that_does_not_speculate_is_named() -> None:
    with pytest.raises(EngineError, match="vllm:spec_decode_num_drafts"):
        DraftCounters.of(reading((10, 30, 12, [7, 4, 1]))[1:])
