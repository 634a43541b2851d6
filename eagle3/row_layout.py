"""Where each unroll step's rows lie in the buffers that all steps share (walk: step 5 → 6).

Rows are sorted by how many steps they live, longest first, then by position. Row sets of later steps are nested, so the
rows of step k are the first n_k of step 0's, and no step gathers anything. Buffers of all steps stack them one behind
the other: rows of step 0, of step 1, …, M in all; where step 0 needs every packed token (its keys and values), T more
rows follow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eagle3.slots import SlotRows

KEY_BLOCK = 64  # keys to a block of the backward kernel; `key_ranges` are worked out for it


@dataclass(frozen=True)
class RowLayout:
    """The rows of a packed batch of T tokens. Index tensors are int32 and views of one tensor, so they move together.

    counts       n_k, the rows of each step
    slots        [n_0]     the packed position of each row
    positions    [T]       each token's position in its document
    starts       [T]       each token's document's first packed position
    order        per step, [n_k]: the rows by ascending packed position, as attention walks them
    ascending    per step, [n_k]: these packed positions
    key_ranges   per step, [blocks, 3]: for each block of KEY_BLOCK step-0 columns the entries [first, last) of `order`
                 that see some of it, as (first, full, last): those from `full` on see all of it
    teacher_tokens [U]     packed positions whose final state teaches some row, ascending
    pairs        [P]       the supervised stacked rows by ascending teacher
    teachers     [P]       each pair's teacher, an index into teacher_tokens
    steps_of     [P]       its step
    labels       [P]       the text's next token, which a hit must equal; -1 where the document ends before it
    by_step      [P]       the order that sorts pairs by step, then by packed position
    pair_of_row  [P]       where every stacked row is supervised, each row's pair; else meaningless
    offsets      [steps]   where each step's rows start in a stacked buffer
    pair_bounds  [U + 1]   where each teacher's pairs start; stays on the host
    """

    counts: tuple[int, ...]
    slots: Tensor
    positions: Tensor
    starts: Tensor
    order: tuple[Tensor, ...]
    ascending: tuple[Tensor, ...]
    key_ranges: tuple[Tensor, ...]
    teacher_tokens: Tensor
    pairs: Tensor
    teachers: Tensor
    steps_of: Tensor
    labels: Tensor
    by_step: Tensor
    pair_of_row: Tensor
    offsets: Tensor
    pair_bounds: Tensor

    @property
    def steps(self) -> int:
        """The number of unroll steps."""
        return len(self.counts)

    @property
    def tokens(self) -> int:
        """T, the packed tokens."""
        return self.positions.shape[0]

    @property
    def stacked(self) -> int:
        """M, the rows of all steps together."""
        return sum(self.counts)

    @property
    def every_slot(self) -> Tensor:
        """All packed positions, int32 [T]."""
        return torch.arange(self.tokens, dtype=torch.int32, device=self.positions.device)

    def bounds(self, step: int) -> tuple[int, int]:
        """The rows of a step in a stacked buffer, [first, last); `step` = steps means the T token rows behind them."""
        first = sum(self.counts[:step])
        return first, first + (self.counts[step] if step < self.steps else self.tokens)

    def visible(self, step: int) -> Tensor:
        """Which step-0 columns each row of a step sees: bool [n_k, T]."""
        slots = self.slots[: self.counts[step]].long()
        columns = torch.arange(self.tokens, device=slots.device)
        return (columns <= slots[:, None]) & (columns >= self.starts[slots][:, None])

    def to(self, device: torch.device, non_blocking: bool = False) -> RowLayout:
        """Moves all index tensors in one copy."""
        single = [getattr(self, name) for name in _SINGLE]
        many = [*single, *self.order, *self.ascending, *(r.flatten() for r in self.key_ranges)]
        joined = torch.cat(many)
        if non_blocking and device.type == "cuda":
            joined = joined.pin_memory()
        parts = joined.to(device, non_blocking=non_blocking).split([len(p) for p in many])
        per_step = [parts[len(single) + self.steps * i :][: self.steps] for i in range(3)]
        return replace(
            self,
            **dict(zip(_SINGLE, parts, strict=False)),
            order=tuple(per_step[0]),
            ascending=tuple(per_step[1]),
            key_ranges=tuple(r.view(-1, 3) for r in per_step[2]),
        )


_SINGLE = ("slots", "positions", "starts", "teacher_tokens", "pairs", "teachers", "steps_of", "labels", "by_step", "pair_of_row", "offsets")


def lay_out(rows: SlotRows, input_ids: Tensor, cu_seqlens: Tensor) -> RowLayout:
    """Builds the layout of packed documents from their rows, tokens [T] and bounds [B + 1]."""
    bounds = np.asarray(cu_seqlens)
    lengths = np.diff(bounds)
    starts, ends = np.repeat(bounds[:-1], lengths), np.repeat(bounds[1:], lengths)
    ascending = np.asarray(rows.rows[0])
    life = np.ones(len(ascending), dtype=np.int64)
    for later in rows.rows[1:]:
        life[np.searchsorted(ascending, np.asarray(later))] += 1
    slots = ascending[np.argsort(-life, kind="stable")]
    counts = tuple(len(r) for r in rows.rows)
    orders = [np.argsort(slots[:n], kind="stable") for n in counts]
    ranges = [_key_ranges(slots[order], starts, ends) for order in orders]

    first = np.cumsum((0, *counts))[:-1]
    supervised = [np.asarray(s) for s in rows.supervised_rows]  # ascending, step by step
    # Where a step's supervised slots lie among its stacked rows: `order` says it for all rows in ascending order.
    places = [
        first[k] + orders[k][np.searchsorted(slots[orders[k]], at)] for k, at in enumerate(supervised)
    ]
    step_of = np.repeat(np.arange(len(counts)), [len(s) for s in supervised])
    slot_of, place_of = np.concatenate(supervised), np.concatenate(places)
    teacher_tokens, teacher_of = np.unique(slot_of + step_of + 1, return_inverse=True)
    by_teacher = np.argsort(teacher_of, kind="stable")
    by_step = np.empty_like(by_teacher)
    by_step[by_teacher] = np.arange(len(by_teacher))
    tokens, label_of = np.asarray(input_ids), slot_of + step_of + 2
    inside = label_of < ends[slot_of]
    labels = np.where(inside, tokens[np.where(inside, label_of, 0)], -1)
    return RowLayout(
        counts,
        _index(slots),
        _index(np.arange(bounds[-1]) - starts),
        _index(starts),
        tuple(map(_index, orders)),
        tuple(_index(slots[order]) for order in orders),
        tuple(map(_index, ranges)),
        *map(_index, (teacher_tokens, place_of[by_teacher], teacher_of[by_teacher])),
        *map(_index, (step_of[by_teacher], labels[by_teacher], by_step, np.argsort(place_of[by_teacher]), first)),
        torch.from_numpy(np.searchsorted(teacher_of[by_teacher], np.arange(len(teacher_tokens) + 1))),
    )


def _index(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))


def _key_ranges(sorted_slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each block of keys the range of queries, ascending by slot, that see some of it, and where full sight begins."""
    tokens = len(starts)
    first_key = np.arange(0, tokens, KEY_BLOCK)
    last_key = np.minimum(first_key + KEY_BLOCK, tokens) - 1
    first = np.searchsorted(sorted_slots, first_key)
    last = np.searchsorted(sorted_slots, ends[last_key])
    full = np.searchsorted(sorted_slots, first_key + KEY_BLOCK - 1)
    one_document = starts[last_key] == starts[first_key]
    return np.stack((first, np.where(one_document, np.minimum(full, last), last), last), axis=1)
