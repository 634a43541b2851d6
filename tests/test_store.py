"""The store's reader: the rows that were written, bounded open files, and refusals that name the sample."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3 import store as store_module
from eagle3.checkpoint import open_target
from eagle3.errors import RequestError, StoreError
from eagle3.prepared import Prepared
from eagle3.shards import ShardWriter, shards_at
from eagle3.store import StatesStore
from eagle3.tokens import Sample, sample_id
from tests.conftest import random_samples, target_config, write_prepared
from tests.test_shards import ENGINE, LAYERS, LAYOUT, states_of

LENGTHS = [5, 30, 12, 100, 64, 7, 9, 1]


def write_store(
    folder: Path, samples: Sequence[Sample], first_rows: Sequence[int] = (0, 3, 6), **manifest: Any
) -> Path:
    plans = shards_at(first_rows, [len(sample.input_ids) for sample in samples], [sample.id for sample in samples])
    for plan in plans:
        members = [samples[row] for row in plan.rows]
        with ShardWriter(folder, LAYOUT, plan, LAYERS) as writer:
            for sample in members:
                writer.write(sample.id, states_of(sample))
            writer.close(members, ENGINE)
    written = {"hidden_size": 6, "dtype": "bfloat16", "final_id": 4, "layer_ids": list(LAYERS), **manifest}
    written["shards"] = [{"name": p.name, "samples": len(p.rows), "tokens": p.tokens} for p in plans]
    (folder / "manifest.json").write_text(json.dumps(written))
    return folder


@pytest.fixture
def samples() -> list[Sample]:
    return random_samples(LENGTHS)


@pytest.fixture
def folder(tmp_path: Path, samples: list[Sample]) -> Path:
    return write_store(tmp_path / "states", samples)


def test_every_sample_is_read_back(folder: Path, samples: list[Sample]):
    """S5: the rows that were written, one contiguous slice a layer."""
    store = StatesStore.open(folder)
    assert (len(store), store.layer_ids, store.final_id) == (8, (1, 2, 4), 4)
    assert store.sample_ids == [sample.id for sample in samples]
    assert store.lengths.tolist() == LENGTHS
    for sample in reversed(samples):
        states = store.read(sample.id, [4, 1])
        assert list(states) == [4, 1]
        for k, state in states.items():
            assert torch.equal(state, states_of(sample)[k].bfloat16())
            assert state.is_contiguous()


def test_open_files_are_bounded_and_old_tensors_live_on(
    folder: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_module, "MAX_OPEN_FILES", 2)
    store = StatesStore.open(folder)
    read = {sample.id: store.read(sample.id, LAYERS) for sample in samples}
    assert len(store._open) == 2
    for sample in samples:
        assert torch.equal(read[sample.id][2], states_of(sample)[2].bfloat16())


def test_a_store_travels_to_worker_processes(folder: Path, samples: list[Sample]):
    store = StatesStore.open(folder)
    store.read(samples[0].id, LAYERS)
    copy = pickle.loads(pickle.dumps(store))
    assert torch.equal(copy.read(samples[3].id, [1])[1], store.read(samples[3].id, [1])[1])


@pytest.mark.parametrize("when", ["before", "while open"])
def test_a_file_that_was_cut_off_is_named(folder: Path, samples: list[Sample], when: str):
    """S6: reading a shortened file is an error with its name, not a dead worker."""
    store, path = StatesStore.open(folder), folder / "shard-00000" / "layer-001.safetensors"
    if when == "while open":
        store.read(samples[0].id, [1])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 30)
    with pytest.raises(StoreError, match=r"shard-00000/layer-001\.safetensors: ended early.*stage=verify"):
        store.read(samples[2].id, [1])
    assert store.read(samples[0].id, [1])


def test_sizes_are_known_without_a_look_inside(folder: Path):
    store = StatesStore.open(folder)
    store.check_sizes(LAYERS)
    path = folder / "shard-00001" / "layer-001.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    store.check_sizes([2, 4])
    words = rf"^{path}: found {size - 1} bytes, expected {size} bytes \(1 of 9 files .*`eagle3 stage=extract`"
    with pytest.raises(StoreError, match=words):
        store.check_sizes(LAYERS)
    path.unlink()
    with pytest.raises(StoreError, match=rf"^{path}: is absent, expected {size} bytes \(1 of 6"):
        store.check_sizes([1, 4])


def test_a_file_without_its_rows_header_or_name(folder: Path, samples: list[Sample]):
    path = folder / "shard-00000" / "layer-001.safetensors"
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=r"layer-001\.safetensors: .*header"):
        StatesStore.open(folder).read(samples[2].id, [1])
    path.unlink()
    with pytest.raises(StoreError, match=r"layer-001\.safetensors: no readable"):
        StatesStore.open(folder).read(samples[2].id, [1])


def test_a_file_that_is_cut_off_while_it_is_read_kills_nobody(folder: Path, samples: list[Sample]):
    """S6: at whatever moment the rows go, reading them gives them or an error. Under a memory map it is SIGBUS."""
    path = folder / "shard-00000" / "layer-001.safetensors"
    command = [sys.executable, "-c", READ_WHILE_CUT, str(folder), samples[1].id, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
    whole, cut = map(int, done.stdout.split())
    assert whole > 0
    assert cut > 0


READ_WHILE_CUT = """
import sys, threading, time
from pathlib import Path
from eagle3.errors import StoreError
from eagle3.store import StatesStore

