"""Rows of mixed, reordered and split batches reach the sample that they belong to, or are refused."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3.engines.matching import OpenSample, RowMatcher
from eagle3.errors import EngineError


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def opened(*samples: np.ndarray) -> tuple[RowMatcher, list[OpenSample]]:
    matcher, made = RowMatcher(), []
    for index, sample in enumerate(samples):
        made.append(OpenSample("s", index, sample, first_row=0))
        matcher.open(made[-1])
    return matcher, made


def batch(*chunks: tuple[np.ndarray, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """One batch out of (ids, start, stop) chunks."""
    return (
        np.concatenate([sample[start:stop] for sample, start, stop in chunks]),
        np.concatenate([np.arange(start, stop) for _, start, stop in chunks]),
    )


def test_random_schedules_give_every_row_to_its_sample() -> None:
    """E1, E2: any order, any split, shared beginnings: each sample gets each of its rows once, with its own ids."""
    random = np.random.default_rng(0)
    for _ in range(200):
        shared = random.integers(0, 3, 5)
        samples = {
            np.concatenate([shared, random.integers(0, 50, random.integers(1, 9))]).astype(np.int64).tobytes()
            for _ in range(6)
        }
        arrays = [np.frombuffer(sample, dtype=np.int64) for sample in sorted(samples)]
        matcher, made = opened(*arrays)
        seen = {index: np.zeros(len(sample), dtype=int) for index, sample in enumerate(arrays)}
        waiting, partial, start = list(range(len(arrays))), None, 0
        while waiting or partial is not None:
            budget, chunks = int(random.integers(3, 20)), []
            while budget and (waiting or partial is not None):
                current = waiting.pop(0) if partial is None else partial
                stop = min(len(arrays[current]), start + budget)
                chunks.append((arrays[current], start, stop))
                budget -= stop - start
                partial, start = (None, 0) if stop == len(arrays[current]) else (current, stop)
            random.shuffle(chunks)
            row_ids, positions = batch(*chunks)
            for run in matcher.match(row_ids, positions):
                rows = slice(run.sample_row, run.sample_row + run.count)
                np.testing.assert_array_equal(run.sample.input_ids[rows], row_ids[run.batch_row :][: run.count])
                seen[run.sample.index][rows] += 1
        assert all((rows == 1).all() for rows in seen.values())
        assert len(matcher) == 0
        assert [sample.rows_seen for sample in made] == [len(sample) for sample in arrays]


def test_a_whole_document_keeps_its_rows_beside_a_chunk_with_the_same_beginning() -> None:
    short, long = ids(5, 6, 7), ids(5, 6, 7, 8, 9)
    matcher, (second, _) = opened(long, short)
    runs = matcher.match(*batch((long, 0, 3), (short, 0, 3)))
    assert sorted((run.sample.index, run.count) for run in runs) == [(0, 3), (1, 3)]
    (rest,) = matcher.match(*batch((long, 3, 5)))
    assert rest.sample is second
    assert rest.sample_row == 3


def test_a_chunk_that_follows_on_from_another_document_by_chance_is_cut_there() -> None:
    first, second = ids(1, 2, 3), ids(4, 5, 6, 7, 8)
    matcher, _ = opened(first, second)
    matcher.match(*batch((second, 0, 3)))
    runs = matcher.match(*batch((first, 0, 3), (second, 3, 5)))
    assert [(run.sample.index, run.sample_row, run.batch_row, run.count) for run in runs] == [
        (0, 0, 0, 3),
        (1, 3, 3, 2),
    ]


def test_rows_of_nobody_are_refused() -> None:
    """E2: a cached prefix (rows from position 2 on, nothing before) is never taken for a sample."""
    matcher, _ = opened(ids(1, 2, 3, 4))
    with pytest.raises(EngineError, match=r"2 rows from position 2 .* none of the 1 open samples.*prefix caching"):
        matcher.match(ids(3, 4), np.array([2, 3]))


def test_rows_that_fit_two_different_histories_are_refused() -> None:
    matcher, _ = opened(ids(1, 2, 9, 9), ids(3, 4, 9, 9))
    matcher.match(ids(1, 2, 3, 4), np.array([0, 1, 0, 1]))
    with pytest.raises(EngineError, match=r"fit several samples .*batch_tokens"):
        matcher.match(ids(9), np.array([2]))


def test_the_same_prompt_is_not_opened_twice() -> None:
    matcher, _ = opened(ids(1, 2))
    with pytest.raises(EngineError, match="being captured already"):
        matcher.open(OpenSample("s", 1, ids(1, 2), 2))
