"""Stages extract, verify, estimate and adapters on a tiny target, with a real SIGKILL in the middle."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle3 import capture as capture_module
from eagle3 import host_memory
from eagle3 import shards as shards_module
from eagle3.artifacts import Artifact, Artifacts
from eagle3.checkpoint import open_target
from eagle3.config import Config, InputsConfig, LayersConfig, StoreConfig
from eagle3.errors import RequestError, StageFailed, StoreError
from eagle3.host_memory import HostMemory
from eagle3.layers import CONVENTION
from eagle3.prepared import Prepared
from eagle3.shard_index import INDEX_NAME, ShardIndex
from eagle3.stages import extract, rehearse
from eagle3.store import StatesStore
from tests.commands import killed
from tests.conftest import random_samples, target_config, write_prepared
from tests.stages import run_stage

LENGTHS = [5, 30, 12, 100, 64, 7, 9, 1, 80, 41, 77, 13, 25, 36, 48, 50, 61, 72, 83, 94]
SHARD_BYTES = 40_000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("artifacts") / "prepared" / "tiny", random_samples(LENGTHS))


@pytest.fixture
def cfg(tiny_target: Path, prepared: Path, tmp_path: Path) -> Config:
    cfg = target_config(
        tiny_target,
        tmp_path / "outputs",
        layers=LayersConfig(name="ids", ids=[1, 3, 5]),
        store=StoreConfig(shard_bytes=SHARD_BYTES),
        inputs=InputsConfig(prepared=str(prepared)),
    )
    return dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, threads=1))


def with_layers(cfg: Config, *ids: int, **fields: Any) -> Config:
    return dataclasses.replace(cfg, layers=LayersConfig(name="ids", ids=list(ids), **fields))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("shard-*/*"))}


def states_folder(cfg: Config) -> Path:
    return extract.states(cfg, Artifacts(Path(cfg.output_dir) / "artifacts")).folder


def manifest_of(cfg: Config) -> dict[str, Any]:
    return json.loads((states_folder(cfg) / "manifest.json").read_text())


def test_stored_states_are_the_models_own(cfg: Config, tiny_target: Path, prepared: Path):
    """E1, T4, E7: per sample, stored columns are Hugging Face's at index = id; the final state gives its logits."""
    cfg = dataclasses.replace(cfg, store=dataclasses.replace(cfg.store, dtype="float32"))
    metrics, _ = run_stage("extract", cfg)
    assert {key: metrics[key] for key in ("samples", "tokens", "skipped")} == {
        "samples": 20,
        "tokens": sum(LENGTHS),
        "skipped": 0,
    }
    store = StatesStore.open(states_folder(cfg))
    store.verify(Prepared.open(prepared))
    assert store.layer_ids == (1, 3, 5, 6)
    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    head = open_target(cfg).teacher_head()
    for sample in Prepared.open(prepared).samples:
        states = store.read(sample.id, store.layer_ids)
        with torch.no_grad():
            output = model(torch.tensor(sample.input_ids.tolist())[None], output_hidden_states=True)
        for k in (1, 3, 5):
            torch.testing.assert_close(states[k], output.hidden_states[k][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head(states[6]), output.logits[0], rtol=1e-4, atol=1e-4)


def test_states_of_random_weights_are_other_states(cfg: Config):
    """What vllm's `load_format=dummy` makes is never taken for the target's; other options do not matter."""
    folders = [
        states_folder(
            dataclasses.replace(
                cfg, hardware=dataclasses.replace(cfg.hardware, engine="vllm", engine_options=dict(options))
            )
        )
        for options in ({}, {"max_num_seqs": 4}, {"load_format": "dummy"})
    ]
    assert folders[0] == folders[1] != folders[2]


def test_manifest_says_what_is_stored(cfg: Config):
    """E7, E13, T4: convention, pre-norm, target, quantization, dtype; counts add up; plain JSON."""
    metrics, run = run_stage("extract", cfg)
    manifest = manifest_of(cfg)
    assert manifest["layer_ids"] == [1, 3, 5, 6]
    assert (manifest["layer_convention"], manifest["final_id"], manifest["final_state"]) == (CONVENTION, 6, "pre-norm")
    assert (manifest["dtype"], manifest["compute_dtype"], manifest["hidden_size"]) == ("bfloat16", "float32", 48)
    assert manifest["target"] == open_target(cfg).fingerprint()
    assert manifest["counts"] == {"prepared": 20, "stored": 20, "rejected": {}}
    assert sum(shard["tokens"] for shard in manifest["shards"]) == sum(LENGTHS)
    assert len(manifest["shards"]) > 5
    assert manifest["metrics"] == metrics
    stored = sum(len(data) for data in contents(states_folder(cfg)).values())
    assert metrics["bytes"] == stored
    provenance = json.loads((run.folder / "provenance.json").read_text())
    assert provenance["engine"]["name"] == "transformers"


def test_the_same_request_is_a_hit_and_fewer_layers_too(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    metrics, _ = run_stage("extract", cfg)
    before = contents(states_folder(cfg))
    monkeypatch.setattr(rehearse, "open_rehearsed", None)
    assert run_stage("extract", cfg)[0] == metrics
    assert run_stage("extract", with_layers(cfg, 3))[0] == metrics
    assert contents(states_folder(cfg)) == before


def test_more_layers_join_the_same_artifact(cfg: Config):
    """Layers are columns: one id of the artifact, new files beside old ones, one manifest."""
    first, _ = run_stage("extract", cfg)
    before = contents(states_folder(cfg))
    more, _ = run_stage("extract", with_layers(cfg, 0, 2, 3, also=[[4, 5], [0.5, 0.7], None][:2]))
    after = contents(states_folder(cfg))
    assert {name: after[name] for name in before} == before
    assert manifest_of(cfg)["layer_ids"] == [0, 1, 2, 3, 4, 5, 6]
    assert more["samples"] == first["samples"]
    assert more["bytes"] > first["bytes"]
    others = dataclasses.replace(cfg, output_dir=cfg.output_dir + "-at-once")
    run_stage("extract", with_layers(others, 0, 1, 2, 3, 4, 5))
    together = contents(states_folder(others))
    assert {name.split("/")[1] for name in together} == {name.split("/")[1] for name in after}
    run_stage("verify", cfg)


def test_layers_that_another_run_adds_meanwhile_stay_listed(cfg: Config, caplog: pytest.LogCaptureFixture):
    run_stage("extract", cfg)
    beside = dataclasses.replace(cfg, output_dir=cfg.output_dir + "-beside")
    shutil.copytree(cfg.output_dir, beside.output_dir)
    run_stage("extract", with_layers(beside, 4))
    folder = states_folder(cfg)
    artifacts = Artifacts(folder.parent.parent)
    adding = threading.Thread(target=run_stage, args=("extract", with_layers(cfg, 2)))
    with artifacts.lock(Artifact("states", folder.name, folder)):
        adding.start()
        until = time.monotonic() + 60
        while "waiting for it" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        shutil.copytree(states_folder(beside), folder, dirs_exist_ok=True)
    adding.join()
    assert manifest_of(cfg)["layer_ids"] == [1, 2, 3, 4, 5, 6]
    run_stage("verify", cfg)


def test_further_selections_are_captured_in_the_same_pass(cfg: Config):
    run_stage("extract", with_layers(cfg, 1, 3, also=[[2, 4], [0.2, 0.9]]))
    assert manifest_of(cfg)["layer_ids"] == [1, 2, 3, 4, 5, 6]


def test_identity_is_of_content_not_of_layers_or_budgets(cfg: Config):
    """DESIGN section 3: never the layers or a budget; E13: always the numeric form of target and states."""
    artifacts = Artifacts(Path(cfg.output_dir) / "artifacts")
    same = [
        with_layers(cfg, 2),
        dataclasses.replace(cfg, store=StoreConfig(shard_bytes=10**9, shard_seconds=1.0)),
        dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, batch_tokens=7)),
        dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, name="other name")),
    ]
    other = [
        dataclasses.replace(cfg, store=StoreConfig(dtype="float32")),
        dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, revision="v2")),
        dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, quantization="fp8")),
        dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dtype="bfloat16")),
        dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, chat_template="{{ messages }}")),
        dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, engine="vllm")),
    ]
    mine = extract.states(cfg, artifacts).id
    assert {extract.states(one, artifacts).id for one in same} == {mine}
    ids = [extract.states(one, artifacts).id for one in other]
    assert len({*ids, mine}) == len(other) + 1