store, sample, path = StatesStore.open(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
content, found, ended = path.read_bytes(), [0, 0], threading.Event()

def cut_and_mend():
    with path.open("r+b", buffering=0) as file:
        while not ended.is_set():
            file.truncate(len(content) - 4096)
            file.truncate(0)
            file.seek(0)
            file.write(content)

store.read(sample, [1])
thread = threading.Thread(target=cut_and_mend)
thread.start()
until = time.monotonic() + 100
while time.monotonic() < until and min(found) < 20:
    try:
        store.read(sample, [1])
        found[0] += 1
    except StoreError:
        found[1] += 1
ended.set()
thread.join()
print(*found)
"""


def test_rows_are_read_into_memory_that_is_there(folder: Path, samples: list[Sample]):
    store, sample = StatesStore.open(folder), samples[3]
    memory = torch.full((102, 6), 7.0, dtype=torch.bfloat16)
    store.read_into(memory[1:101], sample.id, 2)
    assert torch.equal(memory[1:101], states_of(sample)[2].bfloat16())
    assert (memory[[0, 101]] == 7).all()
    with pytest.raises(StoreError, match=rf"sample {sample.id} has 100 rows of states, expected its 99 tokens"):
        store.read_into(memory[:99], sample.id, 2)


def test_open_files_are_given_back(folder: Path, samples: list[Sample]):
    before = len(os.listdir("/proc/self/fd"))
    store = StatesStore.open(folder)
    store.read(samples[0].id, LAYERS)
    assert len(os.listdir("/proc/self/fd")) > before
    del store
    assert len(os.listdir("/proc/self/fd")) == before


def test_unknown_sample_or_layer(folder: Path, samples: list[Sample]):
    store = StatesStore.open(folder)
    assert samples[0].id in store
    assert "nobody" not in store
    with pytest.raises(RequestError, match="sample nobody is not in this store of 8 samples"):
        store.read("nobody", [1])
    with pytest.raises(RequestError, match=r"holds layers \[1, 2, 4\], asked for 3; .*layers\.ids=\[3\]"):
        store.read(samples[0].id, [3])


def test_a_folder_that_is_no_store(tmp_path: Path, folder: Path):
    """Bad input: a half-written artifact, a broken manifest, an index that is gone."""
    with pytest.raises(RequestError, match=r"found no manifest\.json.*stage=extract"):
        StatesStore.open(tmp_path)
    index = folder / "shard-00001" / "index.safetensors"
    index.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"shard-00001/index\.safetensors: cannot be read"):
        StatesStore.open(folder)
    (folder / "manifest.json").write_text('{"shards": [')
    with pytest.raises(StoreError, match=r"manifest\.json: is no manifest of a states store"):
        StatesStore.open(folder)


def test_states_of_the_same_samples_pass(folder: Path, samples: list[Sample], tmp_path: Path):
    StatesStore.open(folder).verify(Prepared.open(write_prepared(tmp_path / "prepared", samples)))


def renamed(input_ids: np.ndarray, sample: Sample) -> Sample:
    return Sample(sample_id(input_ids), input_ids, np.ones(len(input_ids), bool), "train", sample.key)


def test_other_token_ids_are_named_with_the_first_position(folder: Path, samples: list[Sample], tmp_path: Path):
    """S10: a changed template gives other ids in the same row; sample and first differing position are named."""
    input_ids = samples[3].input_ids.copy()
    input_ids[[41, 70]] = 1, 2
    changed = [*samples[:3], renamed(input_ids, samples[3]), *samples[4:]]
    prepared = Prepared.open(write_prepared(tmp_path / "prepared", changed))
    with pytest.raises(RequestError, match="first difference at position 41") as refusal:
        StatesStore.open(folder).verify(prepared)
    message = str(refusal.value)
    assert f"sample {samples[3].id} (row 3 of the prepared set)" in message
    assert f"{samples[3].input_ids[41]} stored, 1 prepared (100 and 100 tokens)" in message


def test_a_longer_sample_differs_where_the_other_ends(folder: Path, samples: list[Sample], tmp_path: Path):
    """S10: equal as far as both go."""
    longer = np.append(samples[0].input_ids, [9, 9]).astype(np.int32)
    prepared = Prepared.open(write_prepared(tmp_path / "prepared", [renamed(longer, samples[0]), *samples[1:]]))
    with pytest.raises(RequestError, match=r"first difference at position 5, nothing stored, 9 prepared \(5 and 7"):
        StatesStore.open(folder).verify(prepared)


def test_another_prompt_set(folder: Path, samples: list[Sample], tmp_path: Path):
    """Bad input: states of another prompt set, or of fewer or more samples than are prepared."""
    other = Prepared.open(write_prepared(tmp_path / "other", random_samples(LENGTHS, seed=9)))
    with pytest.raises(RequestError, match="first difference at position 0"):
        StatesStore.open(folder).verify(other)
    more = Prepared.open(write_prepared(tmp_path / "more", [*samples, *random_samples([4], seed=9)]))
    with pytest.raises(RequestError, match=r"1 of 9 prepared samples have no states here.*stage=extract"):
        StatesStore.open(folder).verify(more)
    fewer = Prepared.open(write_prepared(tmp_path / "fewer", samples[:-1]))
    with pytest.raises(RequestError, match=r"row 7 of the prepared set.*1 stored|nothing prepared"):
        StatesStore.open(folder).verify(fewer)


def test_states_of_another_target(tmp_path: Path, samples: list[Sample], tiny_target: Path):
    """E13: another numeric form, revision or template of the target is refused with what differs."""
    target = open_target(target_config(tiny_target))
    folder = write_store(tmp_path / "states", samples, target=target.fingerprint())
    StatesStore.open(folder).check_target(target)
    target.__dict__.pop("_fingerprint")
    target.model.quantization = "fp8"
    with pytest.raises(RequestError, match=r"another target than model\.path=.*: quantization None there, 'fp8' here"):
        StatesStore.open(folder).check_target(target)
