"""The bigram baseline against a dictionary of counters."""

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

import eagle3.bigram
from eagle3.bigram import BigramChain, count_successors
from eagle3.errors import StoreError

V = 50


def make_samples(count=40, seed=0):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 60, count)
    return [
        SimpleNamespace(
            input_ids=(generator.geometric(0.15, n) % V).astype(np.int32), loss_mask=generator.random(n) < 0.6
        )
        for n in lengths
    ]


def reference(samples):
    following, overall = defaultdict(Counter), Counter()
    for sample in samples:
        for t in range(1, len(sample.input_ids)):
            if sample.loss_mask[t]:
                following[int(sample.input_ids[t - 1])][int(sample.input_ids[t])] += 1
                overall[int(sample.input_ids[t])] += 1

    def best(counter):
        return min(counter, key=lambda token: (-counter[token], token))

    return [best(following[token]) if following[token] else best(overall) for token in range(V)]


def test_successors_equal_a_dictionary_of_counters():
    samples = make_samples()
    assert count_successors(samples, V).tolist() == reference(samples)


def test_counting_in_small_pieces_changes_nothing(monkeypatch):
    samples = make_samples(seed=1)
    monkeypatch.setattr(eagle3.bigram, "_PAIRS_IN_MEMORY", 7)
    assert count_successors(samples, V).tolist() == reference(samples)


def test_chain_follows_its_own_drafts():
    successors = np.arange(1, V + 1) % V
    successors[5] = 9
    chain = BigramChain(successors)
    chain.start()
    assert chain.propose([30, 3], None, 4) == [4, 5, 9, 10]


def test_no_supervised_token_is_an_error():
    sample = SimpleNamespace(input_ids=np.array([1, 2, 3], np.int32), loss_mask=np.zeros(3, bool))
    with pytest.raises(StoreError, match="no supervised token"):
        count_successors([sample], V)
