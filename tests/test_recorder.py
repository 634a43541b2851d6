"""Rows of simulated engine batches end up in a shard's files, written by one or several ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3.engines.recorder import Recorder, finite_rows, share
from eagle3.engines.vllm_capture import ShardProgress, ShardWork
from eagle3.errors import StoreError
from eagle3.shards import Layout, ShardPlan, ShardWriter, check_layer_file
from eagle3.tokens import Sample

HIDDEN, LAYERS = 6, (0, 2, 5)
LAYOUT = Layout(HIDDEN, "float32", LAYERS[-1])


def make_samples(lengths: Sequence[int]) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(f"s{i}", random.integers(0, 99, n).astype(np.int32), np.ones(n, dtype=bool), "train", f"k{i}")
        for i, n in enumerate(lengths)
    ]


def make_plan(samples: Sequence[Sample]) -> ShardPlan:
    lengths = tuple(len(sample.input_ids) for sample in samples)
    return ShardPlan(0, tuple(range(len(samples))), tuple(sample.id for sample in samples), lengths)


def states_of(layer: int, input_ids: np.ndarray, positions: np.ndarray, hidden: int = HIDDEN) -> torch.Tensor:
    """States that tell layer, token and position: [T, H]."""
    base = torch.from_numpy(input_ids * 1000.0 + positions).float()[:, None]
    return base + 1e6 * layer + torch.arange(hidden) / 10


def start_ranks(writer: ShardWriter, samples: Sequence[Sample], world: int, **settings: Any) -> list[Recorder]:
    plan = writer.plan
    shard = {
        "key": "shard",
        "files": {str(k): [str(file.path), file.data_offset] for k, file in writer.files.items()},
        "members": list(range(len(samples))),
        "lengths": list(plan.lengths),
        "first_rows": list(plan.starts),
        "input_ids": np.concatenate([sample.input_ids for sample in samples]).tobytes(),
    }
    ranks = []
    for rank in range(world):
        ranks.append(
            Recorder(
                list(LAYERS),
                batch_rows=64,
                hidden_size=writer.layout.hidden_size,
                dtype=torch.float32,
                device=torch.device("cpu"),
                rank=rank,
                world=world,
                **settings,
            )
        )
        ranks[-1].open(shard)
    return ranks


def forward(ranks: Sequence[Recorder], chunks: Sequence[tuple[Sample, int, int]], spoil: int | None = None) -> None:
    """One batch through all ranks, which hold equal states; `spoil` makes one of its rows infinite in layer 2."""
    input_ids = np.concatenate([s.input_ids[first:last] for s, first, last in chunks]).astype(np.int64)
    positions = np.concatenate([np.arange(first, last) for _, first, last in chunks])
    for recorder in ranks:
        recorder.begin(torch.from_numpy(input_ids), torch.from_numpy(positions))
        for number, layer in enumerate(LAYERS):
            states = states_of(layer, input_ids, positions, recorder.row_bytes // 4)
            if spoil is not None and layer == 2:
                states[spoil, 3] = torch.inf
            if wanted := recorder.wanted(number):
                recorder.keep(number, states[wanted[0] : wanted[1]])
        recorder.end()


def settle(writer: ShardWriter, samples: Sequence[Sample], ranks: Sequence[Recorder]) -> list[dict[str, Any]]:
    """Closes the ranks and accepts what they wrote."""
    for recorder in ranks:
        recorder.close()
    answers = [recorder.poll() for recorder in ranks]
    progress = ShardProgress(ShardWork(writer, samples), list(range(len(samples))))
    for rank, answer in enumerate(answers):
        assert answer["failure"] is None
        (progress.reports[rank],) = answer["finished"]
    progress.settle()
    return answers


def test_share_cuts_rows_times_layers_evenly() -> None:
    for world in range(1, 9):
        for layers in range(1, 6):
            for rows in (0, 1, 7, 64):
                parts = [share(rank, world, layers, rows) for rank in range(world)]
                for layer in range(layers):
                    covered = [row for part in parts for row in range(*part[layer])]
                    assert covered == list(range(rows))
                sizes = [sum(last - first for first, last in part) for part in parts]
                assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("world", "hidden"), [(1, HIDDEN), (2, HIDDEN), (3, HIDDEN), (8, HIDDEN), (2, 128)])
def test_ranks_fill_a_shard_together(tmp_path: Path, world: int, hidden: int) -> None:
    """E1: mixed, split and reordered documents; every row of every layer lies where the plan says, sums included.

    128 numbers are a whole sector of a disk, which is written directly.
    """
    layout = Layout(hidden, "float32", LAYERS[-1])
    samples = make_samples([5, 17, 1, 30, 8])
    a, b, c, d, e = samples
    plan = make_plan(samples)
    with ShardWriter(tmp_path, layout, plan, LAYERS) as writer:
        ranks = start_ranks(writer, samples, world)
        forward(ranks, [(b, 0, 10), (a, 0, 5)])
        forward(ranks, [(c, 0, 1), (b, 10, 17), (d, 0, 3)])
        forward(ranks, [(d, 3, 30), (e, 0, 8)])
        answers = settle(writer, samples, ranks)
        writer.close(samples, {"name": "simulated"})
    assert sum(answer["bytes"] for answer in answers) == plan.tokens * hidden * 4 * len(LAYERS)
    for layer in LAYERS:
        path = tmp_path / plan.name / layout.file_name(layer)
        assert check_layer_file(path, layout, plan, layer, checksums=True) is None
        stored = torch.from_numpy(np.fromfile(path, np.float32)[-plan.tokens * hidden :].reshape(-1, hidden))
        for sample, start in zip(samples, plan.starts, strict=True):
            expected = states_of(layer, sample.input_ids.astype(np.int64), np.arange(len(sample.input_ids)), hidden)
            assert torch.equal(stored[start : start + len(sample.input_ids)], expected)


def test_a_state_that_is_not_finite_rejects_its_sample_alone(tmp_path: Path) -> None:
    """E13."""
    samples = make_samples([4, 6, 5])
    with ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS) as writer:
        ranks = start_ranks(writer, samples, 2)
        forward(ranks, [(sample, 0, len(sample.input_ids)) for sample in samples], spoil=7)
        settle(writer, samples, ranks)
        assert writer.rejected == {"s1": "non_finite"}
        assert writer.written == {"s0", "s2"}
        assert all(not file.read(4, 6).any() for file in writer.files.values())
        writer.close(samples, {"name": "simulated"})
    for layer in LAYERS:
        path = tmp_path / "shard-00000" / LAYOUT.file_name(layer)
        assert check_layer_file(path, LAYOUT, make_plan(samples), layer, checksums=True) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_with_any_number_that_is_not_finite_are_told(dtype: torch.dtype) -> None:
    """The rest of the row may hold the largest numbers that states have (massive activations) and both infinities."""
    states = torch.full((6, 7168), 6e4).to(dtype)
    for row, spoilt in enumerate(([], [torch.inf], [-torch.inf], [torch.nan], [torch.inf, -torch.inf], [])):
        states[row, 5 : 5 + len(spoilt)] = torch.tensor(spoilt, dtype=dtype)
    assert finite_rows(states).tolist() == states.isfinite().all(-1).tolist() == [True, *[False] * 4, True]


def test_missing_rows_are_never_accepted(tmp_path: Path) -> None:
    samples = make_samples([4, 6])
    with ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS) as writer:
        ranks = start_ranks(writer, samples, 1)
        forward(ranks, [(sample, 0, len(sample.input_ids)) for sample in samples])
        ranks[0].close()
        (report,) = ranks[0].poll()["finished"]
        report["parts"] = [part for part in report["parts"] if part[:2] != [2, 1]]
        progress = ShardProgress(ShardWork(writer, samples), [0, 1], {0: report})
        with pytest.raises(StoreError, match="sample s1 has 0 of 6 rows of layer 2"):
            progress.settle()


def test_a_slow_disk_holds_the_model_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E10: the ring is all that is staged; the model waits, and the wait is measured."""
    samples = make_samples([10] * 6)
    slow = Recorder._write_rows

    def write_rows(self: Recorder, *arguments: Any) -> None:
        time.sleep(0.05)
        slow(self, *arguments)

    monkeypatch.setattr(Recorder, "_write_rows", write_rows)
    with ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS) as writer:
        ranks = start_ranks(writer, samples, 1, slots=2, writers=1)
        for sample in samples:
            forward(ranks, [(sample, 0, 10)])
        (answer,) = settle(writer, samples, ranks)
    assert answer["wait_s"] > 0.3
    assert answer["ring_bytes"] == 2 * len(LAYERS) * 64 * HIDDEN * 4


