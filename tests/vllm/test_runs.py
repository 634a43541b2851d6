"""Whole runs on the real engine: stores that agree, rehearsals, faults, Ctrl-C, and one load for a pipeline."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from eagle3.capture import Capture
from eagle3.engines import open_engine
from eagle3.engines.vllm import VllmEngine
from eagle3.errors import EngineError, RequestError
from eagle3.rehearsal import Extraction, rehearse
from eagle3.shards import Layout, plan_shards
from tests.vllm.checkpoints import llama
from tests.vllm.engines import SPOILT, configured, make_samples, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in which one token's embedding is infinite."""
    from safetensors.torch import load_file, save_file

    made = llama(tmp_path_factory.mktemp("llama"))
    weights = load_file(made / "model.safetensors")
    weights["model.embed_tokens.weight"][SPOILT] = torch.inf
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def planned(samples: list[Any], folder: Path, layer_ids: tuple[int, ...]) -> Capture:
    """A capture of these samples into several small shards."""
    layout = Layout(64, "float32", 6)
    lengths = [len(sample.input_ids) for sample in samples]
    row = len(layer_ids) * layout.row_bytes
    plans = plan_shards(lengths, [sample.id for sample in samples], row, 300 * row, None, 60.0)
    folder.mkdir(parents=True)
    return Capture(folder, layout, tuple(plans), layer_ids, 512)


def rows(capture: Capture) -> dict[str, torch.Tensor]:
    """All stored rows by file."""
    from eagle3.shards import data_start, read_rows

    found: dict[str, torch.Tensor] = {}
    for plan in capture.plans:
        for k in capture.layer_ids:
            path = capture.folder / plan.name / capture.layout.file_name(k)
            found[f"{plan.name}/{k}"] = read_rows(path, capture.layout, data_start(path), 0, plan.tokens)
    return found


def test_the_store_is_the_one_that_transformers_writes(folder: Path, tmp_path: Path) -> None:
    """E13 too: a sample whose states are not finite is rejected by both; one that is too long is left out."""
    samples = make_samples([5, 90, 200, 33, 120, 7, 60, 250, 31, 14, 77, 100])
    spoilt = make_samples([40], seed=9)[0]
    spoilt.input_ids[20] = SPOILT
    long = make_samples([300], seed=10)[0]
    samples += [spoilt, long]
    ids = (1, 3, 5, 6)
    ours, theirs = planned(samples, tmp_path / "vllm", ids), planned(samples, tmp_path / "transformers", ids)
    assert len(ours.plans) > 3
    with start("llama", folder, tmp_path / "engine.log") as engine:
        spoilt_plan = dataclasses.replace(ours, folder=tmp_path / "spoilt")
        bad = [dataclasses.replace(sample, input_ids=np.full_like(sample.input_ids, SPOILT)) for sample in samples]
        (tmp_path / "spoilt").mkdir()
        with pytest.raises(
            EngineError, match=r"first 10 samples 10 have states that are not finite; nothing was stored"
        ):
            spoilt_plan.run(engine, bad, ours.missing(), 5, lambda tokens: None)
        with pytest.raises(
            EngineError, match=r"took 256 bytes for a token at a layer, expected 128 as in the rehearsal"
        ):
            spoilt_plan.run(engine, samples, ours.missing(), 5, lambda tokens: None, 128.0)
        assert list((tmp_path / "spoilt").iterdir()) == []
        with pytest.raises(RequestError, match=r"found 7 in \[1, 7\], expected ids of 0 to 6"):
            list(engine.capture(samples[:1], [1, 7]))
        with pytest.raises(RequestError, match="repeats a layer"):
            list(engine.capture(samples[:1], [1, 1]))
        with pytest.raises(RequestError, match="expected ascending ids"):
            list(engine.capture(samples[:1], [3, 1]))
        seen: list[float] = []
        count = ours.run(engine, samples, ours.missing(), 5, seen.append, 256.0)
        report = engine.last_capture
    assert count.rejected == Counter(non_finite=1, longer_than_engine=1)
    assert sum(seen) == sum(len(sample.input_ids) for sample in samples)
    assert not ours.missing()
    assert [fault for plan in ours.plans for fault in ours.faults(plan)] == []
    assert report["ranks"][0]["rows_written"] == sum(len(s.input_ids) for s in samples) - 300
    cfg, target = configured("llama", folder)
    cfg.hardware = dataclasses.replace(cfg.hardware, engine="transformers")
    with open_engine(cfg, target) as other:
        theirs.run(other, samples, theirs.missing(), 5, lambda tokens: None)
    kept = {key for key, reason in ours.kept()[2].items() if reason != "longer_than_engine"}
    assert kept == {spoilt.id}
    found, expected = rows(ours), rows(theirs)
    assert found.keys() == expected.keys()
    for plan in ours.plans:
        for start_row, length, sample_id in zip(plan.starts, plan.lengths, plan.sample_ids, strict=True):
            if sample_id in (spoilt.id, long.id):
                continue
            for k in ids:
                mine = found[f"{plan.name}/{k}"][start_row : start_row + length]
                other_rows = expected[f"{plan.name}/{k}"][start_row : start_row + length]
                assert (mine - other_rows).abs().max() <= 1e-5 * other_rows.abs().max()


