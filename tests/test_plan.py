"""The plan of batches: whole documents, each once an epoch, equal ranks, the same whenever it is asked."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3.plan import Plan, plan_epoch, plan_once


def uneven(count: int, seed: int = 0, longest: int = 2000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(5.0, 1.2, count), 3, longest).astype(np.int64)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 7, 400, 3000])
def test_each_document_once_an_epoch_and_equal_ranks(ranks: int, count: int) -> None:
    """T10: equal batch counts, each sample once; with enough data, token totals of the ranks within 5 %."""
    lengths = uneven(count)
    steps = plan_epoch(lengths, 4096, ranks, np.random.default_rng(0))
    assert all(len(step) == ranks for step in steps)
    seen = np.concatenate([batch for step in steps for batch in step])
    assert np.array_equal(np.sort(seen), np.arange(count))
    totals = [sum(int(lengths[step[rank]].sum()) for step in steps) for rank in range(ranks)]
    loads = [int(lengths[batch].sum()) for step in steps for batch in step]
    assert max(loads) <= 4096
    if count >= 400:
        assert max(totals) <= 1.05 * min(totals)
        assert np.mean(loads) > 0.85 * 4096
    if count >= 3000:
        within = [[int(lengths[batch].sum()) for batch in step] for step in steps]
        assert np.mean([min(loads) / max(loads) for loads in within]) > 0.97


def test_a_longer_document_gets_a_batch_of_its_own() -> None:
    lengths = np.array([50, 5000, 60, 4000, 70])
    for step in plan_epoch(lengths, 1000, 1, np.random.default_rng(0)):
        for batch in step:
            assert len(batch) == 1 or lengths[batch].sum() <= 1000


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batch_tokens", [20, 512, 2048, 4096])
@pytest.mark.parametrize("shortest", [3, 600, 4000])
def test_no_step_is_empty_however_long_the_documents_are(ranks: int, batch_tokens: int, shortest: int) -> None:
    """Documents longer than a batch took as many batches as their tokens fill, of which all but one were empty."""
    lengths = np.maximum(uneven(101, longest=6000), shortest)
    plan = Plan(lengths, batch_tokens, ranks)
    steps = [[len(batch) for batch in plan.documents(i)] for i in range(plan.batches)]
    assert sum(map(sum, steps)) == 101
    assert all(sum(step) > 0 for step in steps)
    windows = max(1, 101 // (16 * ranks))
    assert sum(step.count(0) for step in steps) <= windows * (ranks - 1)
    assert all(sum(map(len, batches)) > 0 for batches in zip(*plan_once(lengths, batch_tokens, ranks), strict=True))


def test_companions_change_from_epoch_to_epoch() -> None:
    plan = Plan(uneven(2000), 2048, epochs=2, seed=3)
    half = plan.batches // 2
    first = {frozenset(batch.tolist()) for i in range(half) for batch in plan.documents(i)}
    second = {frozenset(batch.tolist()) for i in range(half, plan.batches) for batch in plan.documents(i)}
    assert len(first & second) < 0.05 * len(first)


def test_plan_is_the_same_whenever_and_wherever_it_is_made() -> None:
    """T14: a resumed run reads on at the same batch; asking for an old epoch again gives it again."""
    lengths = uneven(300)
    plan, again = Plan(lengths, 1024, 2, 7, epochs=4), Plan(lengths, 1024, 2, 7, epochs=9)
    for i in [*range(plan.batches), 0, 5]:
        for mine, theirs in zip(plan.documents(i), again.documents(i), strict=True):
            assert np.array_equal(mine, theirs)
    other = Plan(lengths, 1024, 2, 8, epochs=4)
    assert not all(np.array_equal(a, b) for a, b in zip(plan.documents(0), other.documents(0), strict=True))


def test_positions_and_steps() -> None:
    plan = Plan(np.full(10, 100), 200, epochs=2, accumulate=4)
    assert (plan.batches, plan.steps) == (10, 3)
    assert [(p.epoch, p.batch, p.batches) for p in map(plan.position, (0, 4, 5, 9))] == [
        (0, 0, 5),
        (0, 4, 5),
        (1, 0, 5),
        (1, 4, 5),
    ]
    # The second optimizer step spans both epochs, the last one has two batches.
    assert len(plan.step_documents(5)) == 8
    assert np.array_equal(plan.step_documents(4), plan.step_documents(7))
    assert len(plan.step_documents(9)) == 4


def test_max_steps_ends_the_plan_there() -> None:
    lengths = uneven(200)
    assert Plan(lengths, 1024, epochs=1000, accumulate=3, max_steps=5).batches == 15
    short = Plan(lengths, 10**6, epochs=2, accumulate=1, max_steps=50)
    assert (short.batches, short.steps) == (2, 2)


def test_validation_batches_are_fixed_and_equally_many_on_each_rank() -> None:
    lengths = uneven(50)
    for ranks in (1, 4):
        batches = plan_once(lengths, 1024, ranks)
        assert len({len(rank) for rank in batches}) == 1
        assert np.array_equal(np.sort(np.concatenate([b for rank in batches for b in rank])), np.arange(50))
    assert plan_once(lengths[:0], 1024, 2) == [[], []]