def test_a_failing_write_is_reported_and_never_blocks(tmp_path: Path) -> None:
    """The error has its number, so that a full disk is told from a bug; batches go on without being recorded."""
    samples = make_samples([5, 6, 7, 8, 9])
    with ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS) as writer:
        (recorder,) = start_ranks(writer, samples, 1, slots=2)
        writer.files[2].path.unlink()
        for sample in samples:
            forward([recorder], [(sample, 0, len(sample.input_ids))])
        recorder.close()
        failure = recorder.poll()["failure"]
    assert failure["message"].startswith("FileNotFoundError in a batch of 5 rows: [Errno 2]")
    assert failure["errno"] == 2
    assert "Traceback" in failure["traceback"]


def test_embeddings_instead_of_ids_are_an_error_that_names_the_setting(tmp_path: Path) -> None:
    samples = make_samples([5])
    with ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS) as writer:
        (recorder,) = start_ranks(writer, samples, 1)
        recorder.begin(None, torch.arange(5))
        assert "language_model_only=true" in recorder.poll()["failure"]["message"]
        recorder.close()


def test_forward_passes_without_open_shards_are_not_recorded() -> None:
    recorder = Recorder([0], batch_rows=8, hidden_size=HIDDEN, dtype=torch.float32, device=torch.device("cpu"))
    recorder.begin(torch.arange(4), torch.arange(4))
    assert recorder.wanted(0) is None
    recorder.end()
    recorder.close()
    assert recorder.poll()["rows"] == 0