@pytest.mark.parametrize(
    ("ids", "reason"), [([2, 7], "0 to 6"), ([3, 3], "repeats"), ([5, 2], "ascending"), ([], "at least one")]
)
def test_impossible_layers(cfg: Config, ids: list[int], reason: str):
    """Bad input: an unknown layer id, more layers than the model has: exit 2, and no engine starts."""
    with pytest.raises(RequestError, match=reason):
        run_stage("extract", with_layers(cfg, *ids))


def test_inputs_that_are_not_there(cfg: Config, prepared: Path, tmp_path: Path):
    """Bad input: no prepared set, a half-written one."""
    missing = dataclasses.replace(cfg, inputs=InputsConfig(prepared=str(tmp_path / "nothing")))
    with pytest.raises(RequestError, match="stage=prepare"):
        run_stage("extract", missing)
    half = Path(shutil.copytree(prepared, tmp_path / "half"))
    (half / "manifest.json").unlink()
    with pytest.raises(RequestError, match="without a manifest"):
        run_stage("extract", dataclasses.replace(cfg, inputs=InputsConfig(prepared=str(half))))


def test_a_dry_run_writes_nothing(cfg: Config, capfd: pytest.CaptureFixture[str]):
    metrics, run = run_stage("extract", dataclasses.replace(cfg, dry_run=True))
    assert metrics == {}
    assert not states_folder(cfg).exists()
    assert "tokens, layers [1, 3, 5, 6] (6 = final, pre-norm)" in run.log_file.read_text()


