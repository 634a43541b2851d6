"""Where each unroll step's rows lie in the buffers that all steps share (walk: step 5 → 6).

Rows are sorted by how many steps they live, longest first, then by position. Row sets of later steps are nested, so the
rows of step k are the first n_k of step 0's, and no step gathers anything. Buffers of all steps stack them one behind
the other: rows of step 0, of step 1, …, M in all; where step 0 needs every packed token (its keys and values), T more
rows follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3.slots import SlotRows

KEY_BLOCK = 64  # keys to a block of the backward kernel; `key_ranges` are worked out for it


@dataclass(frozen=True)
class RowLayout:
    """The rows of a packed batch of T tokens.

    counts       n_k, the rows of each step
    tokens       T
    indices      int32, all index arrays below behind one another, so that they reach a device in one copy
    bounds_of    where each of them lies in `indices`; on the host, as the next
    pair_bounds  [U + 1], where each teacher's pairs start
    seen         pairs of a row and a step-0 or own column that it sees, over all steps
    """

    counts: tuple[int, ...]
    tokens: int
    indices: Tensor
    bounds_of: dict[str, tuple[int, int]]
    pair_bounds: NDArray[np.int64]
    seen: int

    def _part(self, name: str) -> Tensor:
        start, stop = self.bounds_of[name]
        return self.indices[start:stop]

    @property
    def slots(self) -> Tensor:
        """The packed position of each row [n_0]."""
        return self._part("slots")

    @property
    def every_slot(self) -> Tensor:
        """All packed positions [T]."""
        return self._part("every_slot")

    @property
    def positions(self) -> Tensor:
        """Each token's position in its document [T]."""
        return self._part("positions")

    @property
    def starts(self) -> Tensor:
        """The first packed position of each token's document [T]."""
        return self._part("starts")

    @property
    def offsets(self) -> Tensor:
        """Where each step's rows start in a stacked buffer [steps]."""
        return self._part("offsets")

    def order(self, step: int) -> Tensor:
        """A step's rows by ascending packed position, as attention walks them [n_k]."""
        return self._part(f"order_{step}")

    def ascending(self, step: int) -> Tensor:
        """The packed positions of a step's rows, ascending [n_k]."""
        return self._part(f"ascending_{step}")

    def key_ranges(self, step: int) -> Tensor:
        """For each block of KEY_BLOCK step-0 columns the entries [first, last) of `ascending` that see some of it.

        [blocks, 3] as (first, full, last): those from `full` on see all of it.
        """
        return self._part(f"key_ranges_{step}").view(-1, 3)

    @property
    def teacher_tokens(self) -> Tensor:
        """Packed positions whose final state teaches some row, ascending [U]."""
        return self._part("teacher_tokens")

    @property
    def pairs(self) -> Tensor:
        """The supervised stacked rows by ascending teacher [P]."""
        return self._part("pairs")

    @property
    def teachers(self) -> Tensor:
        """Each pair's teacher, an index into `teacher_tokens` [P]."""
        return self._part("teachers")

    @property
    def steps_of(self) -> Tensor:
        """Each pair's step [P]."""
        return self._part("steps_of")

    @property
    def labels(self) -> Tensor:
        """The text's next token, which a hit of a pair must equal; -1 where the document ends before it [P]."""
        return self._part("labels")

    @property
    def by_step(self) -> Tensor:
        """The order that sorts pairs by step, then by packed position [P]."""
        return self._part("by_step")

    @property
    def pair_of_row(self) -> Tensor:
        """Where every stacked row is supervised, each row's pair [P]; else meaningless."""
        return self._part("pair_of_row")

    @property
    def steps(self) -> int:
        """The number of unroll steps."""
        return len(self.counts)

    @property
    def stacked(self) -> int:
        """M, the rows of all steps together."""
        return sum(self.counts)

    def bounds(self, step: int) -> tuple[int, int]:
        """The rows of a step in a stacked buffer, [first, last); `step` = steps means the T token rows behind them."""
        first = sum(self.counts[:step])
        return first, first + (self.counts[step] if step < self.steps else self.tokens)

    def visible(self, step: int) -> Tensor:
        """Which step-0 columns each row of a step sees: bool [n_k, T]."""
        slots = self.slots[: self.counts[step]]
        columns = torch.arange(self.tokens, device=slots.device)
        return (columns <= slots[:, None]) & (columns >= self.starts[slots][:, None])


