"""Whole runs on the real engine: rehearsals, refusals, Ctrl-C, and a pipeline from answers to the server's numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eagle3.engines.process_group import group_titles
from eagle3.engines.vllm import VllmEngine
from eagle3.errors import EngineError
from tests.vllm.checkpoints import llama
from tests.vllm.drafters import QUESTIONS, write_prompts
from tests.vllm.engines import configured


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


def test_a_setting_that_vllm_refuses_is_told_in_its_words(folder: Path, tmp_path: Path) -> None:
    """E5: within seconds, one screen."""
    cfg, target = configured("llama", folder, engine_options={"kv_cache_dtype": "no_such"})
    with pytest.raises(EngineError, match=r"vllm: [\s\S]*no_such") as caught:
        VllmEngine(cfg, target, log_file=tmp_path / "engine.log")
    assert len(str(caught.value).splitlines()) < 60


def command(folder: Path, tmp_path: Path, *more: str) -> list[str]:
    """eagle3 on the tiny checkpoint and 300 conversations."""
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
    """Those of the store; the first samples' own shard lies deeper."""
    return sorted((tmp_path / "out/artifacts/states").glob("*/shard-?????"))


def stopped(command: list[str], tmp_path: Path, stop: Callable[[psutil.Process], None]) -> str:
    """Runs a command, stops it when it has completed another shard, and returns its output. No process is left."""
    before = len(shards_of(tmp_path))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 600
    while len(shards_of(tmp_path)) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0]
    running = psutil.Process(process.pid)
    started = running.children(recursive=True)
    stop(running)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert len(shards_of(tmp_path)) > before
    return output