def test_a_killed_worker_is_reported_within_seconds(folder: Path, tmp_path: Path) -> None:
    """Mid-batch; nothing is left running."""
    samples = make_samples([200] * 400)
    capture = planned(samples, tmp_path / "states", (1, 6))
    with start("llama", folder, tmp_path / "engine.log") as engine:
        children = psutil.Process().children(recursive=True)
        worker = next(child for child in children if "Worker" in " ".join(child.cmdline()))
        died: list[float] = []

        def kill() -> None:
            died.append(time.monotonic())
            worker.kill()

        threading.Timer(1.0, kill).start()
        with pytest.raises(EngineError) as caught:
            capture.run(engine, samples, capture.missing(), 0, lambda tokens: None)
        assert time.monotonic() - died[0] < 15
    assert "last lines of" in str(caught.value)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert all((path / "index.safetensors").is_file() for path in capture.folder.glob("shard-?????"))


def test_a_rehearsal_passes_and_foretells(folder: Path, tmp_path: Path) -> None:
    cfg, target = configured("llama", folder)
    extraction = Extraction((1, 3, 5, 6), tuple(range(10, 250)), free_bytes=10**9)
    outcome = rehearse(cfg, target, extraction, tmp_path / "rehearsal", tmp_path / "engine.log")
    assert outcome.passed, outcome.checks
    names = [check.name for check in outcome.checks]
    assert names == [
        *("checkpoint", "tokenizer", "vllm version", "engine", "layers", "backends"),
        *("states", "store", "repeatable", "disk", "time"),
    ]
    numbers = outcome.numbers
    tokens = sum(range(10, 250))
    assert numbers["layers"] == 4
    assert numbers["bytes_per_token"] == pytest.approx(4 * 64 * 2, rel=0.2)
    assert numbers["bytes_per_state"] == 64 * 2
    assert numbers["forecast_bytes"] == numbers["bytes_per_token"] * tokens
    foretold = min(numbers["model_tokens_per_s"] * 4 / 6, numbers["tokens_per_s"])
    assert numbers["forecast_tokens_per_s"] == pytest.approx(foretold, rel=0.01)
    assert not (tmp_path / "rehearsal").exists()


def test_a_rehearsal_finds_wrong_backends(folder: Path, tmp_path: Path) -> None:
    cfg, target = configured("llama", folder, expected_backends={"attention_backend": "FLASH_ATTN"})
    extraction = Extraction((1, 3, 5, 6), None, free_bytes=10**9)
    outcome = rehearse(cfg, target, extraction, tmp_path / "rehearsal", tmp_path / "engine.log")
    assert not outcome.passed
    assert outcome.checks[-1].name == "engine"
    assert "attention_backend: expected FLASH_ATTN, found CPU_ATTN" in outcome.checks[-1].detail


