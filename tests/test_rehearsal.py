"""What a rehearsal works out without an engine: few layers, the spread of lengths, memory from headers alone."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3.artifacts import Artifacts
from eagle3.checkpoint import open_target
from eagle3.config import Config, LayersConfig, ModelConfig
from eagle3.errors import RequestError
from eagle3.memory import Footprint, key_value_bytes, weight_bytes
from eagle3.rehearsal import Extraction, rehearsal_samples, rehearse, shrunken_checkpoint
from eagle3.runs import Run
from eagle3.stages import rehearse as rehearse_stage
from tests.stub import Stub
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


def test_wrong_backends_are_found(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {**EXPECT_NOTHING, "attention_backend": "FLASH_ATTN"}
    cfg, target = Stub(tiny_target, tmp_path, monkeypatch).configured(expected_backends=expected)
    outcome = rehearse(cfg, target, Extraction((1, 3, 5, 6), None, 10**9), tmp_path / "made", tmp_path / "engine.log")
    assert not outcome.passed
    assert outcome.checks[-1].name == "engine"
    assert "attention_backend: expected FLASH_ATTN, found CPU_ATTN" in outcome.checks[-1].detail


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
