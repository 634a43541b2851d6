"""What an evaluation by a server makes of its points: settings, rates over several sets, loops, ties, the table."""

from __future__ import annotations

import pytest
from rich.console import Console

from eagle3.config import EvaluateConfig
from eagle3.decoding import Acceptance
from eagle3.engines import Generation
from eagle3.engines.vllm_serving import Served
from eagle3.evaluation import Difference
from eagle3.served_evaluation import Measured, Point, Setting, looping, settings, summarize, table

GREEDY = Setting(3, 0.0, 1)
TIE, CHANGE = (Difference(2, 5, 6, margin, 1e-3) for margin in (1e-5, 0.2))


def served(tokens: int, seconds: float, acceptance: Acceptance | None = None, key: str = "a") -> Served:
    return Served({key: Generation(key, list(range(tokens)), "length")}, seconds, acceptance)


def point(name: str, reached: tuple[int, ...], seconds: float, setting: Setting = GREEDY, **fields) -> Point:
    values = {"looping": 0, "differences": {}, **fields}
    return Point(name, setting, served(30, seconds, Acceptance(reached)), served(30, 2.0), **values)


def test_settings_are_a_grid_and_the_headline_comes_first() -> None:
    cfg = EvaluateConfig(k=3, also_k=[1, 3], batch_sizes=[8, 1], temperature=0.0, also_temperatures=[1.0])
    found = settings(cfg)
    assert found[0] == Setting(3, 0.0, 8)
    assert len(found) == len(set(found)) == 2 * 2 * 2
    assert {setting.k for setting in found} == {1, 3}


def test_sets_are_pooled_by_rounds_and_by_seconds() -> None:
    points = [point("one", (10, 6, 3, 1), 1.0), point("two", (30, 6, 0, 0), 2.0, looping=2)]
    found = summarize(points)
    assert found["acceptance_length"] == pytest.approx(1 + 16 / 40)
    assert found["per_position_unconditional"] == pytest.approx([12 / 40, 3 / 40, 1 / 40])
    assert (found["tokens_per_s"], found["tokens_per_s_plain"]) == (20.0, 15.0)
    assert found["speedup"] == pytest.approx(4 / 3)
    assert (found["prompts"], found["looping"], found["rounds"]) == (4, 2, 40)
    assert (found["k"], found["temperature"], found["batch_size"]) == (3, 0.0, 1)


@pytest.mark.parametrize(
    ("differences", "lossless", "ties"),
    [({}, True, 0), ({"a": TIE}, True, 1), ({"a": TIE, "b": CHANGE}, False, 1), (None, None, 0)],
)
def test_only_greedy_texts_are_compared_and_ties_are_forgiven(differences, lossless, ties) -> None:
    found = summarize([point("one", (10, 6, 3, 1), 1.0, differences=differences)])
    assert (found["lossless"], found["ties"]) == (lossless, ties)


def test_a_set_in_which_every_text_loops_has_no_number() -> None:
    empty = Point("one", GREEDY, Served({}, 1e-5, Acceptance((0, 0, 0, 0))), Served({}, 1e-5, None), 4, {})
    found = summarize([empty])
    assert found["acceptance_length"] is found["speedup"] is found["tokens_per_s"] is None
    assert (found["prompts"], found["looping"]) == (4, 4)


def test_v6_a_loop_counts_without_the_token_that_ended_it() -> None:
    assert looping(Generation("a", [1, 2, 3] * 12 + [9], "stop"))
    assert not looping(Generation("a", list(range(40)), "length"))


def test_the_table_names_every_setting() -> None:
    sampled = point("one", (10, 6, 3, 1), 1.0, Setting(3, 0.7, 8), differences=None, looping=1)
    measured = Measured([point("one", (10, 6, 3, 1), 1.0), sampled], {}, "0.32.0", "float32")
    console = Console(width=140, record=True)
    console.print(table(measured, "title"))
    text = console.export_text()
    for part in ("one", "0.7", "8", "2.000", "0.60 0.50 0.33", "30.0", "15.0", "2.00", "ran into a loop", "sampled"):
        assert part in text
    assert measured.at(GREEDY) == measured.points[:1]


def test_only_single_prompts_have_a_bound_on_their_speed() -> None:
    """A speed-up of 3 at an acceptance length of 2."""
    points = [point(name, (10, 6, 3, 1), 2 / 3, Setting(3, 0.0, size)) for name, size in (("one", 1), ("two", 8))]
    caption = table(Measured(points, {}, "0.32.0", "float32"), "title").caption
    assert "Faster than its acceptance length allows in one at batch 1: was" in str(caption)