def own_columns(step: int) -> slice:
    """Where a step's pairs with its rows' own columns, those of steps 1 … step, lie among the pairs of all steps."""
    return slice(step * (step - 1) // 2, step * (step + 1) // 2)


def lay_out(rows: SlotRows, input_ids: Tensor, cu_seqlens: Tensor) -> RowLayout:
    """Builds the layout of packed documents from their rows, tokens [T] and bounds [B + 1]."""
    bounds = np.asarray(cu_seqlens)
    lengths = np.diff(bounds)
    starts, ends = np.repeat(bounds[:-1], lengths), np.repeat(bounds[1:], lengths)
    every = np.arange(bounds[-1])
    ascending = np.asarray(rows.rows[0])
    life = np.ones(len(ascending), dtype=np.int64)
    for later in rows.rows[1:]:
        life[np.searchsorted(ascending, np.asarray(later))] += 1
    slots = ascending[np.argsort(-life, kind="stable")]
    counts = tuple(len(r) for r in rows.rows)
    offsets = np.cumsum((0, *counts))[:-1]
    orders = [np.argsort(slots[:n], kind="stable") for n in counts]

    supervised = [np.asarray(s) for s in rows.supervised_rows]  # ascending, step by step
    # Where a step's supervised slots lie among its stacked rows: `order` says it for all rows in ascending order.
    places = [
        offset + order[np.searchsorted(slots[order], at)]
        for offset, order, at in zip(offsets, orders, supervised, strict=True)
    ]
    step_of = np.repeat(np.arange(len(counts)), [len(s) for s in supervised])
    slot_of, place_of = np.concatenate(supervised), np.concatenate(places)
    teacher_tokens, teacher_of = np.unique(slot_of + step_of + 1, return_inverse=True)
    by_teacher = np.argsort(teacher_of, kind="stable")
    by_step = np.empty_like(by_teacher)
    by_step[by_teacher] = np.arange(len(by_teacher))
    tokens, label_of = np.asarray(input_ids), slot_of + step_of + 2
    inside = label_of < ends[slot_of]
    parts = {
        "slots": slots,
        "every_slot": every,
        "positions": every - starts,
        "starts": starts,
        "offsets": offsets,
        "teacher_tokens": teacher_tokens,
        "pairs": place_of[by_teacher],
        "teachers": teacher_of[by_teacher],
        "steps_of": step_of[by_teacher],
        "labels": np.where(inside, tokens[np.where(inside, label_of, 0)], -1)[by_teacher],
        "by_step": by_step,
        "pair_of_row": np.argsort(place_of[by_teacher]),
    }
    for step, order in enumerate(orders):
        parts[f"order_{step}"] = order
        parts[f"ascending_{step}"] = slots[order]
        parts[f"key_ranges_{step}"] = _key_ranges(slots[order], starts, ends).ravel()
    edges = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts.values())])  # each aligned to 16 bytes
    indices = np.zeros(edges[-1], dtype=np.int32)
    bounds_of = {}
    for (name, part), start in zip(parts.items(), edges[:-1].tolist(), strict=True):
        indices[start : start + len(part)] = part
        bounds_of[name] = (start, start + len(part))
    pair_bounds = np.searchsorted(teacher_of[by_teacher], np.arange(len(teacher_tokens) + 1))
    reach = np.cumsum([0, *(slots - starts[slots] + 1)])
    seen = sum(int(reach[n]) + n * step for step, n in enumerate(counts))
    return RowLayout(counts, len(every), torch.from_numpy(indices), bounds_of, pair_bounds, seen)


def _key_ranges(sorted_slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each block of keys the queries, ascending by slot, that see some of it, and where full sight begins."""
    tokens = len(starts)
    first_key = np.arange(0, tokens, KEY_BLOCK)
    last_key = np.minimum(first_key + KEY_BLOCK, tokens) - 1
    first = np.searchsorted(sorted_slots, first_key)
    last = np.searchsorted(sorted_slots, ends[last_key])
    full = np.searchsorted(sorted_slots, first_key + KEY_BLOCK - 1)
    one_document = starts[last_key] == starts[first_key]
    return np.stack((first, np.where(one_document, np.minimum(full, last), last), last), axis=1)
