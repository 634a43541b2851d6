"""Whose rows are these? Matches the rows of an engine's batches to the samples being captured (step 3 of the walk).

An engine mixes documents in a batch, reorders them and may split a long one over several batches, and no public seam
says which rows belong to which request. Token ids and positions do: a document starts at position 0, and a chunk that
starts at p > 0 belongs to the one open sample that expects p and whose ids agree. That needs prefix caching off, so that
every row is computed, and no other request in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eagle3.errors import EngineError


@dataclass
class OpenSample:
    """A sample whose rows are still expected. `first_row` is where it starts in the files of its shard."""

    shard: str
    index: int
    input_ids: np.ndarray
    first_row: int
    rows_seen: int = 0


@dataclass(frozen=True)
class Run:
    """`count` rows of a batch from `batch_row` on are the rows of `sample` from `sample_row` on."""

    sample: OpenSample
    sample_row: int
    batch_row: int
    count: int


class RowMatcher:
    """The open samples of a capture, and the search for the one that a run of rows belongs to."""

    def __init__(self) -> None:
        self._open: dict[bytes, OpenSample] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, sample: OpenSample) -> None:
        """Expects the rows of `sample` (input_ids int64 [T]). EngineError when the same ids are open already."""
        key = sample.input_ids.tobytes()
        if key in self._open:
            raise EngineError(
                f"sample {sample.index} of shard {sample.shard}: its token ids are being captured already; "
                "expected each prompt once"
            )
        self._open[key] = sample

    def match(self, input_ids: np.ndarray, positions: np.ndarray) -> list[Run]:
        """Gives every row of one batch (both int64 [T]) to a sample, and closes the samples that are complete.

        Raises EngineError when rows belong to no open sample, or to several that differ in what came before.
        """
        runs: list[Run] = []
        # Longest first: a whole document must not lose its rows to a chunk of another with the same beginning.
        for first, count in sorted(_pieces(positions), key=lambda piece: -piece[1]):
            while count:
                ids, position = input_ids[first : first + count], int(positions[first])
                sample, taken = self._owner(ids, position)
                runs.append(Run(sample, position, first, taken))
                sample.rows_seen = position + taken
                if sample.rows_seen == len(sample.input_ids):
                    del self._open[sample.input_ids.tobytes()]
                first, count = first + taken, count - taken
        return runs

    def _owner(self, ids: np.ndarray, position: int) -> tuple[OpenSample, int]:
        """The sample that the rows from `position` on belong to, and how many of them."""
        whole = self._open.get(ids.tobytes())
        if position == 0 and whole is not None and whole.rows_seen == 0:
            return whole, len(ids)
        fits = [fit for fit in self._fits(ids, position)]
        if not fits:
            raise EngineError(
                f"capture: the engine computed {len(ids)} rows from position {position} on (token ids "
                f"{ids[:6].tolist()}…) that belong to none of the {len(self._open)} open samples; is another request in "
                "flight, or prefix caching on? Try hardware.engine_options.enable_prefix_caching=false"
            )
        # All rows in one sample rather than a sample's end and another's chunk that happens to follow on.
        most = max(count for _, count in fits)
        best = [sample for sample, count in fits if count == most]
        complete = [sample for sample in best if position + most == len(sample.input_ids)]
        best = complete or best
        before = {sample.input_ids[: position + most].tobytes() for sample in best}
        if len(before) > 1:
            raise EngineError(
                f"capture: {most} rows from position {position} on (token ids {ids[:6].tolist()}…) fit {len(before)} open "
                "samples that differ before; set hardware.batch_tokens to at least the longest sample, so that none is "
                "split"
            )
        return best[0], most

    def _fits(self, ids: np.ndarray, position: int) -> Iterator[tuple[OpenSample, int]]:
        for sample in self._open.values():
            if sample.rows_seen == position:
                count = min(len(ids), len(sample.input_ids) - position)
                if np.array_equal(sample.input_ids[position : position + count], ids[:count]):
                    yield sample, count


def _pieces(positions: np.ndarray) -> Iterator[tuple[int, int]]:
    """First row and length of each stretch of consecutive positions."""
    starts = np.flatnonzero(np.diff(positions, prepend=positions[:1] + 1) != 1)
    for first, after in zip(starts, [*starts[1:], len(positions)], strict=True):
        yield int(first), int(after - first)
