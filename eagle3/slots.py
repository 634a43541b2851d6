"""Which slot is supervised at which unroll step, and which rows each step has to compute (walk: step 5 → 6).

Slot t at step k reads the embedding of token t+1+k, is taught by the target's distribution after token t+1+k, and
predicts token t+2+k. The drafts that serving can reach start at the token before a span (the slot that reads the span's
first token, which the target itself produced) and end with the span's last token.

In a one-layer drafter slots meet only through the keys and values of step 0. So step 0 computes those for all rows, and
everything else is needed only for the rows that are supervised at this or a later step. These row sets are nested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3.errors import RequestError

ALIGNMENTS = ("exact", "eagle", "speculators")

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


def spans(loss_mask: BoolArray) -> IntArray:
    """The maximal runs of a document's loss mask [T] as rows (start, stop) [S, 2], stop exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], loss_mask.astype(np.int8), [0]))))
    return edges.reshape(-1, 2).astype(np.int64)


def supervised_slots(
    input_ids: NDArray[np.integer],
    loss_mask: BoolArray,
    steps: int,
    in_draft_vocab: BoolArray | None = None,
    alignment: str = "exact",
) -> BoolArray:
    """Says for one document of T tokens which slots are supervised at each step: bool [steps, T].

    `exact`: slot t at step k is supervised iff tokens t+1 … t+2+k lie in one span of the loss mask and the drafts
    t+2 … t+1+k that lead there are in the draft vocabulary (`in_draft_vocab` bool [V]; None means all are).
    `eagle` takes the mask at token t+k (SafeAILab/EAGLE, SpecForge, TorchSpec: misses a turn's first draft and trains
    two predictions past its end); `speculators` takes it at token t+1+k (speculators, Model-Optimizer, Automodel:
    trains one prediction past the end). Both look at no vocabulary and exist for parity with these programs.

    Raises RequestError for an unknown alignment.
    """
    length = len(input_ids)
    supervised = np.zeros((steps, length), dtype=np.bool_)
    if alignment == "exact":
        depth = _exact_depth(np.asarray(input_ids), loss_mask, in_draft_vocab)
        np.greater(depth[None, :], np.arange(steps)[:, None], out=supervised)
        return supervised
    if alignment not in ALIGNMENTS:
        raise RequestError(
            f"drafter.mask_alignment: found '{alignment}', expected one of {list(ALIGNMENTS)}; "
            "try drafter.mask_alignment=exact"
        )
    shift = 0 if alignment == "eagle" else 1
    for k in range(steps):
        rows = max(length - 1 - k, 0)  # the slots whose token t+1+k exists
        supervised[k, :rows] = loss_mask[k + shift : k + shift + rows]
    return supervised


def _exact_depth(input_ids: NDArray[np.integer], loss_mask: BoolArray, in_draft_vocab: BoolArray | None) -> IntArray:
    """The number of steps, from 0 on, at which each slot is supervised under the exact rule: int64 [T]."""
    length = len(input_ids)
    slot = np.arange(length, dtype=np.int64)
    span_stop = np.zeros(length + 2, dtype=np.int64)
    for start, stop in spans(loss_mask):
        span_stop[start:stop] = stop
    # Tokens t+1 … t+2+k lie in one span iff t+1 does and t+2+k comes before its stop.
    depth = span_stop[slot + 1] - (slot + 2)
    if in_draft_vocab is not None:
        next_oov = np.full(length + 3, length + 3, dtype=np.int64)
        outside = np.flatnonzero(~in_draft_vocab[input_ids])
        next_oov[outside] = outside
        next_oov = np.minimum.accumulate(next_oov[::-1])[::-1]
        depth = np.minimum(depth, next_oov[slot + 2] - (slot + 1))
    return np.maximum(depth, 0)


