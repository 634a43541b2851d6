"""Which slot is supervised at which step, by hand and against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3.errors import RequestError
from eagle3.slots import pack_rows, spans, supervised_slots


def mask(length: int, *masked: tuple[int, int]) -> np.ndarray:
    found = np.zeros(length, dtype=bool)
    for start, stop in masked:
        found[start:stop] = True
    return found


def slots_of(supervised: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in supervised]


def test_spans_are_the_runs_of_the_mask() -> None:
    assert spans(mask(10, (0, 2), (4, 5), (8, 10))).tolist() == [[0, 2], [4, 5], [8, 10]]
    assert spans(mask(3)).shape == (0, 2)


def test_hand_made_span_shows_which_slots_are_supervised() -> None:
    """T1: an answer at [4, 9) of 12 tokens. The first draft of the turn is made by slot 3, which reads the answer's
    first token; the last one that serving can use predicts token 8, the end-of-turn token."""
    supervised = supervised_slots(np.arange(12), mask(12, (4, 9)), 6)
    assert slots_of(supervised) == [[3, 4, 5, 6], [3, 4, 5], [3, 4], [3], [], []]
    assert supervised.sum() == 10


def test_several_spans_are_supervised_apart() -> None:
    """T1: no slot reaches from one turn into the next, and a one-token turn has no draft."""
    supervised = supervised_slots(np.arange(14), mask(14, (2, 5), (7, 8), (9, 14)), 3)
    assert slots_of(supervised) == [[1, 2, 8, 9, 10, 11], [1, 8, 9, 10], [8, 9]]


def test_a_draft_outside_the_vocabulary_ends_the_path_but_is_itself_a_missed_row() -> None:
    in_vocab = np.ones(12, dtype=bool)
    in_vocab[6] = False
    supervised = supervised_slots(np.arange(12), mask(12, (2, 10)), 4, in_vocab)
    # Slot 4 predicts token 6 (a miss, kept); no slot goes on past token 6 as a draft; slot 5 reads it as the text's.
    assert slots_of(supervised) == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 5, 6], [1, 2, 5], [1]]


def test_span_at_the_document_edges() -> None:
    assert slots_of(supervised_slots(np.arange(4), mask(4, (0, 4)), 2)) == [[0, 1], [0]]
    assert slots_of(supervised_slots(np.arange(1), mask(1, (0, 1)), 2)) == [[], []]
    assert supervised_slots(np.arange(0), mask(0), 2).shape == (2, 0)


@pytest.mark.parametrize("seed", range(20))
def test_exact_rule_equals_its_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, steps = int(rng.integers(1, 30)), 5
    ids, masked, in_vocab = rng.integers(0, 20, length), rng.random(length) < 0.8, rng.random(20) < 0.9
    for vocabulary in (None, in_vocab):
        found = supervised_slots(ids, masked, steps, vocabulary)
        for k in range(steps):
            for t in range(length):
                tokens = range(t + 1, t + 3 + k)
                inside = tokens[-1] < length and all(masked[i] for i in tokens)
                drafts = vocabulary is None or (inside and all(vocabulary[ids[i]] for i in range(t + 2, t + 2 + k)))
                assert found[k, t] == (inside and drafts), (k, t)


def test_alignments_of_the_field() -> None:
    """Answer at [4, 8) of 12: EAGLE's rule misses the first draft (slot 3) and adds the predictions of tokens 8 and 9,
    speculators' starts right and adds that of token 8; both shift with the step."""
    ids, masked = np.arange(12), mask(12, (4, 8))
    assert slots_of(supervised_slots(ids, masked, 3, alignment="exact")) == [[3, 4, 5], [3, 4], [3]]
    assert slots_of(supervised_slots(ids, masked, 3, alignment="eagle")) == [[4, 5, 6, 7], [3, 4, 5, 6], [2, 3, 4, 5]]
    found = supervised_slots(ids, masked, 3, alignment="speculators")
    assert slots_of(found) == [[3, 4, 5, 6], [2, 3, 4, 5], [1, 2, 3, 4]]
    # Never past the last token that can be read.
    edge = supervised_slots(np.arange(5), mask(5, (1, 5)), 3, alignment="speculators")
    assert slots_of(edge) == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]
    with pytest.raises(RequestError, match=r"drafter\.mask_alignment: found 'sideways'"):
        supervised_slots(ids, masked, 3, alignment="sideways")


@pytest.mark.parametrize("alignment", ["exact", "eagle", "speculators"])
def test_rows_of_a_packed_batch(alignment: str) -> None:
    """Rows are nested, cover what is supervised now or later, and each pair knows its teacher and its label."""
    rng = np.random.default_rng(3)
    lengths, steps = [9, 1, 14], 4
    ids = [rng.integers(0, 50, n) for n in lengths]
    flags = [supervised_slots(i, rng.random(len(i)) < 0.8, steps, rng.random(50) < 0.9, alignment) for i in ids]
    rows = pack_rows(ids, flags, steps)
    tokens, all_flags = np.concatenate(ids), np.concatenate(flags, axis=1)
    ends = np.repeat(np.cumsum(lengths), lengths)
    pair = 0
    for k in range(steps):
        needed = set(np.flatnonzero(all_flags[k:].any(0)).tolist())
        assert set(rows.rows[k].tolist()) == needed
        kept = rows.kept[k]
        if k:
            before = rows.rows[k - 1] if kept is None else rows.rows[k - 1][kept]
            assert torch.equal(before, rows.rows[k])
        supervised = rows.supervised_rows[k].tolist()
        assert supervised == np.flatnonzero(all_flags[k]).tolist()
        for t in supervised:
            assert int(rows.steps_of[pair]) == k
            assert int(rows.teacher_tokens[rows.teachers[pair]]) == t + 1 + k
            assert int(rows.labels[pair]) == (tokens[t + 2 + k] if t + 2 + k < ends[t] else -1)
            pair += 1
    assert pair == len(rows.labels) == len(rows.by_teacher) == rows.bounds[-1]
    ordered = rows.teachers[rows.by_teacher]
    for u in range(len(rows.teacher_tokens)):
        assert (ordered[rows.bounds[u] : rows.bounds[u + 1]] == u).all()


def test_batch_without_documents_or_without_supervised_rows_has_empty_rows() -> None:
    for ids in ([], [np.arange(3)]):
        rows = pack_rows(ids, [np.zeros((2, len(i)), dtype=bool) for i in ids], 2)
        assert [len(r) for r in rows.rows] == [0, 0]
        assert len(rows.labels) == len(rows.teacher_tokens) == 0
        assert rows.bounds.tolist() == [0]
