"""What an evaluation concludes from decodings: loops, losslessness, headline numbers, comparability."""

from __future__ import annotations

import io
import json
import logging

import pytest
import torch
from rich.console import Console

from eagle3.adapters.llama import LlamaAdapter
from eagle3.decoding import Acceptance, Decoded, LiveTarget
from eagle3.errors import RequestError, StageFailed
from eagle3.evaluation import OURS, Difference, PromptResult, compare, find_difference, loops, summarize, table

K = 3
PROMPT = [1, 40, 90, 17, 200, 31]


def make_result(key, accepted, looping=False, difference=None, seconds=2.0, plain_seconds=1.0):
    tokens = [7] * 40 if looping else list(range(40))
    plain = Decoded(tokens, "length", 0, (), plain_seconds)
    speculative = Decoded(tokens, "length", K, tuple(accepted), seconds)
    acceptance = {OURS: speculative.acceptance, "bigram": Acceptance.of([0] * 10, K)}
    return PromptResult(key, 9, plain, speculative, difference, acceptance, "")


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        (list(range(100)), False),
        ([*range(50), *[9] * 24], True),
        ([*range(50), *[9] * 23], False),
        ([*range(50), *[1, 2, 3, 4, 5, 6, 7] * 4], True),
        ([*range(50), *[1, 2, 3, 4, 5, 6, 7] * 3], False),
        ([*[1, 2, 3] * 20, *range(50)], False),
        ([*range(9), *range(100, 160), *range(100, 160), *range(100, 160), *range(100, 160)], True),
        ([], False),
    ],
)
def test_v6_a_loop_is_a_tail_that_repeats_itself(tokens, looping):
    assert loops(tokens) is looping


def test_v6_looping_outputs_are_left_out_of_the_headline():
    results = [make_result("a", [1, 2, 0, 1]), make_result("b", [3] * 10, looping=True)]
    summary = summarize(results, K, 0.0)
    assert (summary["prompts"], summary["looping"], summary["rounds"]) == (2, 1, 4)
    assert summary["acceptance_length"] == 2.0
    assert summary["accepted_drafts"] == 1.0
    assert summary["acceptance_length_all"] == 1 + 34 / 14
    assert summary["baselines"] == {"bigram": 1.0}


def test_summary_pools_rounds_not_prompts():
    summary = summarize([make_result("a", [3]), make_result("b", [0] * 9, seconds=6.0)], K, 0.0)
    assert summary["acceptance_length"] == 1 + 3 / 10
    assert summary["per_position"] == [1 / 10, 1.0, 1.0]
    assert summary["per_position_unconditional"] == [1 / 10] * 3
    assert summary["tokens_per_s"] == 80 / 8
    assert summary["tokens_per_s_plain"] == 80 / 2
    assert summary["speedup"] == 0.25
    assert summary["lossless"] is True


def test_ties_are_counted_and_only_real_differences_break_losslessness():
    tie = Difference(4, 1, 2, margin=1e-6, tolerance=1e-4)
    real = Difference(4, 1, 2, margin=1e-2, tolerance=1e-4)
    tied = summarize([make_result("a", [1]), make_result("b", [1], difference=tie)], K, 0.0)
    assert (tied["lossless"], tied["ties"]) == (True, 1)
    broken = summarize([make_result("a", [1], difference=real), make_result("b", [1], difference=tie)], K, 0.0)
    assert (broken["lossless"], broken["ties"]) == (False, 1)


def test_only_loops_leave_no_headline():
    summary = summarize([make_result("a", [3], looping=True)], K, 0.0)
    assert summary["acceptance_length"] is None
    assert summary["speedup"] is None
    assert summary["per_position"] == [None] * 3


@pytest.fixture(scope="module")
def model(tiny_target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


def test_a_difference_shows_the_targets_margin_there(model):
    live = LiveTarget(model, LlamaAdapter(), (1, 3))
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, 5, 6]])).logits[0, -1]
    values, ids = logits.topk(2)
    best, second = ids.tolist()
    assert find_difference(live, PROMPT, [5, 6, best, 8], [5, 6, best, 8]) is None
    difference = find_difference(live, PROMPT, [5, 6, best, 8], [5, 6, second, 9])
    assert difference is not None
    assert (difference.position, difference.plain, difference.speculative) == (2, best, second)
    assert difference.margin == pytest.approx(float(values[0] - values[1]), rel=1e-4)
    assert not difference.tie