@dataclass(frozen=True)
class SlotRows:
    """The rows of a packed batch of T tokens that each step computes and supervises. All index tensors are int64.

    rows[k]        [n_k]  slots computed at step k, ascending; rows[k+1] is a subset of rows[k]
    kept[k]        [n_k]  where rows[k] lie in rows[k-1], or None when nothing was dropped; kept[0] is None
    supervised[k]  [s_k]  where the supervised slots of step k lie in rows[k], or None when all of them are
    teacher_tokens [U]    packed positions whose final state teaches some supervised slot, ascending
    teachers       [M]    for each supervised (step, slot), step by step, the index of its teacher in teacher_tokens
    steps_of       [M]    its step
    labels         [M]    the text's next token, which a hit must equal; -1 when the document ends before it
    by_teacher     [M]    the order that sorts these M pairs by their teacher
    bounds         [U+1]  in that order, where each teacher token's pairs begin; a NumPy array, it stays on the host
    """

    rows: tuple[Tensor, ...]
    kept: tuple[Tensor | None, ...]
    supervised: tuple[Tensor | None, ...]
    teacher_tokens: Tensor
    teachers: Tensor
    steps_of: Tensor
    labels: Tensor
    by_teacher: Tensor
    bounds: IntArray

    @property
    def steps(self) -> int:
        """The number of unroll steps."""
        return len(self.rows)

    @property
    def supervised_rows(self) -> tuple[Tensor, ...]:
        """The supervised slots of each step, as packed positions [s_k]."""
        pairs = zip(self.rows, self.supervised, strict=True)
        return tuple(rows if index is None else rows[index] for rows, index in pairs)


def pack_rows(input_ids: Sequence[NDArray[np.integer]], supervised: Sequence[BoolArray], steps: int) -> SlotRows:
    """Lays out the rows of documents packed one behind the other.

    `input_ids` and `supervised` (bool [steps, T_d], from `supervised_slots`) have one entry a document.
    """
    lengths = np.array([len(ids) for ids in input_ids], dtype=np.int64)
    flags = np.concatenate(list(supervised), axis=1) if supervised else np.zeros((steps, 0), dtype=np.bool_)
    tokens = np.concatenate(list(input_ids)).astype(np.int64) if input_ids else np.zeros(0, dtype=np.int64)
    stop = np.repeat(np.cumsum(lengths), lengths)

    needed = np.logical_or.accumulate(flags[::-1], axis=0)[::-1]
    rows = [np.flatnonzero(needed[k]) for k in range(steps)]
    kept: list[Tensor | None] = [None]
    for k in range(1, steps):
        same = len(rows[k]) == len(rows[k - 1])
        kept.append(None if same else torch.from_numpy(np.searchsorted(rows[k - 1], rows[k])))
    index: list[Tensor | None] = []
    labels, teachers = [], []
    for k in range(steps):
        here = flags[k, rows[k]]
        index.append(None if here.all() else torch.from_numpy(np.flatnonzero(here)))
        slots = rows[k][here]
        target = slots + 2 + k
        inside = target < stop[slots]
        labels.append(np.where(inside, tokens[np.where(inside, target, 0)], -1))
        teachers.append(slots + 1 + k)
    teacher_of = np.concatenate(teachers)
    teacher_tokens, teacher_index = np.unique(teacher_of, return_inverse=True)
    return SlotRows(
        rows=tuple(torch.from_numpy(r) for r in rows),
        kept=tuple(kept),
        supervised=tuple(index),
        teacher_tokens=torch.from_numpy(teacher_tokens),
        teachers=torch.from_numpy(teacher_index.astype(np.int64)),
        steps_of=torch.from_numpy(np.repeat(np.arange(steps), [len(t) for t in teachers])),
        labels=torch.from_numpy(np.concatenate(labels)),
        by_teacher=torch.from_numpy(np.argsort(teacher_index, kind="stable")),
        bounds=np.concatenate(([0], np.cumsum(np.bincount(teacher_index, minlength=len(teacher_tokens))))),
    )