def test_e5_an_engine_that_cannot_start_leaves_no_states_that_look_complete(
    cfg: Config, tiny_target: Path, tmp_path: Path
):
    """E5: here the checkpoint lacks a tensor that only the engine asks for."""
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    weights = load_file(target / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=str(target)))
    with pytest.raises(RequestError, match=r"layers\.1\.mlp\.up_proj"):
        run_stage("extract", cfg)
    assert not states_folder(cfg).exists()
    _, run = run_stage("verify", cfg)
    assert "is half-written, expected a complete artifact; run `eagle3 stage=extract`" in run.log_file.read_text()


def test_the_disk_is_too_small(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    """S7: refused before the engine starts, exit 2."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(capture_module.shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    monkeypatch.setattr(rehearse, "open_rehearsed", None)
    with pytest.raises(RequestError, match=r"extraction will write .*B are free"):
        run_stage("extract", cfg)


def test_e10_states_that_are_stored_in_memory_must_fit_there(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    """Refused before the engine starts, exit 2; on a disk the same memory is enough."""
    monkeypatch.setattr(host_memory, "host_memory", lambda: HostMemory(1000, 2000))
    monkeypatch.setattr(host_memory, "in_memory", lambda folder: True)
    with monkeypatch.context() as patch:
        patch.setattr(rehearse, "open_rehearsed", None)
        with pytest.raises(RequestError) as refused:
            run_stage("extract", cfg)
    assert str(refused.value).startswith("output_dir: the capture needs ")
    assert f"states in memory ({cfg.output_dir}/artifacts/states/" in str(refused.value)
    assert "only 1.0 kB are available (the container's limit is 2.0 kB); choose one on a disk" in str(refused.value)
    monkeypatch.setattr(host_memory, "in_memory", lambda folder: False)
    run_stage("extract", cfg)


def test_the_disk_fills_up_in_the_middle(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    """S7: a clean stop with exit 1; the same command goes on and ends with an undisturbed run's bytes."""
    undisturbed = dataclasses.replace(cfg, output_dir=cfg.output_dir + "-undisturbed")
    run_stage("extract", undisturbed)
    written, pwrite = [0], os.pwrite

    def limited(handle: int, data: Any, offset: int) -> int:
        written[0] += len(data)
        if written[0] > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(handle, data, offset)

    monkeypatch.setattr(shards_module.os, "pwrite", limited)
    with pytest.raises(StageFailed, match="disk is full") as failure:
        run_stage("extract", cfg)
    monkeypatch.undo()
    assert failure.value.exit_code == 1
    assert not states_folder(cfg).exists()
    assert 0 < len(list(states_folder(cfg).with_suffix(".partial").glob("shard-?????"))) < 8
    run_stage("extract", cfg)
    assert contents(states_folder(cfg)) == contents(states_folder(undisturbed))


def test_killed_in_the_middle_and_resumed(cfg: Config, prepared: Path, tiny_target: Path, tmp_path: Path):
    """SIGKILL during extraction: resume redoes only what is missing, and the bytes are an undisturbed run's."""
    cfg = dataclasses.replace(cfg, store=StoreConfig(shard_bytes=1000))
    command = ["stage=extract", "model=llama", f"model.path={tiny_target}"]
    command += [f"inputs.prepared={prepared}", f"output_dir={cfg.output_dir}", "layers.ids=[1,3,5]"]
    command += ["store.shard_bytes=1000", "hardware.threads=1", "hardware.batch_tokens=256"]
    killed(*command, at="eagle3.shards:ShardWriter:close:3", cwd=tmp_path)
    partial = states_folder(cfg).with_suffix(".partial")
    survivors = sorted(path.name for path in partial.glob("shard-?????"))
    assert survivors == ["shard-00000", "shard-00001"]
    assert (partial / "shard-00002.tmp").is_dir()
    times = {path: path.stat().st_mtime_ns for path in partial.glob("shard-?????/*")}
    run_stage("extract", cfg)
    final = states_folder(cfg)
    assert {final / path.relative_to(partial): when for path, when in times.items()} == {
        path: path.stat().st_mtime_ns for name in survivors for path in (final / name).iterdir()
    }
    undisturbed = dataclasses.replace(cfg, output_dir=str(tmp_path / "undisturbed"))
    run_stage("extract", undisturbed)
    assert contents(final) == contents(states_folder(undisturbed))
    assert not list(final.glob("*.tmp"))


def test_e12_another_cut_into_shards_goes_on_with_the_one_that_was_begun(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    """E12: every sample once over all shards, a bounded number of files in each folder, whoever goes on."""
    undisturbed = dataclasses.replace(cfg, output_dir=cfg.output_dir + "-undisturbed")
    run_stage("extract", undisturbed)
    stop_after(monkeypatch, shards=2)
    with contextlib.suppress(KeyboardInterrupt):
        run_stage("extract", cfg)
    monkeypatch.undo()
    other = dataclasses.replace(cfg, store=StoreConfig(shard_bytes=SHARD_BYTES // 4))
    metrics, run = run_stage("extract", other)
    folder = states_folder(cfg)
    assert contents(folder) == contents(states_folder(undisturbed))
    shards = [ShardIndex.read(path / INDEX_NAME) for path in sorted(folder.glob("shard-*"))]
    assert sorted(row for shard in shards for row in shard.rows.tolist()) == list(range(len(LENGTHS)))
    assert sum(len(shard.sample_ids) for shard in shards) == len({i for shard in shards for i in shard.sample_ids})
    assert {len(list(path.iterdir())) for path in folder.glob("shard-*")} == {4 + 1}
    assert metrics["samples"] == len(LENGTHS)
    assert f"{len(shards) - 2} of {len(shards)} shards" in run.log_file.read_text()


def test_resumed_with_another_selection(cfg: Config, monkeypatch: pytest.MonkeyPatch):
    """A run that stopped with other layers: what it has in common is kept, what nobody asked for is dropped."""
    stop_after(monkeypatch, shards=2)
    with contextlib.suppress(KeyboardInterrupt):
        run_stage("extract", with_layers(cfg, 1, 2))
    monkeypatch.undo()
    run_stage("extract", with_layers(cfg, 1, 4))
    assert manifest_of(cfg)["layer_ids"] == [1, 4, 6]
    names = {path.name for path in states_folder(cfg).glob("shard-*/*")}
    assert names == {"index.safetensors", "layer-001.safetensors", "layer-004.safetensors", "final.safetensors"}
    run_stage("verify", cfg)


def stop_after(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Makes the writer of the given number raise, as Ctrl-C does."""
    close, closed = shards_module.ShardWriter.close, [0]

    def stop(writer: Any, *arguments: Any) -> None:
        if closed[0] == shards:
            raise KeyboardInterrupt
        closed[0] += 1
        close(writer, *arguments)

    monkeypatch.setattr(shards_module.ShardWriter, "close", stop)


def test_a_torn_file_of_a_complete_store_is_made_again(cfg: Config):
    """S1: a hit looks at sizes and headers, so a file that was cut off is captured again."""
    run_stage("extract", cfg)
    before = contents(states_folder(cfg))
    torn = states_folder(cfg) / "shard-00001" / "layer-003.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    run_stage("extract", cfg)
    assert contents(states_folder(cfg)) == before


def test_verify_reads_every_byte(cfg: Config):
    """A flipped bit is found and named; deleting the file and extracting again mends the store."""
    run_stage("extract", cfg)
    metrics, _ = run_stage("verify", cfg)
    assert metrics["samples"] == 20
    path = states_folder(cfg) / "shard-00002" / "final.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    with pytest.raises(StoreError, match=r"shard-00002/final\.safetensors: has damaged rows \(checksum of sample"):
        run_stage("verify", cfg)
    path.unlink()
    run_stage("extract", cfg)
    run_stage("verify", cfg)
    assert path.read_bytes() == data


def test_verify_refuses_states_of_other_samples_or_target(cfg: Config, tmp_path: Path):
    """S10, E13: named states against another prepared set and another target."""
    run_stage("extract", cfg)
    named = dataclasses.replace(cfg, inputs=dataclasses.replace(cfg.inputs, states=str(states_folder(cfg))))
    other = dataclasses.replace(named, model=dataclasses.replace(cfg.model, quantization="fp8"))
    with pytest.raises(RequestError, match="another target"):
        run_stage("verify", other)
    mixed = write_prepared(tmp_path / "mixed", random_samples(LENGTHS, seed=5))
    swapped = dataclasses.replace(named, inputs=InputsConfig(prepared=str(mixed), states=str(states_folder(cfg))))
    with pytest.raises((RequestError, StoreError)):
        run_stage("verify", swapped)


def test_estimate_is_within_two_percent(cfg: Config):
    """S7: bytes from prepared lengths against the real dump, for 20 samples; no model is loaded."""
    before, _ = run_stage("estimate", cfg)
    metrics, _ = run_stage("extract", cfg)
    assert before["bytes"] == pytest.approx(metrics["bytes"], rel=0.02)
    assert (before["samples"], before["tokens"]) == (20, sum(LENGTHS))
    after, run = run_stage("estimate", cfg)
    assert after["seconds"] == pytest.approx(sum(LENGTHS) / metrics["tokens_per_s"], abs=0.06)
    shown = run.log_file.read_text()
    assert all(name in shown for name in ("early", "middle", "late", "spread", "as measured"))


def test_estimate_holds_the_weights_against_the_memory_of_a_gpu(cfg: Config, tiny_target: Path):
    hardware = dataclasses.replace(cfg.hardware, gpu_memory_gb=1e-4, tensor_parallel_size=2)
    found, run = run_stage("estimate", dataclasses.replace(cfg, hardware=hardware))
    size = (tiny_target / "model.safetensors").stat().st_size
    assert found["weight_bytes_per_gpu"] == pytest.approx(size / 2, rel=0.05)
    assert "hardware.gpu_memory_gb: they do not fit" in run.log_file.read_text()


def test_lost_samples_count_and_too_many_fail(cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """E9, E11: samples longer than the model: counted where allowed, refused before the engine starts where not."""
    samples = random_samples([40, 1100, 30])
    prepared = write_prepared(tmp_path / "long", samples)
    cfg = dataclasses.replace(cfg, inputs=InputsConfig(prepared=str(prepared)))
    words = (
        "^dataset.max_length: 1 of 3 prepared samples have more than the {} tokens .* up to 1100; 0 may be lost .*{}"
    )
    monkeypatch.setattr(rehearse, "open_rehearsed", None)
    with pytest.raises(RequestError, match=words.format(1024, r"dataset\.max_length=1024, or take a model")):
        run_stage("extract", cfg)
    # vLLM's requests have room for a new token; what the config gives it is less than the model reads.
    vllm = dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, engine="vllm"))
    with pytest.raises(
        RequestError, match=words.format(1023, r"dataset\.max_length=1023, or take hardware\.engine_opt")
    ):
        run_stage("extract", vllm)
    monkeypatch.undo()
    cfg = dataclasses.replace(cfg, store=dataclasses.replace(cfg.store, max_failed_fraction=0.5))
    metrics, _ = run_stage("extract", cfg)
    assert (metrics["samples"], metrics["skipped"], metrics["tokens"]) == (2, 1, 70)
    assert manifest_of(cfg)["rejected"] == {samples[1].id: "longer_than_model"}
    StatesStore.open(states_folder(cfg)).verify(Prepared.open(prepared))


def test_adapters_are_listed(cfg: Config):
    metrics, run = run_stage("adapters", cfg)
    names = [answers["name"] for answers in metrics["adapters"]]
    assert {"llama", "qwen", "deepseek_v3", "kimi_k25"} <= set(names)
    assert "eagle3.adapters.llama" in run.log_file.read_text()
