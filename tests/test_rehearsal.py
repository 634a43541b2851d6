"""What a rehearsal works out without an engine: few layers, the spread of lengths, memory from headers alone; and its
verdicts, with a stub of vLLM for the engine."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3.artifacts import Artifacts
from eagle3.checkpoint import open_target
from eagle3.config import Config, LayersConfig, ModelConfig, RehearseConfig, StoreConfig
from eagle3.errors import RequestError
from eagle3.memory import Footprint, key_value_bytes, weight_bytes
from eagle3.rehearsal import Extraction, Rehearsal, rehearsal_samples, rehearse, shrunken_checkpoint
from eagle3.runs import Run
from eagle3.stages import rehearse as rehearse_stage
from tests.stub import Stub, changed, two_ranks
from tests.vllm.checkpoints import gpt_oss
from tests.vllm.engines import EXPECT_NOTHING
from tests.vllm.hollow import kimi_k25

EXPERTS = 24


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kimi-K2.5 with fewer experts, its data a hole."""
    cfg = Config()
    adapter = {"_target_": "eagle3.adapters.kimi_k25.KimiK25Adapter"}
    path = kimi_k25(tmp_path_factory.mktemp("kimi"), n_routed_experts=EXPERTS)
    cfg.model = ModelConfig(name="kimi_k25", path=str(path), adapter=adapter, trust_remote_code=True)
    return open_target(cfg)


