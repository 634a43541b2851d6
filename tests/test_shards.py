"""Shard plans, layer files and the writer: exact sizes, any order of writing, complete or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from torch import Tensor

from eagle3 import shards
from eagle3.errors import RequestError, StageFailed, StoreError
from eagle3.shard_index import INDEX_NAME, ShardIndex, index_bytes
from eagle3.shards import Layout, ShardPlan, ShardWriter, check_layer_file, plan_shards, shards_at
from eagle3.tokens import Sample
from tests.conftest import random_samples

ENGINE = {"name": "transformers", "version": "5", "dtype": "float32"}
LAYOUT = Layout(hidden_size=6, dtype="bfloat16", final_id=4)
LAYERS = (1, 2, 4)


def plan_of(samples: Sequence[Sample]) -> ShardPlan:
    lengths = [len(sample.input_ids) for sample in samples]
    return shards_at([0], lengths, [sample.id for sample in samples])[0]


def states_of(sample: Sample, layout: Layout = LAYOUT) -> dict[int, Tensor]:
    """States that tell sample and layer; float32, as an engine hands them out."""
    generator = torch.Generator().manual_seed(int(sample.input_ids[0]))
    return {k: torch.randn(len(sample.input_ids), layout.hidden_size, generator=generator) + k for k in LAYERS}


def write_shard(
    folder: Path, samples: Sequence[Sample], layout: Layout = LAYOUT, layers: Sequence[int] = LAYERS
) -> Path:
    plan = plan_of(samples)
    with ShardWriter(folder, layout, plan, layers) as writer:
        for sample in reversed(samples):
            writer.write(sample.id, states_of(sample, layout))
        writer.close(samples, ENGINE)
    return folder / plan.name


def test_plan_keeps_order_and_both_limits():
    lengths, ids = [10, 20, 30, 5, 100, 1], list("abcdef")
    by_bytes = plan_shards(lengths, ids, 8, 8 * 35, None, 60)
    assert [plan.rows for plan in by_bytes] == [(0, 1), (2, 3), (4,), (5,)]
    assert by_bytes[1].starts == (0, 30)
    assert (by_bytes[1].tokens, by_bytes[1].name, by_bytes[1].sample_ids) == (35, "shard-00001", ("c", "d"))
    by_time = plan_shards(lengths, ids, 8, 10**9, tokens_per_s=3.0, shard_seconds=10.0)
    assert [plan.rows for plan in by_time] == [(0, 1), (2,), (3,), (4,), (5,)]
    assert shards_at([plan.rows[0] for plan in by_time], lengths, ids) == by_time


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_files_are_safetensors_of_exactly_the_planned_size(tmp_path: Path, dtype: str):
    """S4: slices of one batch tensor are stored as their own rows and nothing else; any reader loads them."""
    layout, samples = Layout(6, dtype, 4), random_samples([3, 1, 7])
    plan = plan_of(samples)
    batch = torch.randn(3, 9, 6, generator=torch.Generator().manual_seed(0))
    with ShardWriter(tmp_path, layout, plan, LAYERS) as writer:
        for row, sample in enumerate(samples):
            rows = batch[row, : len(sample.input_ids)]
            # A view with gaps as well: the first half of the columns of a wider tensor.
            writer.write(sample.id, {1: rows, 2: torch.cat([rows, rows], 1)[:, :6], 4: rows.t().contiguous().t()})
        writer.close(samples, ENGINE)
    expected = torch.cat([batch[row, : len(sample.input_ids)] for row, sample in enumerate(samples)])
    for k in LAYERS:
        path = tmp_path / plan.name / layout.file_name(k)
        assert path.stat().st_size == layout.file_bytes(plan, k) == os.path.getsize(path)
        with safetensors.safe_open(path, framework="pt") as file:
            assert torch.equal(file.get_tensor("hidden_states"), expected.to(layout.torch_dtype))
            assert file.metadata()["layer_id"] == str(k)
        assert check_layer_file(path, layout, plan, k, checksums=True) is None
    assert {path.name for path in (tmp_path / plan.name).iterdir()} == {
        "layer-001.safetensors",
        "layer-002.safetensors",
        "final.safetensors",
        INDEX_NAME,
    }


def test_nothing_has_its_name_before_it_is_whole(tmp_path: Path):
    """S1: the final name appears with the last byte; a writer that is left leaves only a .tmp folder."""
    samples = random_samples([3, 4])
    with ShardWriter(tmp_path, LAYOUT, plan_of(samples), LAYERS) as writer:
        writer.write(samples[0].id, states_of(samples[0]))
        assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.tmp"]
        with pytest.raises(StoreError, match=f"1 samples were never captured, first {samples[1].id}"):
            writer.close(samples, ENGINE)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.tmp"]
    write_shard(tmp_path, samples)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000"]


def test_a_rejected_sample_is_a_hole_that_the_index_leaves_out(tmp_path: Path):
    samples = random_samples([3, 4, 2])
    plan = plan_of(samples)
    with ShardWriter(tmp_path, LAYOUT, plan, LAYERS) as writer:
        for sample in (samples[0], samples[2]):
            writer.write(sample.id, states_of(sample))
        writer.reject(samples[1].id, "non_finite")
        writer.close(samples, ENGINE)
    index = ShardIndex.read(tmp_path / plan.name / INDEX_NAME)
    assert index.sample_ids == (samples[0].id, samples[2].id)
    assert index.rejected == {samples[1].id: "non_finite"}
    assert (index.rows.tolist(), index.members.tolist()) == ([0, 2], [0, 2])
    assert (index.starts.tolist(), index.lengths.tolist(), index.offsets.tolist()) == ([0, 7], [3, 2], [0, 3])
    assert index.input_ids.tolist() == [*samples[0].input_ids, *samples[2].input_ids]
    assert index.loss_mask.tolist() == [*samples[0].loss_mask, *samples[2].loss_mask]
    assert index.engine == ENGINE
    for k in LAYERS:
        path = tmp_path / plan.name / LAYOUT.file_name(k)
        assert check_layer_file(path, LAYOUT, plan, k, checksums=True) is None


def test_an_index_of_rejected_samples_only(tmp_path: Path):
    samples = random_samples([3])
    with ShardWriter(tmp_path, LAYOUT, plan_of(samples), LAYERS) as writer:
        writer.reject(samples[0].id, "longer_than_model")
        writer.close(samples, ENGINE)
    assert ShardIndex.read(tmp_path / "shard-00000" / INDEX_NAME).sample_ids == ()


def test_layers_join_a_shard_without_touching_what_is_there(tmp_path: Path):
    samples = random_samples([3, 4])
    folder = write_shard(tmp_path, samples, layers=(1, 4))
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    write_shard(tmp_path, samples, layers=(2,))
    after = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    assert set(after) - set(before) == {"layer-002.safetensors"}
    assert {name: after[name] for name in before} == before
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000"]


@pytest.mark.parametrize("place", ["0", "4", "header-mid", "body-mid", "last byte"])
@pytest.mark.parametrize("name", ["layer-001.safetensors", "final.safetensors"])
def test_truncation_is_seen(tmp_path: Path, name: str, place: str):
    """S1: wherever a file ends early, its size alone tells."""
    samples = random_samples([30, 40])
    path = write_shard(tmp_path, samples) / name
    data = path.read_bytes()
    kept = {"0": 0, "4": 4, "header-mid": 100, "body-mid": len(data) - 200, "last byte": len(data) - 1}[place]
    path.write_bytes(data[:kept])
    layer_id = 4 if name.startswith("final") else 1
    problem = check_layer_file(path, LAYOUT, plan_of(samples), layer_id, checksums=False)
    assert problem == f"has {kept} bytes, expected {len(data)}"


def test_damage_is_seen_by_header_and_checksum(tmp_path: Path):
    samples = random_samples([30, 40])
    plan = plan_of(samples)
    path = write_shard(tmp_path, samples) / "layer-001.safetensors"
    good = path.read_bytes()

    def problem_of(position: int) -> str | None:
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        return check_layer_file(path, LAYOUT, plan, 1, checksums=True)

    assert problem_of(20) == "has another header than planned"
    assert problem_of(len(good) - 5) == f"has damaged rows (checksum of sample {samples[1].id})"
    first_row = len(LAYOUT.header(plan, 1)) + 16
    assert problem_of(first_row) == f"has damaged rows (checksum of sample {samples[0].id})"
    assert problem_of(len(LAYOUT.header(plan, 1))) == f"has damaged rows (checksum of sample {samples[0].id})"
    path.unlink()
    assert check_layer_file(path, LAYOUT, plan, 1, checksums=True) == "is absent"


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_a_torn_index_is_no_index(tmp_path: Path, kept: int):
    path = write_shard(tmp_path, random_samples([30, 40])) / INDEX_NAME
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StoreError, match=r"index\.safetensors: cannot be read .*stage=extract"):
        ShardIndex.read(path)


def test_a_flipped_bit_in_the_index_is_seen(tmp_path: Path):
    path = write_shard(tmp_path, random_samples([30, 40])) / INDEX_NAME
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(StoreError, match="its checksum does not hold"):
        ShardIndex.read(path)


def test_index_bytes_are_foreseen(tmp_path: Path):
    samples = random_samples(list(np.random.default_rng(0).integers(20, 200, 50)))
    path = write_shard(tmp_path, samples) / INDEX_NAME
    assert index_bytes(plan_of(samples)) == pytest.approx(path.stat().st_size, rel=0.02)


def test_a_short_row_never_reaches_a_file(tmp_path: Path):
    """E2: states with fewer rows than tokens are an error of the engine."""
    (sample,) = random_samples([5])
    with ShardWriter(tmp_path, LAYOUT, plan_of([sample]), LAYERS) as writer:
        short = {k: state[:-1] for k, state in states_of(sample).items()}
        with pytest.raises(StoreError, match=rf"sample {sample.id} came with states \(4, 6\), expected \(5, 6\)"):
            writer.write(sample.id, short)


def test_a_full_disk_is_a_clean_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """S7: exit 1 with what to do; complete shards stay."""
    samples = random_samples([3])

    def full(handle: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ShardWriter(tmp_path, LAYOUT, plan_of(samples), LAYERS) as writer:
        monkeypatch.setattr(shards.os, "pwrite", full)
        with pytest.raises(StageFailed, match=r"the disk is full \(No space left on device.*run the same command"):
            writer.write(samples[0].id, states_of(samples[0]))


def test_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A write may take less than it was given; what is missing is written next."""
    samples, whole = random_samples([3, 5]), os.pwrite
    expected = write_shard(tmp_path / "whole", samples)
    monkeypatch.setattr(shards.os, "pwrite", lambda handle, data, offset: whole(handle, data[:7], offset))
    found = write_shard(tmp_path / "parts", samples)
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes()


def test_an_unwritable_folder_is_a_wrong_request(tmp_path: Path):
    """E9: stopped at the first touch, exit 2. (A file stands where the folder should be: root may write anywhere.)"""
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot be written .*output_dir"):
        ShardWriter(tmp_path / "file", LAYOUT, plan_of(random_samples([3])), LAYERS)


def test_unknown_dtype():
    with pytest.raises(RequestError, match=r"^store\.dtype: found 'int8', expected one of \['bfloat16', 'float32'\]"):
        _ = Layout(6, "int8", 4).torch_dtype