def test_a_setting_that_vllm_refuses_is_told_in_its_words(folder: Path, tmp_path: Path) -> None:
    """E5: within seconds, one screen."""
    cfg, target = configured("llama", folder, engine_options={"kv_cache_dtype": "no_such"})
    with pytest.raises(EngineError, match=r"vllm: [\s\S]*no_such") as caught:
        VllmEngine(cfg, target, log_file=tmp_path / "engine.log")
    assert len(str(caught.value).splitlines()) < 60


def command(folder: Path, tmp_path: Path, *more: str) -> list[str]:
    """eagle3 on the tiny checkpoint and 60 conversations."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} plus {i * 7 % 13}?"},
                {"role": "assistant", "content": f"The answer is {i + i * 7 % 13}. " * (1 + i % 9)},
            ]
        }
        for i in range(300)
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text("\n".join(json.dumps(chat) for chat in chats))
    settings = ["model=llama", f"model.path={folder}", "hardware=cpu_vllm", f"output_dir={tmp_path / 'out'}"]
    settings += ["dataset=jsonl", f"dataset.sources.train.path={source}", "dataset.max_length=256"]
    settings += ["dataset.max_new_tokens=24", "dataset.validation_samples=5", "layers.ids=[1,3,5]"]
    settings += ["drafter.draft_vocab_size=null", "hardware.batch_tokens=512", "store.dtype=float32"]
    return [sys.executable, "-m", "eagle3", *settings, *more]


def shards_of(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "out/artifacts/states").rglob("shard-?????"))


def test_ctrl_c_leaves_a_resumable_store_and_no_process(folder: Path, tmp_path: Path) -> None:
    given = ("dataset.answers=given", "store.shard_bytes=3000000", "rehearse.before_load=false")
    subprocess.run(command(folder, tmp_path, *given, "stage=prepare"), check=True, capture_output=True)
    # Slow enough to be caught in the middle: one document at a time.
    slow = "+hardware.engine_options.max_num_seqs=1"
    extract = command(folder, tmp_path, *given, "stage=extract", slow)
    process = subprocess.Popen(
        extract,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while not shards_of(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None), output
    _, alive = psutil.wait_procs(started, timeout=15)
    assert not alive
    before = {path.name: path.stat().st_mtime_ns for path in shards_of(tmp_path)}
    assert before
    again = subprocess.run(
        command(folder, tmp_path, *given, "stage=extract"), capture_output=True, text=True, timeout=600, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    after = {path.name: path.stat().st_mtime_ns for path in shards_of(tmp_path)}
    assert before.items() <= after.items()
    assert len(after) > len(before)


def test_one_load_serves_a_pipelines_answers_and_states(folder: Path, tmp_path: Path) -> None:
    """prepare regenerates answers, extract captures them, after a rehearsal: two starts of the engine, not three."""
    run = subprocess.run(
        command(folder, tmp_path, "dataset.sources.train.limit=30", "stage=pipeline", "dataset.answers=regenerate",
                "trainer.max_steps=2", "evaluate.sets=[]"),
        capture_output=True, text=True, timeout=800, check=False, env={**os.environ},
    )  # fmt: skip
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert output.count("loaded in") == 2, output
    assert "rehearsal of LlamaForCausalLM: passed" in output
    shares = r"\(model \d+%, copy \d+%, wait \d+%, write \d+% of the time, [\d.]+ of the rehearsal's forecast\)"
    assert re.search(r"extract: [\d,]+ tokens/s, [\d.]+ GB/s " + shares, output), output
    (manifest,) = (tmp_path / "out/artifacts/states").glob("*/manifest.json")
    stored = json.loads(manifest.read_text())
    assert stored["engine"] == "vllm"
    assert stored["metrics"]["samples"] > 20
    assert list((tmp_path / "out/artifacts/drafter").glob("*/manifest.json")), output
