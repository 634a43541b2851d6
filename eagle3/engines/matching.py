"""Whose rows are these? Matches the rows of an engine's batches to the samples being captured (step 3 of the walk).

An engine mixes documents in a batch, reorders them and may split a long one over several batches, and no public seam
says which rows belong to which request. Token ids and positions do: a document starts at position 0, and a chunk that
starts at p > 0 belongs to the one open sample that expects p and whose ids agree. So prefix caching must be off, since
every row must be computed, and no other request in flight.
"""

from __future__ import annotations

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
        stops = [*np.flatnonzero(np.diff(positions) != 1) + 1, len(positions)]
        starts = [0, *stops[:-1]]
        continued: dict[int, OpenSample] = {}
        for sample in [sample for sample in self._open.values() if sample.rows_seen]:
            row = self._continuation(sample, input_ids, positions, starts, stops)
            if row in continued:
                raise self._ambiguous(input_ids[row:], sample.rows_seen)
            if row is not None:
                continued[row] = sample
        runs: list[Run] = []
        firsts = sorted({*starts, *continued})
        pieces = [(first, after) for first, after in zip(firsts, [*firsts[1:], len(positions)], strict=True)]
        # Longest first: a whole document must not lose its rows to a chunk of another with the same beginning.
        for first, after in sorted(pieces, key=lambda piece: piece[0] - piece[1]):
            ids, position = input_ids[first:after], int(positions[first])
            sample = continued.get(first) or self._beginning(ids, position)
            if sample is None or not np.array_equal(sample.input_ids[position : position + len(ids)], ids):
                raise self._unknown(ids, position)
            runs.append(Run(sample, position, int(first), len(ids)))
            sample.rows_seen = position + len(ids)
            if sample.rows_seen == len(sample.input_ids):
                del self._open[sample.input_ids.tobytes()]
        return runs

    def _continuation(
        self, sample: OpenSample, input_ids: np.ndarray, positions: np.ndarray, starts: list[int], stops: list[int]
    ) -> int | None:
        """The row at which a sample that was split goes on in this batch; None when it was not scheduled.

        It stands where the positions jump, or by chance right behind rows of another document that end at its position.
        """
        found: list[int] = []
        for start, stop in zip(starts, stops, strict=True):
            row = start + sample.rows_seen - int(positions[start])
            if not start <= row < stop:
                continue
            count = min(len(sample.input_ids) - sample.rows_seen, stop - row)
            agrees = np.array_equal(
                sample.input_ids[sample.rows_seen : sample.rows_seen + count], input_ids[row : row + count]
            )
            if agrees and (row == start or self._beginning(input_ids[start:row], int(positions[start])) is not None):
                found.append(row)
        found = [row for row in found if row in starts] or found
        if len(found) > 1:
            raise self._ambiguous(input_ids[found[0] :], sample.rows_seen)
        return found[0] if found else None

    def _beginning(self, ids: np.ndarray, position: int) -> OpenSample | None:
        """The sample not yet begun that these rows from `position` on are the beginning of."""
        if position:
            return None
        # The first one, also before a shorter one that is whole: engines start documents in the order of their arrival.
        for sample in self._open.values():
            if sample.rows_seen or len(sample.input_ids) < len(ids) or sample.input_ids[len(ids) - 1] != ids[-1]:
                continue
            if np.array_equal(sample.input_ids[: len(ids)], ids):
                return sample
        return None

    def _unknown(self, ids: np.ndarray, position: int) -> EngineError:
        return EngineError(
            f"capture: the engine computed {len(ids)} rows from position {position} on (token ids {ids[:6].tolist()}…) "
            f"that belong to none of the {len(self._open)} open samples; is another request in flight, or prefix "
            "caching on? Try hardware.engine_options.enable_prefix_caching=false"
        )

    def _ambiguous(self, ids: np.ndarray, position: int) -> EngineError:
        return EngineError(
            f"capture: rows from position {position} on (token ids {ids[:6].tolist()}…) fit several samples that were "
            "split; set hardware.batch_tokens to at least the longest sample, so that none is split"
        )
