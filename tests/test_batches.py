"""Packed batches out of a store: what is in them, which batch a rank gets, and what reading them costs."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3.batches import PackedDataModule
from eagle3.errors import RequestError, StoreError
from eagle3.prepared import Prepared, PreparedWriter
from eagle3.shards import Layout, ShardWriter, shards_at
from eagle3.store import StatesStore
from eagle3.tokens import Sample, Tokens
from tests.conftest import random_samples
from tests.drafters import make_document, make_shape, pack

LAYERS, FINAL = (1, 3, 6), 6
LENGTHS = [5, 30, 12, 100, 64, 7, 9, 40, 33, 21]


def write_prepared(folder: Path, samples: Sequence[Sample], validation: Sequence[int] = ()) -> Prepared:
    folder.mkdir(parents=True)
    with PreparedWriter(folder) as writer:
        for sample in samples:
            writer.add(Tokens(sample.input_ids, sample.loss_mask), sample.key, sample.id.encode())
        writer.finish(0, 0, 400, [])
    chosen = np.zeros(len(samples), dtype=bool)
    chosen[list(validation)] = True
    np.save(folder / "validation.npy", chosen)
    manifest = {"metrics": {"samples": len(samples)}, "special_ids": [], "stop_ids": [2], "vocab_size": 400}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "tokenizer_hash": "x"}))
    return Prepared.open(folder)


def states_of(row: int, layer_id: int, length: int, width: int) -> torch.Tensor:
    """Each number says which row, layer and token it belongs to."""
    return (row + 0.1 * layer_id + 1000 * torch.arange(length)[:, None]).expand(length, width).contiguous().float()


def write_store(
    folder: Path, samples: Sequence[Sample], width: int = 8, rejected: Sequence[int] = (), sparse: bool = False
) -> StatesStore:
    plan = shards_at([0], [len(s.input_ids) for s in samples], [s.id for s in samples])[0]
    with ShardWriter(folder, Layout(width, "float32", FINAL), plan, LAYERS) as writer:
        for row, sample in enumerate(samples):
            if row in rejected:
                writer.reject(sample.id, "non-finite")
            elif sparse:
                writer.accept(sample.id, dict.fromkeys(LAYERS, 0))
            else:
                writer.write(sample.id, {i: states_of(row, i, len(sample.input_ids), width) for i in LAYERS})
        writer.close(samples, {"name": "none", "version": "0"})
    manifest = {"hidden_size": width, "dtype": "float32", "final_id": FINAL, "layer_ids": list(LAYERS)}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "shards": [{"name": plan.name}]}))
    return StatesStore.open(folder)


def make_data(tmp_path: Path, validation: Sequence[int] = (), **changes: Any) -> PackedDataModule:
    samples = random_samples(LENGTHS)
    options: dict[str, Any] = {
        "prepared": write_prepared(tmp_path / "prepared", samples, validation),
        "store": write_store(tmp_path / "states", samples, rejected=changes.pop("rejected", ())),
        "layer_ids": (1, 3),
        "in_draft_vocab": None,
        "unroll_steps": 3,
        "mask_alignment": "exact",
        "batch_tokens": 120,
        "epochs": 2,
    }
    return PackedDataModule(**{**options, **changes})


def test_a_batch_holds_whole_documents_with_their_own_states(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    batch = data.train_batch(0)
    rows = data.train_rows[data.plan.documents(0)[0]]
    assert batch.sample_ids == tuple(data.prepared.samples[int(row)].id for row in rows)
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum([LENGTHS[row] for row in rows])]
    assert batch.tokens == batch.cu_seqlens[-1] <= 120
    for number, row in enumerate(rows.tolist()):
        part = slice(int(batch.cu_seqlens[number]), int(batch.cu_seqlens[number + 1]))
        sample = data.prepared.samples[row]
        assert batch.input_ids[part].tolist() == sample.input_ids.tolist()
        assert batch.loss_mask[part].tolist() == sample.loss_mask.tolist()
        assert batch.position_ids[part].tolist() == list(range(LENGTHS[row]))
        assert torch.equal(batch.hidden_states[part, 0], states_of(row, 1, LENGTHS[row], 8))
        assert torch.equal(batch.hidden_states[part, 1], states_of(row, 3, LENGTHS[row], 8))
        assert torch.equal(batch.final_states[part], states_of(row, FINAL, LENGTHS[row], 8))


def test_row_counts_are_those_of_the_whole_optimizer_step(tmp_path: Path) -> None:
    whole = make_data(tmp_path / "a", ranks=2, accumulate=2, rank=0)
    second = make_data(tmp_path / "b", ranks=2, accumulate=2, rank=1)
    for step in range(whole.plan.steps):
        indices = range(2 * step, min(2 * step + 2, whole.plan.batches))
        batches = [data.train_batch(i) for data in (whole, second) for i in indices]
        counts = [[len(rows) for rows in batch.slots.supervised_rows] for batch in batches]
        for batch in batches:
            assert batch.row_counts.tolist() == np.sum(counts, axis=0).tolist()


def test_what_cannot_be_trained_on_is_counted(tmp_path: Path) -> None:
    samples = random_samples([2, 3, 40, 50])
    prepared = write_prepared(tmp_path / "prepared", samples)
    store = write_store(tmp_path / "states", samples, rejected=[2])
    data = PackedDataModule(prepared, store, (1,), None, 2, "exact", 100, 1)
    assert data.train_rows.tolist() == [1, 3]  # of 3 tokens the last 2 are supervised: one slot
    assert data.skipped == {"no states": 1, "no supervised slot": 1}


def test_t3_no_supervised_slot_at_all_is_refused_before_training(tmp_path: Path) -> None:
    samples = [dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in random_samples([9, 12])]
    prepared = write_prepared(tmp_path / "prepared", samples)
    with pytest.raises(RequestError, match=r"found no supervised slot in 2 training samples.*eagle3 stage=inspect"):
        PackedDataModule(prepared, write_store(tmp_path / "states", samples), (1,), None, 2, "exact", 100, 1)


def test_states_of_another_length_are_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    data.store.lengths[3] -= 1
    with pytest.raises(
        StoreError, match=rf"sample {data.prepared.samples[3].id} has 99 rows of states, expected its 100"
    ):
        [data.train_batch(index) for index in range(data.plan.batches)]


def test_a_sample_longer_than_a_batch_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = make_data(tmp_path, batch_tokens=50)
    assert "trainer.batch_tokens=50: 2 samples are longer (up to 100 tokens)" in caplog.text
    seen = [row for i in range(data.plan.batches) for row in data.plan.documents(i)[0].tolist()]
    assert sorted(seen) == sorted([*range(10)] * 2)


def test_loader_starts_where_training_stopped_and_counts_all(tmp_path: Path) -> None:
    """T14."""
    data = make_data(tmp_path)
    total = data.plan.batches
    everything = [batch.sample_ids for batch in data.train_dataloader()]
    assert len(everything) == total
    data.load_state_dict({"batches": 3})
    loader = data.train_dataloader()
    assert len(loader) == total
    assert [batch.sample_ids for batch in loader] == everything[3:]


def test_workers_read_the_same_batches(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    alone = [batch.hidden_states for batch in data.train_dataloader()]
    data.num_workers = 2
    together = [batch.hidden_states for batch in data.train_dataloader()]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_worker_that_dies_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: torch names only the shared memory."""
    data = make_data(tmp_path, num_workers=1)
    monkeypatch.setattr(data, "train_batch", lambda index: os.kill(os.getpid(), signal.SIGBUS))
    with pytest.raises(StoreError, match=r"died \(DataLoader worker.*SIGBUS.*/dev/shm.*trainer\.num_workers=0"):
        list(data.train_dataloader())