def test_kimis_weights_are_counted_for_each_gpu(kimi: Any) -> None:
    """Counted by hand: experts, attention and tables are divided by 8, routers, norms and `_a_` projections are not."""
    hidden, width, experts = 7168, 2048, EXPERTS
    matrix = hidden * width
    expert = 3 * (matrix // 2 + matrix // 32 * 2 + 8)
    attention = 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * hidden
    divided = 60 * (experts * expert + 3 * matrix * 2) + 61 * attention * 2 + 3 * hidden * 18432 * 2
    divided += 2 * 163840 * hidden * 2
    small = 61 * (hidden * 1536 + hidden * 576) * 2 + 60 * (experts * hidden * 2 + experts * 4)
    small += 61 * (2 * hidden + 1536 + 512) * 2 + hidden * 2
    assert weight_bytes(kimi, 1) == divided + small
    assert weight_bytes(kimi, 8) == pytest.approx(divided / 8 + small, abs=1e4)


def test_kimis_keys_and_values_are_latent(kimi: Any) -> None:
    """70 KB a token on every rank, as FlashAttention MLA keeps them."""
    assert key_value_bytes(kimi, 8) == (512 + 64) * 2 * 61 == 70272


def test_a_footprint_says_what_it_is_made_of() -> None:
    need = Footprint(weights=76_000_000_000, key_values=1_000_000_000, working=5_500_000_000, context=1_500_000_000)
    assert need.total == 84_000_000_000
    assert need.describe() == "weights 76.0, keys and values 1.0, a batch 5.5, context 1.5"


def test_too_little_memory_says_how_much_is_missing_and_what_to_change() -> None:
    need = Footprint(weights=90_000_000_000, key_values=1_000_000_000, working=5_000_000_000, context=1_000_000_000)
    assert need.verdict(100_000_000_000)[0]
    fits, detail = need.verdict(86_400_000_000)
    assert not fits
    assert detail.startswith("97.0 of 86.4 GB a GPU (weights 90.0")
    assert "10.6 GB too much: raise hardware.tensor_parallel_size or" in detail


def test_kimi_shrinks_to_a_dense_and_two_expert_layers(kimi: Any, tmp_path: Path) -> None:
    depth = shrunken_checkpoint(kimi, captured=4, folder=tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    text = config["text_config"]
    assert depth == text["num_hidden_layers"] == 3
    assert text["first_k_dense_replace"] == 1
    assert text["hidden_size"] == 7168
    assert text["quantization_config"] == config["quantization_config"]
    assert not list((tmp_path / "model").glob("*.safetensors*"))


def test_any_number_of_layers_may_stand_in_for_the_target(kimi: Any, tmp_path: Path) -> None:
    assert shrunken_checkpoint(kimi, captured=4, folder=tmp_path / "all", layers=61) == 61
    assert json.loads((tmp_path / "all" / "config.json").read_text())["text_config"]["num_hidden_layers"] == 61
    for layers in (2, 62):
        words = rf"rehearse.layers: found {layers}, expected 3 \(every kind of layer, and 4 states\) to 61"
        with pytest.raises(RequestError, match=words):
            shrunken_checkpoint(kimi, captured=4, folder=tmp_path / str(layers), layers=layers)


def test_more_states_take_more_layers(kimi: Any, tmp_path: Path) -> None:
    assert shrunken_checkpoint(kimi, captured=7, folder=tmp_path / "model") == 6


def test_lists_with_an_entry_a_layer_are_cut(tmp_path: Path) -> None:
    cfg = Config()
    (tmp_path / "whole").mkdir()
    path = gpt_oss(tmp_path / "whole")
    cfg.model = ModelConfig(name="g", path=str(path), adapter={"_target_": "eagle3.adapters.gpt_oss.GptOssAdapter"})
    shrunken_checkpoint(open_target(cfg), captured=4, folder=tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (tmp_path / "model" / "tokenizer.json").is_file()


@pytest.fixture
def rehearsed(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rehearsal]:
    """Rehearses the capture of four states of 100 samples of 20 tokens, with a stub that does `load` at first."""

    def act(
        load: str = "",
        engines: int = 1,
        layers: int = 6,
        lengths: tuple[int, ...] = (20,) * 100,
        free_bytes: int = 10**9,
        batches: int = 8,
        version: str = "0.32.0",
        target: Path = tiny_target,
        folder: Path = tmp_path / "made",
        **hardware: Any,
    ) -> Rehearsal:
        cfg, opened = Stub(target, tmp_path, monkeypatch, version).configured(engines, load, **hardware)
        cfg.store, cfg.rehearse = StoreConfig(dtype="float32"), RehearseConfig(layers=layers, batches=batches)
        extraction = Extraction((1, 3, 5, 6), lengths, free_bytes)
        return rehearse(cfg, opened, extraction, folder, tmp_path / "engine.log")

    return act


def failed(outcome: Rehearsal) -> dict[str, str]:
    assert outcome.passed == all(check.passed for check in outcome.checks)
    return {check.name: check.detail for check in outcome.checks if not check.passed}


def details(outcome: Rehearsal) -> dict[str, str]:
    return {check.name: check.detail for check in outcome.checks}


# A rehearsal's second pass is the one in which ranks take each other's part.
TURNED = changed("eagle3_arm", "setattr(llm, 'turned', given[2]['rotation']) or old()")
TWICE = TURNED + changed("write", "before(given[0], given[1] * (1 + llm.turned))")
# The final state's first value, but for that of the first samples, which are checked before.
DAMAGED = """
def damaged(name, ids, write=self.write, llm=self):
    write(name, ids)
    path, start = llm.shards[name.rpartition("-")[0]]["files"]["6"]
    if "/shard-first-" not in path:
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(b"1234")
self.write = damaged
"""
LOST = changed("eagle3_poll", "(lambda a: {**a, 'finished': [{**f, 'rejected': [0]} for f in a['finished']]})(old())")


def test_a_good_rehearsal_passes_all_its_checks(rehearsed: Callable[..., Rehearsal]) -> None:
    outcome = rehearsed()
    assert failed(outcome) == {}
    found = details(outcome)
    assert list(found) == [
        *("checkpoint", "tokenizer", "vllm version", "host memory", "engine", "layers", "backends"),
        *("states", "store", "repeatable", "disk", "time"),
    ]
    assert found["layers"] == "6 of 6 x Layer"
    assert found["states"] == "260 tokens, finite, ids as sent"
    # Four states of 48 values in float32.
    assert found["store"] == "0.00 GB written and read back, 768 B a token in 4 states"
    assert found["repeatable"] == "100.0% of the rows to the bit, largest relative difference 0.0e+00"


@pytest.mark.parametrize(
    ("load", "name", "words"),
    [
        (changed("eagle3_describe", "{**old(), 'num_layers': 5}"), "layers", "^5 of 6 x Layer$"),
        (LOST, "states", r"^of \d+ samples lost: 1 non_finite$"),
        (DAMAGED, "store", r"final\.safetensors: has damaged rows \(checksum of sample"),
        (TWICE, "repeatable", r"^0\.0% of the rows to the bit, largest relative difference [\d.]+e[+-]0"),
        (two_ranks() + TWICE, "2 ranks agree", r"^0\.0% of the rows to the bit"),
    ],
)
def test_what_a_rehearsal_finds_wrong(rehearsed: Callable[..., Rehearsal], load: str, name: str, words: str) -> None:
    """Each of its verdicts alone: the others pass."""
    found = failed(rehearsed(load))
    assert list(found) == [name]
    assert re.search(words, found[name]), found


def test_two_ranks_that_agree_pass(rehearsed: Callable[..., Rehearsal]) -> None:
    outcome = rehearsed(two_ranks())
    assert failed(outcome) == {}
    assert details(outcome)["2 ranks agree"].startswith("100.0% of the rows to the bit")


def test_a_single_row_that_differs_is_not_rounded_away(rehearsed: Callable[..., Rehearsal]) -> None:
    """One of 2,560 tokens."""
    once = "before(given[0], given[1] + (llm.turned and given[0].endswith('-0')) * 1e-3 * np.eye(1, 20)[0])"
    outcome = rehearsed(TURNED + changed("write", once), batches=80)
    assert outcome.numbers["tokens"] == 2560
    assert failed(outcome) == {}
    assert details(outcome)["repeatable"].startswith("99.9% of the rows to the bit, largest relative difference ")


def test_a_disk_too_small_by_a_byte_is_found(rehearsed: Callable[..., Rehearsal]) -> None:
    size = rehearsed().numbers["forecast_bytes"]
    assert size == pytest.approx(2000 * 768, rel=0.3)
    assert failed(rehearsed(free_bytes=size)) == {}
    assert failed(rehearsed(free_bytes=size - 1)) == {"disk": "0.0 GB of states, 0.0 GB free"}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokenizer", {}, "tokenizer"),
        ("vllm version", {"version": "0.99.0"}, "^0.99.0 is outside the tested range 0.26 to 0.32; its seams changed"),
        (
            "host memory",
            {"lengths": (10**13,), "folder": Path("/dev/shm/eagle3-rehearsal")},
            r"^output_dir: the capture needs 7680\.0 TB \(buffers of all ranks 73\.7 kB, states in memory",
        ),
    ],
)
def test_what_is_found_before_an_engine_starts(
    rehearsed: Callable[..., Rehearsal],
    tiny_target: Path,
    tmp_path: Path,
    name: str,
    change: dict[str, Any],
    words: str,
) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    if name == "tokenizer":
        for file in target.glob("tokenizer*"):
            file.unlink()
    outcome = rehearsed(target=target, **change)
    found = failed(outcome)
    assert list(found) == [name]
    assert re.search(words, found[name]), found
    assert "engine" not in details(outcome)
    assert not (tmp_path / "engine.log").exists()


def test_memory_and_time_of_all_layers_are_foretold_from_a_few(
    rehearsed: Callable[..., Rehearsal], tiny_target: Path
) -> None:
    """Counted by hand: two ranks that report their memory, 4 of 6 layers."""
    load = changed(
        "eagle3_describe",
        "{**old(), 'num_layers': 4, 'weight_bytes': 9 * 10**9, 'context_bytes': 5 * 10**9,"
        " 'memory_total_bytes': 41 * 10**9}",
    )
    load += changed(
        "eagle3_disarm",
        "{**old(), 'needed_bytes': 60 * 10**9, 'device_bytes': 70 * 10**9, 'key_value_bytes': 20 * 10**9}",
    )
    load += changed("eagle3_poll", "{**old(), 'model_s': llm.rows / 10}")
    load += two_ranks(
        needed_bytes=55 * 10**9, weight_bytes=8 * 10**9, context_bytes=4 * 10**9, memory_total_bytes=40 * 10**9
    )
    outcome = rehearsed(load, engines=2, layers=4, tensor_parallel_size=2)
    assert failed(outcome) == {}
    numbers, found = outcome.numbers, details(outcome)
    # On each of two GPUs: half of the matrices of 48 x 48, 24 x 48 and 96 x 48, norms wholly.
    vocab = json.loads((tiny_target / "config.json").read_text())["vocab_size"]
    layer, tables = 2 * 48 * 48 + 2 * 24 * 48 + 3 * 96 * 48, 2 * vocab * 48
    six, four = (4 * ((n * layer + tables) // 2 + n * 2 * 48 + 48) for n in (6, 4))
    # One head of 12, keys and values in float32 in 6 layers, for a batch of 32 tokens and a document of 256.
    keys = 2 * 12 * 4 * 6 * (32 + 256)
    # The first rank's batch: 60 needed, but 20 for keys and values, 9 for weights, 5 for libraries.
    assert numbers["working_bytes"] == 26 * 10**9
    assert numbers["key_value_bytes_per_gpu"] == keys
    assert numbers["memory_bytes_per_gpu"] == six + keys + 31 * 10**9
    assert numbers["rehearsed_memory_forecast_bytes"] == four + keys * 4 // 6 + 31 * 10**9
    assert numbers["rehearsed_memory_bytes"] == 40 * 10**9 + keys * 4 // 6
    # A tenth of the smaller GPU is left to others.
    parts = "(weights 0.0, keys and values 0.0, a batch 26.0, context 5.0)"
    assert found["memory"] == f"31.0 of 36.0 GB a GPU {parts}"
    assert found["memory measured"] == "40.0 GB with these 4 layers, foretold 31.0 (+29.0%)"
    # 10 tokens/s at 4 layers, two engines.
    assert (numbers["model_tokens_per_s"], numbers["forecast_tokens_per_s"]) == (10, 7)
    assert numbers["forecast_seconds"] == 150.0
    assert found["time"].startswith("about 2m30s for 2,000 tokens at 2 engines of 7 tokens/s each: the model alone 7, ")
    small = rehearsed(load, layers=4, tensor_parallel_size=2, engine_options={"gpu_memory_utilization": 0.7})
    assert list(failed(small)) == ["memory"]
    assert failed(small)["memory"].startswith(f"31.0 of 28.0 GB a GPU {parts}; 3.0 GB too much: raise ")


def test_wrong_backends_are_found(rehearsed: Callable[..., Rehearsal]) -> None:
    outcome = rehearsed(expected_backends={**EXPECT_NOTHING, "attention_backend": "FLASH_ATTN"})
    assert outcome.checks[-1].name == "engine"
    assert "attention_backend: expected FLASH_ATTN, found CPU_ATTN" in failed(outcome)["engine"]


def test_of_two_runs_of_the_same_settings_one_rehearses(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both would use the same folder and the same GPUs."""
    cfg, target = Stub(tiny_target, tmp_path, monkeypatch).configured()
    layers = LayersConfig(name="ids", ids=[1, 3, 5])
    cfg = dataclasses.replace(cfg, output_dir=str(tmp_path / "outputs"), layers=layers)
    run = Run.start(cfg, [])
    artifact = rehearse_stage._artifact(cfg, run, target, rehearse_stage._layer_ids(cfg, target))
    other, found = Artifacts(run.artifacts.root), []
    waiting = threading.Thread(target=lambda: found.append(rehearse_stage.perform(cfg, run, target, None)))
    with other.lock(artifact):
        waiting.start()
        until = time.monotonic() + 60
        while "waiting for it" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        other.begin(artifact)
        other.commit(artifact, {"metrics": {"passed": True, "seconds": 71.0}})
    waiting.join()
    run.finish("done", 0)
    assert found == [{"passed": True, "seconds": 71.0}]


def test_a_few_documents_have_the_spread_of_all() -> None:
    lengths = list(range(10, 1010))
    samples = rehearsal_samples(lengths, 400, tokens=20_000, longest=800)
    found = np.array([len(sample.input_ids) for sample in samples])
    assert 20_000 <= found.sum() <= 20_800
    assert found.max() == 800
    assert abs(np.median(found) - 500) < 60
    assert len({sample.id for sample in samples}) == len(samples)
    assert max(int(sample.input_ids.max()) for sample in samples) < 400


def test_without_prepared_samples_lengths_spread_up_to_the_longest() -> None:
    found = [len(sample.input_ids) for sample in rehearsal_samples([], 400, tokens=30_000, longest=2048)]
    assert min(found) <= 64
    assert max(found) == 2048
