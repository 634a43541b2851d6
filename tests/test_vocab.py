"""The draft vocabulary against plain counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3.errors import RequestError
from eagle3.vocab import build_vocab, check_vocabulary_map


def _counts(size: int, seen: dict[int, int]) -> np.ndarray:
    counts = np.zeros(size, dtype=np.int64)
    counts[list(seen)] = list(seen.values())
    return counts


def test_most_frequent_ids_ascending_and_specials_always_in() -> None:
    counts = _counts(20, {3: 5, 19: 9, 7: 9, 11: 1, 12: 2})
    vocab = build_vocab(counts, 4, 20, [1], "hash")
    assert vocab.target_ids.tolist() == [1, 3, 7, 19]
    assert vocab.d2t.tolist() == [1, 2, 5, 16]
    assert vocab.d2t.dtype == torch.int64
    assert vocab.t2d.nonzero()[:, 0].tolist() == [1, 3, 7, 19]
    assert vocab.coverage(counts) == pytest.approx(23 / 26)
    assert vocab.padded == 0
    assert not vocab.is_full


def test_ties_go_to_the_lower_id() -> None:
    assert build_vocab(_counts(9, {8: 2, 5: 2, 2: 2}), 2, 9, [], "h").target_ids.tolist() == [2, 5]


def test_small_corpus_is_padded_to_the_size_and_reported() -> None:
    """D14: 50 distinct tokens, a draft vocabulary of 100."""
    seen = dict.fromkeys(range(200, 250), 1)
    vocab = build_vocab(_counts(400, seen), 100, 400, [399], "hash")
    ids = vocab.target_ids.tolist()
    assert len(set(ids)) == vocab.draft_vocab_size == 100
    assert ids == [*range(49), *range(200, 250), 399]
    assert vocab.padded == 49
    assert build_vocab(_counts(400, seen), 100, 400, [399], "hash").d2t.equal(vocab.d2t)


@pytest.mark.parametrize("size", [0, -1, 21])
def test_impossible_size_names_the_field(size: int) -> None:
    """D14."""
    with pytest.raises(RequestError, match=rf"^drafter.draft_vocab_size: found {size}, expected 1 to 20"):
        build_vocab(_counts(20, {1: 1}), size, 20, [], "hash")


def test_size_below_the_special_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=r"expected 3 to 20 tokens \(3 of them special\)"):
        build_vocab(_counts(20, {1: 1}), 2, 20, [0, 1, 2], "hash")


@pytest.mark.parametrize("size", [None, 20])
def test_no_size_is_the_whole_vocabulary(size: int | None) -> None:
    """D15: without a size, the identity, whatever was built before."""
    vocab = build_vocab(_counts(20, {1: 1}), size, 20, [0], "hash")
    assert vocab.is_full
    assert vocab.d2t.tolist() == [0] * 20
    assert vocab.t2d.all()
    assert vocab.coverage(_counts(20, {1: 1})) == 1.0


def test_a_broken_map_is_refused_with_the_file() -> None:
    """X1: all-zero, out of range, repeated, wrong type, of another target."""
    vocab = build_vocab(_counts(20, {5: 1, 9: 1}), 3, 20, [2], "hash")
    broken = {
        "an all-zero d2t|not the 3 that d2t leads to": torch.zeros(3, dtype=torch.int64),
        "3 target ids out of range, such as 102": vocab.d2t + 100,
        "1 repeated target ids": vocab.d2t - torch.tensor([0, 0, 4]),
        "torch.int32": vocab.d2t.int(),
        "a t2d that marks 3 ids, not the 2 that d2t leads to": vocab.d2t[:2],
    }
    for words, d2t in broken.items():
        with pytest.raises(RequestError, match=f"^drafter.safetensors: the vocabulary map has .*({words})"):
            check_vocabulary_map(d2t, vocab.t2d, 20, "drafter.safetensors")
    with pytest.raises(RequestError, match="t2d of 20 entries instead of the target's 21"):
        check_vocabulary_map(vocab.d2t, vocab.t2d, 21, "drafter.safetensors")
    check_vocabulary_map(vocab.d2t, vocab.t2d, 20, "drafter.safetensors")
