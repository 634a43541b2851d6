"""Capture: resumes to the same bytes, counts add up, and stops where it should. Engines here are scripted."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3 import capture as capture_module
from eagle3.capture import Capture
from eagle3.engines import CapturedStates, EngineInfo
from eagle3.errors import RequestError, StageFailed, StoreError
from eagle3.shards import Layout, plan_shards
from eagle3.tokens import Sample
from tests.conftest import random_samples

LENGTHS = [5, 30, 12, 100, 64, 7, 9, 1]
LAYOUT = Layout(hidden_size=6, dtype="float32", final_id=4)


class ScriptedEngine:
    """An engine whose states are numbers of sample and layer; `spoil` may change them, `calls` says who came when."""

    def __init__(self, spoil: Callable[[CapturedStates], CapturedStates | None] = lambda caught: caught) -> None:
        self.spoil = spoil
        self.calls: list[tuple[list[str], list[int]]] = []

    def info(self) -> EngineInfo:
        return EngineInfo("scripted", "1.0", "None", "float32", "cpu", 4, 6, 400, {})

    def capture(self, samples: Sequence[Sample], layer_ids: Sequence[int]) -> Iterator[CapturedStates]:
        self.calls.append(([sample.id for sample in samples], list(layer_ids)))
        for sample in reversed(samples):
            rows = torch.as_tensor(sample.input_ids)[:, None].expand(-1, 6).float()
            caught = self.spoil(CapturedStates(sample.id, {k: rows + k / 8 for k in layer_ids}))
            if caught is not None:
                yield caught

    def generate(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *exception: object) -> None: ...


def capture_of(folder: Path, samples: Sequence[Sample], layer_ids: Sequence[int] = (1, 2, 4)) -> Capture:
    folder.mkdir(exist_ok=True)
    lengths, ids = [len(sample.input_ids) for sample in samples], [sample.id for sample in samples]
    plans = plan_shards(lengths, ids, LAYOUT.row_bytes, 110 * LAYOUT.row_bytes, None, 60)
    return Capture(folder, LAYOUT, plans, tuple(layer_ids), max_length=1024)


def captured(capture: Capture, samples: Sequence[Sample], engine: ScriptedEngine, max_failed: int = 0) -> list[int]:
    """Runs what is missing; returns the numbers of tokens that progress heard of."""
    heard: list[int] = []
    missing = capture.missing(unproven=capture.layer_ids)
    capture.run(engine, samples, missing, max_failed, lambda n: heard.append(int(n)))
    return heard


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def samples() -> list[Sample]:
    return random_samples(LENGTHS)


@pytest.fixture
def whole(tmp_path: Path, samples: list[Sample]) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    assert sum(captured(capture_of(tmp_path / "whole", samples), samples, ScriptedEngine())) == sum(LENGTHS)
    return contents(tmp_path / "whole")


def test_sizes_are_exact_before_anything_runs(tmp_path: Path, samples: list[Sample], whole: dict[str, bytes]):
    """S7: the estimate is within 2 % of the real bytes."""
    capture = capture_of(tmp_path / "new", samples)
    assert len(capture.plans) == 3
    assert capture.size_bytes() == pytest.approx(sum(len(data) for data in whole.values()), rel=0.02)
    assert capture.tokens() == sum(LENGTHS)


@pytest.mark.parametrize("place", ["0", "4", "header-mid", "body-mid", "last byte"])
@pytest.mark.parametrize("name", ["layer-002.safetensors", "final.safetensors", "index.safetensors"])
def test_a_torn_file_is_made_again_and_nothing_else(
    tmp_path: Path, samples: list[Sample], whole: dict[str, bytes], name: str, place: str
):
    """S1: truncated at 0, 4, in the header, in the body, before the last byte: detected, regenerated, equal bytes."""
    capture, engine = capture_of(tmp_path / "whole", samples), ScriptedEngine()
    path = tmp_path / "whole" / "shard-00001" / name
    data = path.read_bytes()
    kept = {"0": 0, "4": 4, "header-mid": 60, "body-mid": len(data) - 40, "last byte": len(data) - 1}[place]
    path.write_bytes(data[:kept])
    captured(capture, samples, engine)
    redone = [1, 2, 4] if name.startswith("index") else [2 if name.startswith("layer") else 4]
    assert [layer_ids for _, layer_ids in engine.calls] == [redone]
    assert set(engine.calls[0][0]) == set(capture.plans[1].sample_ids)
    assert contents(tmp_path / "whole") == whole


def test_a_damaged_row_is_made_again(tmp_path: Path, samples: list[Sample], whole: dict[str, bytes]):
    """S1: right size and header, one bit flipped: only the checksum tells."""
    capture, engine = capture_of(tmp_path / "whole", samples), ScriptedEngine()
    path = tmp_path / "whole" / "shard-00002" / "layer-001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert capture.missing() == {}
    assert capture.missing(unproven=[1]) == {2: [1]}
    assert [fault.rpartition("/")[2] for fault in capture.faults(capture.plans[2])] == [
        f"layer-001.safetensors: has damaged rows (checksum of sample {samples[7].id})"
    ]
    captured(capture, samples, engine)
    assert contents(tmp_path / "whole") == whole
    assert capture.faults(capture.plans[2]) == []


def test_what_a_killed_run_was_writing_is_cleaned_away(tmp_path: Path, samples: list[Sample], whole: dict[str, bytes]):
    """S1: only whole shards count; a .tmp folder is removed and its shard made again."""
    folder = tmp_path / "whole"
    shutil.move(folder / "shard-00001", folder / "shard-00001.tmp")
    (folder / "shard-00009.tmp").mkdir()
    engine = ScriptedEngine()
    captured(capture_of(folder, samples), samples, engine)
    assert len(engine.calls) == 1
    assert contents(folder) == whole
    assert not list(folder.glob("*.tmp"))


def test_layers_are_added_beside_the_old_ones(tmp_path: Path, samples: list[Sample]):
    """A request for more layers runs the target for the missing ids alone; the rest keeps its bytes."""
    folder = tmp_path / "states"
    captured(capture_of(folder, samples, (1, 4)), samples, ScriptedEngine())
    before = contents(folder)
    engine = ScriptedEngine()
    captured(capture_of(folder, samples, (1, 2, 3, 4)), samples, engine)
    assert {tuple(layer_ids) for _, layer_ids in engine.calls} == {(2, 3)}
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert {name for name in after if name not in before} == {
        f"shard-0000{i}/layer-00{k}.safetensors" for i in range(3) for k in (2, 3)
    }


def test_leftover_layers_of_another_selection_are_dropped(tmp_path: Path, samples: list[Sample]):
    capture = capture_of(tmp_path / "states", samples, (1, 2, 3, 4))
    captured(capture, samples, ScriptedEngine())
    fewer = capture_of(tmp_path / "states", samples, (1, 4))
    fewer.drop_other_layers()
    assert fewer.missing(unproven=(1, 4)) == {}
    assert len(contents(tmp_path / "states")) == 3 * 3


def spoiled(sample_ids: Sequence[str], value: float = float("nan")) -> Callable[[CapturedStates], CapturedStates]:
    def spoil(caught: CapturedStates) -> CapturedStates:
        if caught.sample_id in sample_ids:
            caught.states[max(caught.states)][-1, 3] = value
        return caught

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_rejected_and_counted(tmp_path: Path, samples: list[Sample], value: float):
    """E13: no such number reaches a file, and counts add up: samples = stored + rejected per reason."""
    capture = capture_of(tmp_path / "states", samples)
    engine = ScriptedEngine(spoiled([samples[1].id, samples[4].id], value))
    count = capture.run(engine, samples, capture.missing(), 2, lambda n: None)
    stored, tokens, rejected = capture.kept()
    assert rejected == {samples[1].id: "non_finite", samples[4].id: "non_finite"}
    assert stored + len(rejected) == len(samples)
    assert tokens == count.tokens == sum(LENGTHS) - 30 - 64
    assert dict(count.rejected) == {"non_finite": 2}
    assert capture.missing(unproven=capture.layer_ids) == {}


def test_short_states_are_rejected_not_saved(tmp_path: Path, samples: list[Sample]):
    """E2: an engine that lost rows of a sample."""

    def cut(caught: CapturedStates) -> CapturedStates:
        if caught.sample_id == samples[3].id:
            return CapturedStates(caught.sample_id, {k: state[5:] for k, state in caught.states.items()})
        return caught

    capture = capture_of(tmp_path / "states", samples)
    capture.run(ScriptedEngine(cut), samples, capture.missing(), 1, lambda n: None)
    assert capture.kept()[2] == {samples[3].id: "wrong_shape"}


def test_a_sample_longer_than_the_model_never_reaches_the_engine(tmp_path: Path, samples: list[Sample]):
    """E11: skipped with its reason, not tried."""
    capture = Capture(tmp_path, LAYOUT, capture_of(tmp_path, samples).plans, (1, 4), max_length=64)
    engine = ScriptedEngine()
    heard: list[int] = []
    capture.run(engine, samples, capture.missing(), 1, lambda n: heard.append(int(n)))
    assert capture.kept()[2] == {samples[3].id: "longer_than_model"}
    assert samples[3].id not in [sample_id for ids, _ in engine.calls for sample_id in ids]
    assert sum(heard) == sum(LENGTHS)


def test_too_many_lost_samples_stop_the_run(tmp_path: Path, samples: list[Sample]):
    """E9: above the limit the run fails at once; what was complete stays, and a higher limit goes on from there."""
    capture = capture_of(tmp_path / "states", samples)
    engine = ScriptedEngine(spoiled([samples[1].id, samples[4].id]))
    with pytest.raises(StageFailed, match=r"^store\.max_failed_fraction: 2 samples .*non_finite 2.*allowed are 1"):
        capture.run(engine, samples, capture.missing(), 1, lambda n: None)
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == [
        "shard-00000",
        "shard-00001",
        "shard-00002.tmp",
    ]
    again = ScriptedEngine(spoiled([samples[4].id]))
    captured(capture, samples, again, max_failed=2)
    assert len(again.calls) == 1
    assert set(capture.kept()[2]) == {samples[1].id, samples[4].id}


def test_samples_rejected_earlier_count_against_the_limit(tmp_path: Path, samples: list[Sample]):
    capture = capture_of(tmp_path / "states", samples)
    captured(capture, samples, ScriptedEngine(spoiled([samples[1].id])), max_failed=1)
    shutil.rmtree(tmp_path / "states" / "shard-00002")
    with pytest.raises(StageFailed, match="2 samples"):
        captured(capture, samples, ScriptedEngine(spoiled([samples[4].id])), max_failed=1)


def test_a_rejected_sample_stays_a_hole_when_layers_join(tmp_path: Path, samples: list[Sample]):
    folder, engine = tmp_path / "states", ScriptedEngine()
    captured(capture_of(folder, samples, (1, 4)), samples, ScriptedEngine(spoiled([samples[1].id])), max_failed=1)
    capture = capture_of(folder, samples, (1, 2, 4))
    captured(capture, samples, engine, max_failed=1)
    assert samples[1].id not in engine.calls[0][0]
    assert capture.kept()[2] == {samples[1].id: "non_finite"}
    assert capture.missing(unproven=(1, 2, 4)) == {}


def test_a_stored_sample_that_now_comes_out_broken_is_another_target(tmp_path: Path, samples: list[Sample]):
    folder = tmp_path / "states"
    captured(capture_of(folder, samples, (1, 4)), samples, ScriptedEngine())
    with pytest.raises(StoreError, match=f"sample {samples[1].id} came out non_finite now"):
        captured(capture_of(folder, samples, (1, 2, 4)), samples, ScriptedEngine(spoiled([samples[1].id])), 5)


def test_a_sample_that_the_engine_swallows_is_an_error(tmp_path: Path, samples: list[Sample]):
    engine = ScriptedEngine(lambda caught: None if caught.sample_id == samples[0].id else caught)
    with pytest.raises(StoreError, match=f"1 samples were never captured, first {samples[0].id}"):
        captured(capture_of(tmp_path / "states", samples), samples, engine)


def test_a_changed_engine_version_warns(tmp_path: Path, samples: list[Sample], caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "states"
    captured(capture_of(folder, samples, (1, 4)), samples, ScriptedEngine())
    engine = ScriptedEngine()
    engine.info = lambda: EngineInfo("scripted", "2.0", "None", "float32", "cpu", 4, 6, 400, {})
    captured(capture_of(folder, samples, (1, 2, 4)), samples, engine)
    assert "shard-00000: was made by scripted 1.0, its new layers come from scripted 2.0" in caplog.messages


def test_no_room_on_the_disk(tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch):
    """S7: refused before any engine starts, with both numbers; what is there already needs no room."""
    usage = namedtuple("usage", "total used free")
    capture = capture_of(tmp_path / "states", samples)
    needed = capture.size_bytes()
    monkeypatch.setattr(capture_module.shutil, "disk_usage", lambda path: usage(0, 0, needed))
    capture.check_space(capture.missing(), margin=0.0)
    with pytest.raises(RequestError, match=r"extraction will write .*B .*, but only .*B are free"):
        capture.check_space(capture.missing(), margin=0.05)
    captured(capture, samples, ScriptedEngine())
    capture.check_space(capture.missing(), margin=0.05)
