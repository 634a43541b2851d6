"""Every stored state is Hugging Face's and vLLM's own, whatever the batch, the split and the number of ranks.

An engine takes half a minute to start, so tests share two: one plain, one of two ranks that splits documents and, as
each family's engine does, extracts states by vLLM's own means too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from eagle3.capture import Capture
from eagle3.engines import Prompt, open_engine, stalls
from eagle3.engines.backends import log_backends
from eagle3.engines.process_group import group_titles, shared_memory
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_capture import ShardWork
from eagle3.engines.vllm_load import SHARDS
from eagle3.errors import EngineError, RequestError
from eagle3.shards import Layout, ShardPlan, ShardWriter, data_start, plan_shards, read_rows, shards_at
from eagle3.tokens import Sample
from tests.vllm.checkpoints import RECIPES
from tests.vllm.engines import (
    SPOILT,
    assert_same,
    assert_same_bits,
    captured,
    configured,
    hugging_face,
    make_samples,
    start,
)

LENGTHS = [5, 40, 200, 1, 33, 255, 17, 90]
EXTRACTED = [1, 2, 4, 6]


def recipe(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(family)
    return RECIPES[family](folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in which one token's embedding is infinite."""
    from safetensors.torch import load_file, save_file

    folder = recipe("llama", tmp_path_factory)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][SPOILT] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with start("llama", llama, tmp_path_factory.mktemp("log") / "engine.log") as opened:
        yield opened