def test_a_killed_engine_of_two_and_ctrl_c_leave_a_resumable_store_and_no_process(folder: Path, tmp_path: Path) -> None:
    """E12: begun by two engines, which have answered the prompts as well; gone on with by one, then by another one
    after its rehearsal."""
    given = ("dataset.answers=regenerate", "dataset.max_new_tokens=8", "store.shard_bytes=300000", "evaluate.sets=[]")
    # Slow enough to be caught in the middle, in the first of some forty shards: one document at a time, few of them
    # handed over at once.
    slow = ("rehearse.before_load=false", "+hardware.engine_options.max_num_seqs=1", "hardware.batch_tokens=128")
    killed: list[str] = []

    def kill_one(running: psutil.Process) -> None:
        hosts = [child for child in running.children() if "eagle3.engines.vllm_host" in child.cmdline()]
        assert len(hosts) == 2
        killed.append(Path(os.readlink(f"/proc/{hosts[1].pid}/fd/1")).stem)
        os.killpg(hosts[0].pid, signal.SIGSTOP)  # or it would complete what is left before the other's death is told
        next(psutil.Process(pid) for pid, title in group_titles(hosts[1].pid) if "Worker" in title).kill()

    begun = command(folder, tmp_path, *given, *slow, "stage=pipeline", "hardware.data_parallel_size=2")
    output = stopped(begun, tmp_path, kill_one)
    assert "vllm: 2 of 2 engines loaded" in output
    assert output.count(" of 2 engines loaded") == 2  # once, for answers and states
    assert f"eagle3: {killed[0]} of 2: vllm: " in output, output
    first = {path.name: path.stat().st_mtime_ns for path in shards_of(tmp_path)}
    alone = command(folder, tmp_path, *given, *slow, "stage=extract")
    output = stopped(alone, tmp_path, lambda running: running.send_signal(signal.SIGINT))
    second = {path.name: path.stat().st_mtime_ns for path in shards_of(tmp_path)}
    ended = subprocess.run(
        command(folder, tmp_path, *given, "stage=extract"), capture_output=True, text=True, timeout=900, check=False
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    third = {path.name: path.stat().st_mtime_ns for path in shards_of(tmp_path)}
    assert first.items() < second.items() < third.items()
    (prepared,) = (tmp_path / "out/artifacts/prepared").glob("*/manifest.json")
    (states,) = (tmp_path / "out/artifacts/states").glob("*/manifest.json")
    samples = json.loads(prepared.read_text())["metrics"]["samples"]
    stored = json.loads(states.read_text())
    assert stored["counts"] == {"prepared": samples, "stored": samples, "rejected": {}}
    assert samples > 200
    assert len(stored["shards"]) == len(third)
    assert_rehearsed(output, tmp_path / "out/artifacts")


def assert_rehearsed(output: str, artifacts: Path) -> None:
    """What the last run was told before it loaded the target, and how it compares itself with that."""
    assert "rehearsal of LlamaForCausalLM: passed" in output
    (rehearsed,) = (artifacts / "rehearsal").glob("*/manifest.json")
    found = json.loads(rehearsed.read_text())
    assert all(check["passed"] for check in found["checks"])
    assert [check["name"] for check in found["checks"]] == [
        *("checkpoint", "tokenizer", "vllm version", "host memory", "engine", "layers", "backends"),
        *("states", "store", "repeatable", "disk", "time"),
    ]
    numbers = found["metrics"]
    assert numbers["layers"] == 4
    assert numbers["bytes_per_token"] == pytest.approx(4 * 64 * 4, rel=0.2)
    assert numbers["bytes_per_state"] == 64 * 4
    told = re.search(r"rehearse: passed; about \S+ for ([\d,]+) tokens", output)
    assert told is not None, output
    assert numbers["forecast_bytes"] == numbers["bytes_per_token"] * int(told[1].replace(",", ""))
    foretold = min(numbers["model_tokens_per_s"] * 4 / 6, numbers["tokens_per_s"])
    assert numbers["forecast_tokens_per_s"] == pytest.approx(foretold, rel=0.01)
    assert not list(artifacts.glob("rehearsal-*"))
    shares = r"\(model \d+%, copy \d+%, wait \d+%, write \d+% of the time, [\d.]+ of the rehearsal's forecast\)"
    assert re.search(r"extract: [\d,]+ tokens/s, [\d.]+ GB/s " + shares, output), output


def test_a_pipeline_loads_once_and_ends_with_the_servers_numbers(folder: Path, tmp_path: Path) -> None:
    """One load for answers and states, one without the drafter, one with it; two batch sizes, two
    temperatures."""
    asked = write_prompts(tmp_path / "asked.jsonl", QUESTIONS)
    run = subprocess.run(
        command(
            folder,
            tmp_path,
            *("stage=pipeline", "dataset.answers=regenerate", "dataset.sources.train.limit=30"),
            "rehearse.before_load=false",
            f"+dataset.sources.asked={{path: {asked}, role: heldout}}",
            *("drafter.draft_vocab_size=300", "trainer.max_steps=4", "evaluate.sets=[heldout]"),
            *("evaluate.max_new_tokens=32", "evaluate.batch_sizes=[1,3]", "evaluate.also_temperatures=[0.7]"),
        ),
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert (output.count("loaded in"), output.count("serving with")) == (1, 2), output
    assert re.search(r"extract: first states after \S+, written by the ranks 100%", output), output
    (manifest,) = (tmp_path / "out/artifacts/states").glob("*/manifest.json")
    stored = json.loads(manifest.read_text())
    assert stored["engine"] == "vllm"
    assert stored["metrics"]["samples"] > 20
    (run_folder,) = (tmp_path / "out/runs").glob("*/*-pipeline-*")
    metrics = json.loads((run_folder / "result.json").read_text())["metrics"]
    found = metrics["evaluate"]
    assert list(found["sets"]) == ["heldout"]
    assert [(p["temperature"], p["batch_size"]) for p in found["points"]] == [(0.0, 1), (0.0, 3), (0.7, 1), (0.7, 3)]
    for point in found["points"]:
        assert point["prompts"] == len(QUESTIONS)
        assert point["speedup"] == pytest.approx(point["tokens_per_s"] / point["tokens_per_s_plain"])
        assert 1 <= point["acceptance_length"] <= 4
        assert point["acceptance_length"] == pytest.approx(1 + sum(point["per_position_unconditional"]))
        assert point["lossless"] is (True if point["temperature"] == 0 else None)
    assert found["acceptance_length"] == found["points"][0]["acceptance_length"]
    written = json.loads((run_folder / "evaluation.json").read_text())
    assert written["setting"]["engine"]["name"] == "vllm"
    assert all(record["identical"] or record["difference"]["tie"] for record in written["records"])
    card = (Path(metrics["export"]["folder"]) / "README.md").read_text()
    assert f"| vllm {written['setting']['engine']['version']}, float32 | 4 of heldout | 3 | 0.0 |" in card
