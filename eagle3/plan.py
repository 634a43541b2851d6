"""Which documents make up which batch of which rank, for a whole training run (walk: step 5).

The plan is a pure function of lengths, seed and sizes: every rank works it out alike without a word to the others, and
a resumed run finds its place by counting batches. Documents are shuffled anew each epoch, cut into windows of some
batches, and within a window spread over as few batches as hold them, the longest first, each into the emptiest batch.
So batches are nearly full and nearly equal, and ranks have equal numbers of batches and loads.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

# Batches of each rank in a window: enough to fill them evenly, few enough to mix lengths differently each epoch.
WINDOW_BATCHES = 16


def plan_epoch(lengths: IntArray, batch_tokens: int, ranks: int, rng: np.random.Generator) -> list[list[IntArray]]:
    """One epoch: for each step the documents (indices into `lengths`) of each rank's batch.

    No batch exceeds `batch_tokens` unless it is a single longer document. Every document occurs once; a rank's batch is
    empty only where fewer documents than ranks are left.
    """
    order = rng.permutation(len(lengths))
    room = np.minimum(lengths, batch_tokens)  # a longer document fills one batch, not several
    middle = np.cumsum(room[order]) - room[order] / 2
    total = int(room.sum())
    windows = max(round(total / (WINDOW_BATCHES * ranks * batch_tokens)), 1)
    window = np.minimum((middle * windows / max(total, 1)).astype(np.int64), windows - 1)
    groups: list[list[IntArray]] = []
    for number in range(windows):
        groups += _pack_window(order[window == number], lengths, batch_tokens, ranks)
    shuffled = [groups[i] for i in rng.permutation(len(groups))]
    # The fullest batch of a step goes to the rank that has had the least so far.
    loads = np.zeros(ranks, dtype=np.int64)
    steps = []
    for group in shuffled:
        by_load = sorted(group, key=lambda batch: -int(lengths[batch].sum()))
        step = [np.empty(0, dtype=np.int64)] * ranks
        for batch, rank in zip(by_load, np.argsort(loads, kind="stable"), strict=True):
            step[rank] = batch
            loads[rank] += int(lengths[batch].sum())
        steps.append(step)
    return steps


def _pack_window(documents: IntArray, lengths: IntArray, batch_tokens: int, ranks: int) -> list[list[IntArray]]:
    """Spreads documents over as few batches as hold them, a multiple of `ranks`; groups of `ranks` have like loads."""
    if not len(documents):
        return []
    longest_first = documents[np.argsort(-lengths[documents], kind="stable")]
    room = int(np.minimum(lengths[documents], batch_tokens).sum())
    count = ranks * max(-(-room // (batch_tokens * ranks)), 1)
    while (batches := _spread(longest_first, lengths, batch_tokens, count)) is None:
        count += ranks
    batches.sort(key=lambda batch: -int(lengths[batch].sum()))
    return [batches[i : i + ranks] for i in range(0, count, ranks)]


def _spread(documents: IntArray, lengths: IntArray, batch_tokens: int, count: int) -> list[IntArray] | None:
    """Each document into the emptiest of `count` batches; None when one does not fit there, and so nowhere."""
    batches: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for document in documents.tolist():
        load, i = heap[0]
        if load and load + lengths[document] > batch_tokens:
            return None
        batches[i].append(document)
        heapq.heapreplace(heap, (load + int(lengths[document]), i))
    return [np.array(sorted(batch), dtype=np.int64) for batch in batches]


@dataclass(frozen=True)
class Position:
    """Where a batch lies: `epoch` (from 0), and its place among the `batches` of that epoch."""

    epoch: int
    batch: int
    batches: int


class Plan:
    """The batches of a training run, numbered from 0 through all epochs.

    `batches` is their number on each rank, `steps` that of optimizer steps of `accumulate` batches; the last step may
    have fewer. `max_steps` ends the run early.
    """

    def __init__(
        self,
        lengths: IntArray,
        batch_tokens: int,
        ranks: int = 1,
        seed: int = 0,
        epochs: int = 1,
        accumulate: int = 1,
        max_steps: int | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_tokens, self.ranks, self.seed, self.accumulate = batch_tokens, ranks, seed, accumulate
        self._epochs: OrderedDict[int, list[list[IntArray]]] = OrderedDict()
        limit = None if max_steps is None else max_steps * accumulate
        starts = [0]
        for epoch in range(epochs):
            if limit is not None and starts[-1] >= limit:
                break
            starts.append(starts[-1] + len(self._epoch(epoch)))
        self._starts = np.array(starts, dtype=np.int64)
        self.batches = starts[-1] if limit is None else min(starts[-1], limit)
        self.steps = -(-self.batches // accumulate)

    def position(self, index: int) -> Position:
        """Where batch `index` lies."""
        epoch = min(int(np.searchsorted(self._starts, index, side="right")) - 1, len(self._starts) - 2)
        start, stop = self._starts[epoch], self._starts[epoch + 1]
        return Position(epoch, int(index - start), int(stop - start))

    def documents(self, index: int) -> list[IntArray]:
        """The documents of batch `index` on each rank."""
        place = self.position(index)
        return self._epoch(place.epoch)[place.batch]

    def step_documents(self, index: int) -> IntArray:
        """All documents, on all ranks, of the optimizer step to which batch `index` belongs."""
        first = index - index % self.accumulate
        last = min(first + self.accumulate, self.batches)
        return np.concatenate([batch for i in range(first, last) for batch in self.documents(i)])

    def _epoch(self, epoch: int) -> list[list[IntArray]]:
        if epoch not in self._epochs:
            rng = np.random.default_rng([self.seed, epoch])
            self._epochs[epoch] = plan_epoch(self.lengths, self.batch_tokens, self.ranks, rng)
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]


def plan_once(lengths: IntArray, batch_tokens: int, ranks: int) -> list[list[IntArray]]:
    """The fixed batches of a validation set: for each rank the documents of its batches, all ranks equally many."""
    groups = _pack_window(np.arange(len(lengths)), np.asarray(lengths, dtype=np.int64), batch_tokens, ranks)
    return [[group[rank] for group in groups] for rank in range(ranks)]