@pytest.fixture(scope="module")
def ranks(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Tensor parallel, with batches of 64 tokens; vLLM's own states come into the folder of the log."""
    from tests.vllm.connector import options

    folder = tmp_path_factory.mktemp("ranks")
    own = options(folder, EXTRACTED)
    log_file = folder / "engine.log"
    with start("llama", llama, log_file, batch_tokens=64, tensor_parallel_size=2, engine_options=own) as opened:
        yield opened


def planned(samples: Sequence[Sample], folder: Path, layer_ids: tuple[int, ...]) -> Capture:
    """A capture of these samples into several small shards."""
    layout = Layout(64, "float32", 6)
    lengths = [len(sample.input_ids) for sample in samples]
    row = len(layer_ids) * layout.row_bytes
    plans = plan_shards(lengths, [sample.id for sample in samples], row, 300 * row, None, 60.0)
    folder.mkdir(parents=True)
    return Capture(folder, layout, tuple(plans), layer_ids, 512)


def rows(capture: Capture) -> dict[str, torch.Tensor]:
    """All stored rows by file."""
    found: dict[str, torch.Tensor] = {}
    for plan in capture.plans:
        for k in capture.layer_ids:
            path = capture.folder / plan.name / capture.layout.file_name(k)
            found[f"{plan.name}/{k}"] = read_rows(path, capture.layout, data_start(path), 0, plan.tokens)
    return found


def test_states_are_hugging_faces_at_any_batch(engine: VllmEngine) -> None:
    """E1, E7: ids 0 ... n; batch 8, batch 1, shuffled, and a second call."""
    samples = make_samples(LENGTHS)
    ids = range(engine.target.shape.num_layers + 1)
    expected = hugging_face(engine.target, samples)
    assert_same(captured(engine, samples, ids), expected, samples)
    shuffled = [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]
    assert_same(captured(engine, shuffled, ids), expected, samples)
    for sample in samples[:4]:
        assert_same(captured(engine, [sample], ids), expected, [sample])
    assert_same(captured(engine, samples, [6]), expected, samples)


def test_shared_beginnings_are_computed_for_each(engine: VllmEngine) -> None:
    """E2: prefix caching is off; two prompts that share a long beginning have all their rows."""
    assert not engine.ranks[0]["prefix_caching"]
    samples = make_samples([5, 20, 40], seed=2, shared=150)
    expected = hugging_face(engine.target, samples)
    assert_same(captured(engine, samples, [0, 3, 6]), expected, samples)
    assert_same(captured(engine, samples[::-1], [0, 3, 6]), expected, samples)


def test_one_load_serves_captures_and_generation(engine: VllmEngine) -> None:
    """Greedy continuations are Hugging Face's; states after them are as before; keys are seeds at a temperature."""
    from transformers import AutoModelForCausalLM

    prompts = [Prompt(f"p{n}", sample.input_ids.tolist(), 12) for n, sample in enumerate(make_samples([4, 9, 30], 3))]
    model: Any = AutoModelForCausalLM.from_pretrained(engine.target.folder, dtype=torch.float32).eval()
    found = {g.key: g for g in engine.generate(prompts, temperature=0.0, seed=0, stop_ids=[])}
    for prompt in prompts:
        expected = model.generate(torch.tensor([list(prompt.input_ids)]), max_new_tokens=12, do_sample=False)
        assert found[prompt.key].token_ids[:4] == expected[0, len(prompt.input_ids) :].tolist()[:4]
        assert found[prompt.key].finish == "length"
    stop = found["p0"].token_ids[3]
    (stopped,) = engine.generate(prompts[:1], temperature=0.0, seed=0, stop_ids=[stop])
    assert stopped.finish == "stop"
    assert stopped.token_ids == found["p0"].token_ids[: found["p0"].token_ids.index(stop) + 1]
    sampled = [
        {g.key: g.token_ids for g in engine.generate(prompts, temperature=1.0, seed=seed, stop_ids=[])}
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    samples = make_samples([7, 70], seed=4)
    assert_same(captured(engine, samples, [2, 6]), hugging_face(engine.target, samples), samples)


def test_a_generation_that_stands_still_is_said(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as the process that steps is stopped; what comes out afterwards is what it would have been."""
    prompts = [Prompt(f"p{n}", sample.input_ids.tolist(), 20) for n, sample in enumerate(make_samples([4, 9, 30], 3))]
    expected = {g.key: g.token_ids for g in engine.generate(prompts, temperature=0.0, seed=0, stop_ids=[])}
    monkeypatch.setattr(stalls, "SAY_SECONDS", 2.0)
    host = engine._process._process.pid
    core = next(psutil.Process(pid) for pid, title in group_titles(host) if title.startswith("VLLM::EngineCore"))

    def go_on_when_said() -> None:
        ends = time.monotonic() + 60
        while not caplog.messages and time.monotonic() < ends:
            time.sleep(0.1)
        core.resume()

    waiting = threading.Thread(target=go_on_when_said)
    with caplog.at_level("WARNING", "eagle3"):
        core.suspend()
        waiting.start()
        found = {g.key: g.token_ids for g in engine.generate(prompts, temperature=0.0, seed=0, stop_ids=[])}
    waiting.join()
    assert any("the model itself stands still" in message for message in caplog.messages)
    assert found == expected


def test_a_prompt_without_room_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(RequestError, match=r"prompt long: 270 tokens and 30 new ones, the engine takes 289"):
        list(engine.generate([Prompt("long", [5] * 270, 30)], temperature=0.0, seed=0, stop_ids=[]))


def test_what_is_loaded_is_told(engine: VllmEngine) -> None:
    info = engine.info()
    assert (info.name, info.model_class, info.num_layers, info.dtype) == ("vllm", "LlamaForCausalLM", 6, "float32")
    assert info.details["backends"]["attention"] == "DENSE"


def test_the_store_is_the_one_that_transformers_writes(engine: VllmEngine, llama: Path, tmp_path: Path) -> None:
    """E13 too: a sample whose states are not finite is rejected by both; one that is too long is left out."""
    samples = make_samples([5, 90, 200, 33, 120, 7, 60, 250, 31, 14, 77, 100])
    spoilt = make_samples([40], seed=9)[0]
    spoilt.input_ids[20] = SPOILT
    long = make_samples([300], seed=10)[0]
    samples += [spoilt, long]
    ids = (1, 3, 5, 6)
    ours, theirs = planned(samples, tmp_path / "vllm", ids), planned(samples, tmp_path / "transformers", ids)
    assert len(ours.plans) > 3
    with pytest.raises(RequestError, match=r"found 7 in \[1, 7\], expected ids of 0 to 6"):
        list(engine.capture(samples[:1], [1, 7]))
    with pytest.raises(RequestError, match="repeats a layer"):
        list(engine.capture(samples[:1], [1, 1]))
    with pytest.raises(RequestError, match="expected ascending ids"):
        list(engine.capture(samples[:1], [3, 1]))
    seen: list[float] = []
    wanted = ours.missing()
    count = ours.run(engine, samples, wanted, 5, seen.append, 256.0)
    report = engine.last_capture
    assert count.rejected == Counter(non_finite=1, longer_than_engine=1)
    assert sum(seen) == sum(len(sample.input_ids) for sample in samples)
    assert not ours.missing()
    assert [fault for plan in ours.plans for fault in ours.faults(plan)] == []
    assert report["ranks"][0]["rows_written"] == sum(len(s.input_ids) for s in samples) - 300
    cfg, target = configured("llama", llama)
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
    # Last: in memory of keys and values that is used again, vLLM's attention on a CPU masks by a product with 0.
    spoilt_plan = dataclasses.replace(ours, folder=tmp_path / "spoilt")
    bad = [dataclasses.replace(sample, input_ids=np.full_like(sample.input_ids, SPOILT)) for sample in samples]
    (tmp_path / "spoilt").mkdir()
    with pytest.raises(EngineError, match=r"first 10 samples 10 have states that are not finite; nothing was stored"):
        spoilt_plan.run(engine, bad, wanted, 5, lambda tokens: None)
    with pytest.raises(EngineError, match=r"took 256 bytes for a token at a layer, expected 128 as in the rehearsal"):
        spoilt_plan.run(engine, samples, wanted, 5, lambda tokens: None, 128.0)
    assert list((tmp_path / "spoilt").iterdir()) == []


def test_shards_without_a_sample_to_capture_do_not_stay_open_behind_one_another(
    engine: VllmEngine, tmp_path: Path
) -> None:
    """Each holds a file for each layer: a thousand of them would be more than a process may open."""
    samples = make_samples([20, *[300] * 50, 30])
    layout = Layout(64, "float32", 6)
    plans = shards_at(range(52), [len(sample.input_ids) for sample in samples], [sample.id for sample in samples])
    opened, settled = 0, []

    def work() -> Iterator[ShardWork]:
        nonlocal opened
        for plan, sample in zip(plans, samples, strict=True):
            writer, opened = ShardWriter(tmp_path, layout, plan, [3, 6]), opened + 1
            if len(sample.input_ids) == 300:
                writer.reject(sample.id, "longer_than_engine")
            yield ShardWork(writer, [sample])

    for done in engine.capture_shards(work(), [3, 6], layout):
        settled.append(done.writer.plan.number)
        assert opened - len(settled) <= 2
        done.writer.close(done.members, {"name": "vllm"})
    assert sorted(settled) == list(range(52))


def test_a_write_that_never_ends_is_named_and_given_up(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E4: a file that is a pipe without a reader blocks the worker. The last test with this engine."""
    monkeypatch.setattr(stalls, "SAY_SECONDS", 3.0)
    monkeypatch.setattr(stalls, "STALL_SECONDS", 12.0)
    host = psutil.Process(engine._process._process.pid)
    processes = [host, *host.children(recursive=True)]
    samples = make_samples([250] * 40)
    lengths = tuple(len(sample.input_ids) for sample in samples)
    plan = ShardPlan(0, tuple(range(40)), tuple(sample.id for sample in samples), lengths)
    layout = Layout(64, "float32", 6)
    with ShardWriter(tmp_path, layout, plan, [3, 6]) as writer:
        hung = writer.files[3].path
        hung.unlink()
        os.mkfifo(hung)
        with caplog.at_level("WARNING", "eagle3"), pytest.raises(EngineError) as caught:
            list(engine.capture_shards([ShardWork(writer, samples)], [3, 6], layout))
    words = (
        re.escape(str(hung)) + r": rank 0 has been opening it since [\d:]+, and there was no token and no byte for 1"
    )
    assert re.match(words, str(caught.value))
    assert any(f"rank 0 has been opening {hung} since" in message for message in caplog.messages)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_split_documents_are_put_together(ranks: VllmEngine) -> None:
    """Chunked prefill: batches of 64 tokens, documents of up to 250, some with one beginning."""
    samples = make_samples([250, 3, 64, 65, 200, 10, 128, 1]) + make_samples([30, 90, 60], seed=5, shared=70)
    assert ranks.ranks[0]["batch_tokens"] == 64
    found = captured(ranks, samples, range(7))
    steps = ranks.last_capture["ranks"][0]["steps"]
    assert steps >= sum(len(sample.input_ids) for sample in samples) / 64
    assert_same(found, hugging_face(ranks.target, samples), samples)


def test_two_ranks_hand_out_what_vllm_extracts(ranks: VllmEngine) -> None:
    """Equal bits, whichever rank writes and however a document was split."""
    from tests.vllm.connector import extracted

    samples = make_samples(LENGTHS, seed=7)
    found = captured(ranks, samples, EXTRACTED)
    reference = extracted(ranks._process.log_file.parent)
    assert_same_bits(found, reference, samples, EXTRACTED)


def test_two_ranks_share_the_writing(ranks: VllmEngine, tmp_path: Path) -> None:
    """Tensor parallel: each rank writes a part, the other one in a second pass; both are Hugging Face's."""
    samples = make_samples(LENGTHS)
    lengths = tuple(len(sample.input_ids) for sample in samples)
    plan = ShardPlan(0, tuple(range(8)), tuple(sample.id for sample in samples), lengths)
    layout, ids = Layout(64, "float32", 6), [1, 3, 6]
    expected = hugging_face(ranks.target, samples)
    for rotation in (0, 1):
        with ShardWriter(tmp_path / str(rotation), layout, plan, ids) as writer:
            list(ranks.capture_shards([ShardWork(writer, samples)], ids, layout, rotation=rotation))
            found = {
                sample.id: {k: writer.files[k].read(start, len(sample.input_ids)) for k in ids}
                for sample, start in zip(samples, plan.starts, strict=True)
            }
            writer.close(samples, {"name": "vllm"})
        assert_same(found, expected, samples)
        written = [rank["bytes"] for rank in ranks.last_capture["ranks"]]
        assert sum(written) == plan.tokens * 64 * 4 * 3
        assert min(written) > 0.45 * sum(written)


def test_a_killed_worker_is_reported_within_seconds(ranks: VllmEngine, tmp_path: Path) -> None:
    """Mid-batch, one of two; nothing is left, neither running nor in shared memory. The last test with these ranks."""
    samples = make_samples([200] * 400)
    capture = planned(samples, tmp_path / "states", (1, 6))
    host = psutil.Process(ranks._process._process.pid)
    processes = [host, *host.children(recursive=True)]
    worker = next(psutil.Process(pid) for pid, title in group_titles(host.pid) if title.startswith("VLLM::Worker"))
    held = {path for process in processes for path in shared_memory(process.pid)}
    assert held
    died: list[float] = []

    def kill(tokens: float) -> None:
        if not died:  # the first shard is there, hundreds follow
            died.append(time.monotonic())
            worker.kill()

    with pytest.raises(EngineError) as caught:
        capture.run(ranks, samples, capture.missing(), 0, kill)
    # Our own grace for vLLM's words is 5 seconds; the rest is for a machine with other work.
    assert time.monotonic() - died[0] < 60
    assert "last lines of" in str(caught.value)
    ranks.close()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert not any(path.exists() for path in held)
    assert all((path / "index.safetensors").is_file() for path in capture.folder.glob("shard-?????"))


# Each starts an engine of its own; Llama's states are those of the two above.
FAMILIES = ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"]
# What DeepSeek V2's engine scales queries by, from this position on: Hugging Face's class does not.
SCALED_FROM = 64
SCALING = {"llama_4_scaling": {"original_max_position_embeddings": SCALED_FROM, "beta": 0.5}}


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_hugging_faces_and_those_of_vllms_own_extraction(
    family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same engine extracts by its own means (`extract_hidden_states`), id n included, and by ours: equal bits.

    Kimi's language models are DeepSeek V3. What the log tells while the model loads is what the load's watch
    understands.
    """
    from tests.vllm.connector import extracted, options

    folder = recipe(family, tmp_path_factory)
    if family == "deepseek_v2":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **SCALING}))
    samples = make_samples(LENGTHS)
    n = json.loads((folder / "config.json").read_text()).get("num_hidden_layers", 5)
    ids = [1, 2, 4, n]
    extraction = options(tmp_path / "extracted", ids)
    with start(family, folder, tmp_path / "engine.log", engine_options=extraction) as engine:
        found = captured(engine, samples, range(n + 1))
        reference = extracted(tmp_path / "extracted")
        target = engine.target
    assert_same_bits(found, reference, samples, ids)
    if family in ("kimi_k2", "kimi_k25"):
        _, target = configured("deepseek_v3", recipe("deepseek_v3", tmp_path_factory))
    expected = hugging_face(target, samples)
    if family == "deepseek_v2":
        last = samples[LENGTHS.index(255)].id
        assert (found[last][n] - expected[last][n])[SCALED_FROM:].abs().amax(-1).min() > 1e-2
        found = {key: {k: state[:SCALED_FROM] for k, state in states.items()} for key, states in found.items()}
        expected = {key: [state[:SCALED_FROM] for state in states] for key, states in expected.items()}
    assert_same(found, expected, samples)
    log = (tmp_path / "engine.log").read_text()
    assert SHARDS.findall(log)[-1] == ("1", "1")
    if family.startswith(("deepseek", "kimi")):
        assert log_backends(log)["prefill"] == engine.ranks[0]["backends"]["prefill"]
