"""What a check of a server says: agreement, ties, a server that reads something else."""

from __future__ import annotations

import pytest

from eagle3.agreement import CheckedPrompt, faults, find_served_difference, summarize
from eagle3.decoding import Acceptance
from eagle3.errors import StageFailed
from eagle3.evaluation import Difference


class Judge:
    """Margins by (text before, token)."""

    def __init__(self, margins: dict[tuple[tuple[int, ...], int], float]) -> None:
        self.margins = margins

    def margin(self, token_ids, chosen):
        return self.margins[tuple(token_ids), chosen]


def checked(server: list[int], ours: list[int], difference: Difference | None = None, key: str = "a") -> CheckedPrompt:
    return CheckedPrompt(key, 5, [1, 2, 3], difference, Acceptance.of(server, 3), Acceptance.of(ours, 3))


def test_equal_texts_have_no_difference_and_others_are_judged_where_they_part() -> None:
    judge = Judge({((9, 4), 5): 0.0, ((9, 4), 6): 2e-4})
    assert find_served_difference(judge, [9], [4, 5], [4, 5], "float32") is None
    found = find_served_difference(judge, [9], [4, 5, 1], [4, 6, 2], "float32")
    assert found == Difference(1, 5, 6, 2e-4, 1e-3)
    assert found.tie
    with pytest.raises(StageFailed, match="ended after 1 tokens with the drafter, 2 without"):
        find_served_difference(judge, [9], [4, 5], [4], "float32")


def test_the_same_rounds_agree() -> None:
    prompts = [checked([3, 0, 1], [3, 0, 1]), checked([2], [2], key="b")]
    summary = summarize(prompts, 3, "float32", 2.4)
    assert (summary["acceptance_length"], summary["acceptance_length_ours"]) == (2.5, 2.5)
    assert (summary["drafted"], summary["apart"], summary["apart_allowed"]) == (12, 0, 1)
    assert faults(prompts, summary) == []


def test_a_server_that_reads_something_else_is_a_fault() -> None:
    prompts = [checked([0, 0, 0, 0], [3, 1])]
    summary = summarize(prompts, 3, "float32", 2.4)
    (fault,) = faults(prompts, summary)
    assert "acceptance length of 1.000, our decoder 3.000" in fault
    assert "another vocabulary map or unset weights" in fault


def test_a_tie_counts_and_a_changed_text_is_a_fault() -> None:
    tie, change = (Difference(4, 1, 2, margin, 1e-3) for margin in (1e-5, 0.4))
    prompts = [checked([3], [3]), checked([0, 1], [0, 1], tie, "b")]
    summary = summarize(prompts, 3, "float32", None)
    assert (summary["prompts"], summary["identical"], summary["ties"], summary["apart"]) == (2, 1, 1, 0)
    assert summary["rounds"] == [3, 3]
    assert faults(prompts, summary) == []
    prompts = [checked([3], [3]), checked([0, 0], [3], tie, "b")]
    assert "the server counted" in faults(prompts, summarize(prompts, 3, "float32", None))[0]
    prompts = [checked([3], [3]), checked([3], [3], change, "b")]
    (fault,) = faults(prompts, summarize(prompts, 3, "float32", None))
    assert fault.startswith("b: the text with drafts is not the target's own")
