"""Several engines as one, with a stub of vLLM in each: what comes out is the same for any number of them, and they end
together."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from eagle3.capture import Capture
from eagle3.config import LayersConfig, StoreConfig
from eagle3.engines import Prompt, open_engine
from eagle3.engines.vllm import sampling_parameters
from eagle3.engines.vllm_capture import throughput
from eagle3.engines.vllm_group import VllmEngines
from eagle3.errors import EngineError, RequestError, StageFailed
from eagle3.runs import Run
from eagle3.shard_index import complete_index
from eagle3.shards import Layout, data_start, plan_shards, read_rows
from eagle3.tokens import Sample
from tests import conftest
from tests.conftest import write_prepared
from tests.stages import run_stage
from tests.stub import DIES, HANGS, WAITS, Stub

LAYOUT, LAYERS = Layout(48, "float32", 6), (1, 3, 6)


@pytest.fixture(autouse=True)
def nothing_survives() -> Iterator[None]:
    """No process of an engine is left by any test."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture
def opened(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Opens so many engines, which do `load` at first."""
    stub = Stub(tiny_target, tmp_path, monkeypatch)
    return lambda count, load="": open_engine(*stub.configured(count, load), tmp_path / f"{count}.log")


def random_samples(lengths: Sequence[int]) -> list[Sample]:
    """Samples that nothing happens to."""
    return conftest.random_samples(lengths, vocab_size=DIES)


def planned(folder: Path, samples: Sequence[Sample], shard_tokens: int = 120) -> Capture:
    folder.mkdir()
    row = len(LAYERS) * LAYOUT.row_bytes
    lengths, ids = [len(sample.input_ids) for sample in samples], [sample.id for sample in samples]
    return Capture(folder, LAYOUT, plan_shards(lengths, ids, row, shard_tokens * row, None, 60), LAYERS, 256)


def run(capture: Capture, engine: Any, samples: Sequence[Sample], advance: Any = lambda tokens: None) -> Any:
    return capture.run(engine, samples, capture.missing(unproven=LAYERS), 0, advance)


def marked(samples: list[Sample], place: int, token: int) -> list[Sample]:
    """The samples, one of them with an end that does something."""
    samples[place].input_ids[-2:] = token
    return samples


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def assert_whole(capture: Capture, samples: Sequence[Sample]) -> None:
    """Every sample is stored once, with the rows that its ids make."""
    indexes = [complete_index(capture.folder / plan.name, plan) for plan in capture.plans]
    assert [sample_id for index in indexes for sample_id in index.sample_ids] == [sample.id for sample in samples]
    assert [fault for plan in capture.plans for fault in capture.faults(plan)] == []
    for plan in capture.plans:
        ids = np.concatenate([samples[row].input_ids for row in plan.rows])
        for k in LAYERS:
            path = capture.folder / plan.name / LAYOUT.file_name(k)
            rows = read_rows(path, LAYOUT, data_start(path), 0, plan.tokens).numpy()
            assert np.array_equal(rows, np.repeat(ids[:, None] + k / 8, 48, 1))
    assert not list(capture.folder.glob("*.tmp"))


def test_four_engines_begin_a_store_and_three_end_it(opened: Callable[..., Any], tmp_path: Path) -> None:
    """E12: 1,003 samples; the union is complete without duplicates, the counts add up, one folder a shard."""
    samples = random_samples(np.random.default_rng(3).integers(2, 30, 1003).tolist())
    tokens = sum(len(sample.input_ids) for sample in samples)
    capture = planned(tmp_path / "states", samples)
    assert len(capture.plans) > 100
    done: list[float] = []
    with opened(4) as engines:
        assert isinstance(engines, VllmEngines)
        assert engines.info().details["engines"] == 4

        def kill_one(count: float) -> None:
            done.append(count)
            if sum(done) > tokens / 4:
                engines.engines[2]._process.kill()

        with pytest.raises(EngineError, match=r"^engine-2 of 4: vllm: the engine's process was ended by signal SIGKI"):
            run(capture, engines, samples, kill_one)
    first = {path.name: path.stat().st_mtime_ns for path in capture.folder.glob("shard-?????")}
    assert 0 < len(first) < len(capture.plans)
    with opened(3) as engines:
        count = run(capture, engines, samples)
        report = engines.last_capture
    second = {path.name: path.stat().st_mtime_ns for path in capture.folder.glob("shard-?????")}
    assert first.items() < second.items()
    assert_whole(capture, samples)
    assert capture.kept() == (1003, tokens, {})
    stored = sum(plan.tokens for plan in capture.plans if plan.name in first)
    assert stored + count.tokens == tokens
    # All three took part, and the report is of all together.
    rows = [rank["rows_written"] for rank in report["ranks"]]
    assert sum(rows) == report["tokens"] == count.tokens
    assert min(rows) > 0
    found = throughput(report)
    assert found["tokens_per_s"] == pytest.approx(count.tokens / report["seconds"], rel=1e-3)
    assert found["written_share"] == [round(each / count.tokens, 4) for each in rows]


def test_a_store_is_the_same_artifact_whatever_the_number(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rehearsed with one engine, foretold for two, made by two, a hit for one."""
    samples = random_samples([29] * 200)
    stub = Stub(tiny_target, tmp_path, monkeypatch)

    def extracted(count: int, engine: str = "vllm") -> tuple[dict[str, Any], Run]:
        cfg, _ = stub.configured(count)
        cfg.hardware.engine = engine
        cfg.output_dir, cfg.inputs.prepared = str(tmp_path / "outputs"), str(prepared)
        cfg.layers = LayersConfig(name="ids", ids=[1, 3, 5])
        cfg.store, cfg.rehearse.layers = StoreConfig(dtype="float32", shard_bytes=100_000), 6
        return run_stage("extract", cfg)

    prepared = write_prepared(tmp_path / "artifacts" / "prepared" / "tiny", samples)
    with pytest.raises(RequestError, match=r"data_parallel_size: found 2, but the transformers engine is one process"):
        extracted(2, engine="transformers")
    metrics, made = extracted(2)
    assert metrics["samples"] == 200
    logs = sorted(path.name for path in made.folder.glob("engine*.log"))
    assert logs == ["engine-0.log", "engine-1.log", "engine.log"]
    (rehearsed,) = (tmp_path / "outputs/artifacts/rehearsal").glob("*/manifest.json")
    foretold = json.loads(rehearsed.read_text())["metrics"]
    assert foretold["forecast_seconds"] == pytest.approx(29 * 200 / foretold["forecast_tokens_per_s"] / 2, rel=0.02)
    told = json.loads((made.folder / "metrics.jsonl").read_text())["extract"]
    assert told["of_forecast"] == pytest.approx(told["tokens_per_s"] / foretold["forecast_tokens_per_s"] / 2, rel=0.02)
    said = made.log_file.read_text()
    assert "side by side" in said
    assert f"2 engines of {foretold['forecast_tokens_per_s']:,.0f} tokens/s each" in said
    again, hit = extracted(1)
    assert again == metrics
    assert not list(hit.folder.glob("engine*.log"))


def test_a_slow_engine_holds_up_no_other(opened: Callable[..., Any], tmp_path: Path) -> None:
    samples = marked(random_samples([29] * 400), 30, WAITS)
    capture = planned(tmp_path / "states", samples)
    done: list[float] = []

    def three_quarters(count: float) -> None:
        done.append(count)
        if sum(done) > 29 * 300:
            (tmp_path / "word").touch()

    with opened(2) as engines:
        run(capture, engines, samples, three_quarters)
        rows = sorted(rank["rows_written"] for rank in engines.last_capture["ranks"])
    assert rows[0] < rows[1] / 2
    assert_whole(capture, samples)


def test_an_engine_that_dies_ends_the_others_within_seconds(opened: Callable[..., Any], tmp_path: Path) -> None:
    """One dies, the other hangs in a batch. A single one goes on from there."""
    samples = marked(marked(random_samples([29] * 100), 60, DIES), 70, HANGS)
    capture = planned(tmp_path / "states", samples)
    started = time.monotonic()
    with opened(2) as engines:
        with pytest.raises(EngineError) as caught:
            run(capture, engines, samples)
        message = str(caught.value)
        assert message.startswith(("engine-0 of 2: ", "engine-1 of 2: "))
        assert f"last lines of {tmp_path / '2-'}{message[7]}.log:" in message
        alive = [engine._process._process.poll() is None for engine in engines.engines]
        assert alive == [False, False]
    assert time.monotonic() - started < 60
    samples[60].input_ids[-1] = samples[70].input_ids[-1] = 5
    with opened(1) as engine:
        assert not isinstance(engine, VllmEngines)
        run(capture, engine, samples)
    assert_whole(capture, samples)


def test_an_engine_that_dies_when_all_is_done_is_told(opened: Callable[..., Any], tmp_path: Path) -> None:
    """It leaves no report; what it made is kept."""
    samples = random_samples([29] * 8)
    capture = planned(tmp_path / "states", samples)
    done: list[float] = []
    with opened(1) as engine:

        def end(count: float) -> None:
            done.append(count)
            if sum(done) == 29 * 8:
                engine._process.kill()
                engine._process._process.wait()

        with pytest.raises(EngineError, match="the engine ended when its last shard was made; all shards are kept"):
            run(capture, engine, samples, end)
    assert_whole(capture, samples)


def test_ctrl_c_ends_all_engines_at_once(opened: Callable[..., Any], tmp_path: Path) -> None:
    samples = marked(marked(random_samples([29] * 12), 0, HANGS), 11, HANGS)
    capture = planned(tmp_path / "states", samples)
    with opened(2) as engines:
        started = time.monotonic()
        interrupt_after(1.0)
        with pytest.raises(KeyboardInterrupt):
            run(capture, engines, samples)
    assert time.monotonic() - started < 60


def test_whoever_reads_may_break_off(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Too many lost samples are found by the reader, while the engines go on."""
    samples = random_samples([29] * 60 + [256] * 2 + [29] * 60)
    capture = planned(tmp_path / "states", samples)
    started = time.monotonic()
    with (
        opened(2) as engines,
        pytest.raises(StageFailed, match=r"1 samples could not be captured \(longer_than_engine 1"),
    ):
        run(capture, engines, samples)
    assert time.monotonic() - started < 60


def test_all_load_at_the_same_time_and_one_speaks(
    opened: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "loading").mkdir()
    # Each waits for the others.
    load = f"""
from pathlib import Path
folder = Path({str(tmp_path / "loading")!r})
(folder / str(NUMBER)).touch()
while len(list(folder.iterdir())) < 3:
    time.sleep(0.05)
"""
    with caplog.at_level("DEBUG", "eagle3"), opened(3, load):
        pass
    lines = [(record.levelname, record.message) for record in caplog.records if "vllm" in record.message]
    said = [message for level, message in lines if level == "INFO"]
    assert [message for message in said if "engines loaded" in message] == [
        f"vllm: {count} of 3 engines loaded" for count in (1, 2, 3)
    ]
    assert said.count("vllm: prefill is FLASH_ATTN") == 1
    assert len([message for message in said if "Stub loaded in" in message]) == 1
    assert lines.count(("DEBUG", "vllm: prefill is FLASH_ATTN")) == 2
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["3-0.log", "3-1.log", "3-2.log"]


def test_one_that_does_not_load_ends_the_loads_of_the_others(opened: Callable[..., Any]) -> None:
    """E5, E11: within seconds, with its own last words."""
    started = time.monotonic()
    load = "print('no GPU left', flush=True) or os._exit(3) if NUMBER == 1 else time.sleep(600 * NUMBER)"
    with pytest.raises(EngineError, match=r"^engine-1 of 3: vllm: the engine's process exited with 3[\s\S]*no GPU"):
        opened(3, load)
    assert time.monotonic() - started < 60


def test_ctrl_c_while_they_load_ends_them_all(opened: Callable[..., Any]) -> None:
    started = time.monotonic()
    interrupt_after(2.0)
    with pytest.raises(KeyboardInterrupt):
        opened(2, "time.sleep(600)")
    assert time.monotonic() - started < 60


def test_answers_do_not_depend_on_the_number_of_engines(opened: Callable[..., Any], tmp_path: Path) -> None:
    """All engines answer; each answer is that of its prompt, at the seed of its key."""
    prompts = [Prompt(f"p{n}", [n, 7, n % 5], n % 4) for n in range(60)]
    for temperature in (0.0, 0.7):
        expected = {}
        for prompt in prompts:
            seed = sampling_parameters(prompt, temperature, 11, [2])["seed"] or 0
            expected[prompt.key] = [sum(prompt.input_ids), seed][: prompt.max_new_tokens]
        for count in (3, 1):
            with opened(count) as engines:
                answers = list(engines.generate(prompts, temperature=temperature, seed=11, stop_ids=[2]))
            assert {answer.key: answer.token_ids for answer in answers} == expected
            assert len(answers) == len(prompts)
    for number in range(3):
        assert "answered" in (tmp_path / f"3-{number}.log").read_text()
