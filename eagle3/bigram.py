"""The bigram drafter: the baseline that every trained drafter must beat.

It proposes the token that most often followed the last one in the drafter's own training tokens, and so on for k
tokens. It costs nothing, knows nothing of the target's states, and is measured in the same loop as the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from eagle3.errors import StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from eagle3.tokens import Sample

_PAIRS_IN_MEMORY = 4_000_000


class BigramChain:
    """Proposes chains of most frequent successors (a Proposer of eagle3.decoding)."""

    def __init__(self, successors: NDArray[np.int64]) -> None:
        """`successors` [V]: the token to follow each token, from `count_successors`."""
        self._successors: list[int] = successors.tolist()

    def start(self) -> None:
        """Nothing to forget: a bigram remembers one token."""

    def propose(self, text: Sequence[int], states: Tensor | None, k: int) -> list[int]:
        drafts: list[int] = []
        token = text[-1]
        for _ in range(k):
            token = self._successors[token]
            drafts.append(token)
        return drafts


def count_successors(samples: Iterable[Sample], vocab_size: int) -> NDArray[np.int64]:
    """The most frequent next token of every token, int64 [V], counted where the next token is supervised.

    Ties go to the lower id. A token never followed by anything gets the most frequent supervised token. Raises
    StoreError when no token is supervised.
    """
    pairs = np.empty(0, np.int64)
    counts = np.empty(0, np.int64)
    waiting: list[NDArray[np.int64]] = []
    size = 0
    for sample in samples:
        ids = np.asarray(sample.input_ids, np.int64)
        supervised = np.asarray(sample.loss_mask, bool)[1:]
        waiting.append((ids[:-1] * vocab_size + ids[1:])[supervised])
        size += len(waiting[-1])
        if size >= _PAIRS_IN_MEMORY:
            pairs, counts = _merge(pairs, counts, waiting)
            waiting, size = [], 0
    pairs, counts = _merge(pairs, counts, waiting)
    if not len(pairs):
        raise StoreError("prepared: found no supervised token to count bigrams on; see `eagle3 stage=inspect`")

    first, second = np.divmod(pairs, vocab_size)
    most_frequent = int(np.bincount(second, weights=counts).argmax())
    successors = np.full(vocab_size, most_frequent, np.int64)
    # Sorted by token, then rarest first, then highest id first: the last assignment to each token wins.
    order = np.lexsort((-second, counts, first))
    successors[first[order]] = second[order]
    return successors


def _merge(
    pairs: NDArray[np.int64], counts: NDArray[np.int64], waiting: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Adds pairs (token * V + next) that were not counted yet to the counted ones."""
    new, new_counts = np.unique(np.concatenate([np.empty(0, np.int64), *waiting]), return_counts=True)
    merged, where = np.unique(np.concatenate([pairs, new]), return_inverse=True)
    return merged, np.bincount(where, weights=np.concatenate([counts, new_counts]), minlength=len(merged)).astype(
        np.int64
    )