def test_validation_batches_are_each_ranks_share(tmp_path: Path) -> None:
    data = make_data(tmp_path, validation=[0, 4, 7])
    assert sorted(data.train_rows.tolist()) == [1, 2, 3, 5, 6, 8, 9]
    ids = [sample for batch in data.val_dataloader() for sample in batch.sample_ids]
    assert sorted(ids) == sorted(data.prepared.samples[row].id for row in (0, 4, 7))
    assert make_data(tmp_path / "none").val_dataloader() == []


def test_a_rank_without_documents_has_an_empty_batch(tmp_path: Path) -> None:
    """T9: fewer documents than ranks are left."""
    data = make_data(tmp_path, validation=[0], ranks=4, rank=3)
    lengths = [len(data.validation_batches())]
    assert lengths == [1]
    batches = [
        make_data(tmp_path / str(rank), validation=[0], ranks=4, rank=rank).val_dataloader() for rank in range(4)
    ]
    sizes = sorted(batch.tokens for loader in batches for batch in loader)
    assert sizes == [0, 0, 0, 5]
    for loader in batches:
        for batch in loader:
            assert batch.hidden_states.shape == (batch.tokens, 2, 8)
            assert batch.final_states.shape == (batch.tokens, 8)


def test_batches_move_as_a_whole() -> None:
    shape = make_shape()
    batch = pack([make_document(shape, [(2, 9)], 10, 1)], 3)
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.slots.labels.device.type == moved.slots.rows[2].device.type == "meta"
    assert moved.slots.kept[0] is None
    assert moved.slots.bounds is batch.slots.bounds
    assert moved.blocks == batch.blocks
    assert moved.sample_ids == batch.sample_ids


def test_anonymous_memory_does_not_grow_with_the_store(tmp_path: Path) -> None:
    """Every batch of a store of 20 MB and of one of 200 MB is read; the process keeps one batch of 3 MB or so."""

    def anonymous_bytes() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    growth = []
    for name, count in (("warm", 5), ("small", 30), ("large", 300)):
        samples = random_samples([100] * count, seed=count)
        prepared = write_prepared(tmp_path / name / "prepared", samples)
        store = write_store(tmp_path / name / "states", samples, width=550, sparse=True)
        data = PackedDataModule(prepared, store, (1, 3), None, 3, "exact", 500, 1)
        before = anonymous_bytes()
        total = sum(float(batch.hidden_states.sum()) for batch in data.train_dataloader())
        assert total == 0.0
        growth.append(anonymous_bytes() - before)
    assert growth[2] - growth[1] < 20e6
