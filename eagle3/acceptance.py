"""Simulated acceptance length: what serving would accept on stored texts, walked as serving walks (step 8 of the walk).

A round at slot t drafts the tokens from t+2 on and accepts as many as the drafter hits in a row; the target adds one
token of its own, and the next round starts behind it. On text that the target itself wrote greedily this is real
speculative decoding at temperature 0, without the target. It is no mean over slots: a round's length decides where the
next one starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Walk(NamedTuple):
    """Rounds that were walked and drafts that they accepted."""

    rounds: int
    accepted: int


def walk(
    hits: NDArray[np.bool_],
    slots: NDArray[np.integer],
    spans: NDArray[np.integer] | Sequence[tuple[int, int]],
    k: int,
) -> Walk:
    """Walks each span (start, stop) from its first draft to its last token, with at most k drafts a round.

    `hits` [R, steps] says for the slots [R] (positions in the text or pack, ascending) which of their drafts the text
    has; steps at which a slot is not supervised are False. Slots of other spans are not touched. A span that starts its
    document has no slot before it and is walked from its second token on.
    """
    row_of = {int(slot): row for row, slot in enumerate(slots)}
    in_a_row = np.logical_and.accumulate(np.asarray(hits, dtype=bool)[:, :k], axis=1).sum(axis=1)
    rounds = accepted = 0
    for start, stop in spans:
        slot = int(start) - 1 if int(start) - 1 in row_of else int(start)
        # A slot drafts token slot + 2 first; the span's last token is stop - 1.
        while slot in row_of and slot + 2 < stop:
            taken = int(in_a_row[row_of[slot]])
            rounds += 1
            accepted += taken
            slot += 1 + taken
    return Walk(rounds, accepted)
