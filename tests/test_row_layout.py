"""The layout of rows against a plain search over documents, slots and steps."""

from __future__ import annotations

import numpy as np
import torch

from eagle3.row_layout import KEY_BLOCK, lay_out
from eagle3.slots import pack_rows, supervised_slots

LENGTHS, STEPS = (150, 5, 90, 200), 4


def test_the_layout_says_what_a_search_finds() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 9, length) for length in LENGTHS]
    masks = [rng.random(length // 5 + 1).repeat(5)[:length] < 0.6 for length in LENGTHS]
    in_vocab = np.arange(9) != 4
    flags = [supervised_slots(i, mask, STEPS, in_vocab) for i, mask in zip(ids, masks, strict=True)]
    rows = pack_rows(ids, flags, STEPS)
    bounds = np.cumsum((0, *LENGTHS))
    tokens = np.concatenate(ids)
    layout = lay_out(rows, torch.from_numpy(tokens), torch.from_numpy(bounds))

    supervised = np.concatenate(flags, axis=1)
    assert layout.counts == tuple(supervised.sum(1))
    stacked = torch.cat([layout.slots[:n] for n in layout.counts]).numpy()
    step_of = np.repeat(np.arange(STEPS), layout.counts)
    assert all(supervised[k, slot] for k, slot in zip(step_of, stacked, strict=True))
    assert len(set(zip(step_of, stacked, strict=True))) == len(stacked)

    pairs, teachers = layout.pairs.numpy(), layout.teachers.numpy()
    assert np.array_equal(stacked[pairs] + step_of[pairs] + 1, layout.teacher_tokens.numpy()[teachers])
    assert np.array_equal(layout.pair_bounds, np.searchsorted(teachers, np.arange(len(layout.teacher_tokens) + 1)))
    assert np.array_equal(layout.labels.numpy(), tokens[stacked[pairs] + step_of[pairs] + 2])
    assert np.array_equal(layout.steps_of.numpy(), step_of[pairs])
    in_order = pairs[layout.by_step.numpy()]
    expected = [(k, slot) for k in range(STEPS) for slot in np.flatnonzero(supervised[k])]
    assert list(zip(step_of[in_order], stacked[in_order], strict=True)) == expected
    assert np.array_equal(pairs[layout.pair_of_row.numpy()], np.arange(len(stacked)))

    document_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    seen = 0
    for k in range(STEPS):
        visible = layout.visible(k).numpy()
        slots = layout.slots[: layout.counts[k]].numpy()
        columns = np.arange(len(tokens))
        same = document_of[slots][:, None] == document_of[columns]
        assert np.array_equal(visible, same & (columns <= slots[:, None]))
        seen += visible.sum() + k * len(slots)
        ascending = layout.ascending(k).numpy()
        assert np.array_equal(slots[layout.order(k).numpy()], np.sort(slots))
        sees = (document_of[ascending][:, None] == document_of[columns]) & (columns <= ascending[:, None])
        for block, (first, full, last) in enumerate(layout.key_ranges(k).tolist()):
            part = sees[:, block * KEY_BLOCK : (block + 1) * KEY_BLOCK]
            assert np.array_equal(np.flatnonzero(part.any(1)), np.arange(first, last))
            assert part[full:last].all()
    assert layout.seen == seen