def test_equal_logits_are_a_tie(model):
    live = LiveTarget(model, LlamaAdapter(), (1, 3))
    with torch.no_grad():
        best = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
        twin = (best + 1) % 300
        head = model.get_output_embeddings().weight
        before = head[twin].clone()
        head[twin] = head[best]
        difference = find_difference(live, PROMPT, [best], [twin])
        head[twin] = before
    assert difference is not None
    assert difference.tie
    assert difference.margin == 0.0


def test_a_text_that_only_ends_earlier_is_a_failed_check(model):
    live = LiveTarget(model, LlamaAdapter(), (1, 3))
    with pytest.raises(StageFailed, match="ended"):
        find_difference(live, PROMPT, [5, 6], [5, 6, 7])


def write_evaluation(path, acceptance_length, **setting):
    defaults = {"engine": {"name": "transformers", "version": "5.24.0"}, "k": 3, "temperature": 0.0}
    sets = {"heldout": {"acceptance_length": acceptance_length}, "mt_bench": {"acceptance_length": 1.5}}
    path.write_text(json.dumps({"setting": {**defaults, **setting}, "sets": sets}))
    return path


def test_v3_comparing_lists_every_setting_that_differs(tmp_path, caplog):
    first = write_evaluation(tmp_path / "a.json", 2.0, template="x", drafter="drafter/a")
    newer = {"name": "transformers", "version": "6.0"}
    second = write_evaluation(tmp_path / "b.json", 1.8, k=5, template="y", engine=newer, drafter="drafter/b")
    with caplog.at_level(logging.WARNING, logger="eagle3"):
        assert compare(first, second) == {"heldout": (2.0, 1.8), "mt_bench": (1.5, 1.5)}
    (message,) = [record.getMessage() for record in caplog.records]
    for part in ("engine.version: 5.24.0, 6.0", "k: 3, 5", "template: x, y"):
        assert part in message
    assert "temperature" not in message
    assert "drafter" not in message


def test_v3_equal_settings_compare_silently(tmp_path, caplog):
    first, second = (write_evaluation(tmp_path / name, length) for name, length in (("a", 2.0), ("b", 2.1)))
    with caplog.at_level(logging.WARNING, logger="eagle3"):
        assert compare(first, second)["heldout"] == (2.0, 2.1)
    assert not caplog.records


def test_comparing_something_else_is_refused(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(RequestError, match=r"other\.json"):
        compare(other, other)


def show(summaries, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(summaries, ["untrained", "bigram"], K, "title"))
    return console.export_text()


def test_table_is_honest_about_slower_looping_and_ties():
    tie = Difference(4, 1, 2, margin=1e-6, tolerance=1e-4)
    results = [make_result("a", [1, 2, 0, 1], difference=tie), make_result("b", [3], looping=True)]
    text = " ".join(show({"human_eval": summarize(results, K, 0.0)}).split())
    for part in (
        "human_eval 2 2.000 - 1.000 0.75 0.33 0.00 20.0 40.0",
        "Left out: 1",
        "Slower than plain",
        "but for 1 where",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("accepted", "seconds", "words"),
    [
        ([0, 0, 0, 0], 1.2, "Slower than plain decoding in own: no draft was accepted."),
        ([1, 2, 0, 1], 1.2, "Slower than plain decoding in own: drafting costs more here than it saves."),
        ([1, 2, 0, 1], 0.4, "Faster than its acceptance length allows in own: was the machine busy?"),
        ([1, 2, 0, 1], 0.6, ""),
    ],
)
def test_table_says_of_speeds_what_was_measured(accepted, seconds, words):
    """The acceptance length of these rounds is 1.0 or 2.0, so that 2.5 times as fast is the machine's doing."""
    summary = summarize([make_result("a", accepted, seconds=seconds, plain_seconds=1.0)], K, 0.0)
    text = " ".join(show({"own": summary, "other": summary | {"speedup": 1.0}}, width=120).split())
    assert words in text
    assert "other:" not in text
    assert ("Slower" in text, "Faster" in text) == (words.startswith("Slower"), words.startswith("Faster"))


def test_table_shouts_when_texts_differ():
    real = Difference(4, 1, 2, margin=1e-2, tolerance=1e-4)
    assert "DIFFER" in show({"own": summarize([make_result("a", [1], difference=real)], K, 0.0)})


def test_table_fits_a_terminal():
    summary = summarize([make_result("a", [1, 2, 0, 1])], K, 0.0) | {"tokens_per_s": 12345.6}
    lines = show({"human_eval": summary}).splitlines()
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= 80
