"""The real vLLM on the CPU around a tiny checkpoint, and Hugging Face's states of the same samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.checkpoint import Target, open_target
from eagle3.config import Config, HardwareConfig, ModelConfig
from eagle3.engines.taps import StateTaps
from eagle3.engines.vllm import VllmEngine
from eagle3.tokens import Sample

ADAPTERS = {
    "llama": "llama.LlamaAdapter",
    "qwen3": "qwen.QwenAdapter",
    "qwen3_moe": "qwen.QwenAdapter",
    "deepseek_v2": "deepseek_v3.DeepseekV3Adapter",
    "deepseek_v3": "deepseek_v3.DeepseekV3Adapter",
    "kimi_k2": "kimi_k2.KimiK2Adapter",
    "kimi_k25": "kimi_k25.KimiK25Adapter",
    "gpt_oss": "gpt_oss.GptOssAdapter",
}
EXPECT_NOTHING = dict.fromkeys(("attention", "prefill", "quantization", "moe", "moe_bits", "moe_group_size"))
SPOILT = 390
"""A token whose embedding the tests spoil; no sample has it unless it should."""


def configured(family: str, folder: Path, **hardware: Any) -> tuple[Config, Target]:
    """A config for the checkpoint in `folder`, and the target opened."""
    cfg = Config()
    adapter = {"_target_": f"eagle3.adapters.{ADAPTERS[family]}"}
    cfg.model = ModelConfig(name=family, path=str(folder), adapter=adapter, trust_remote_code=True)
    settings = {"batch_tokens": 512, "threads": 1, "expected_backends": EXPECT_NOTHING, **hardware}
    cfg.hardware = HardwareConfig(name="cpu_vllm", engine="vllm", accelerator="cpu", **settings)
    cfg.dataset.max_length, cfg.dataset.max_new_tokens = 256, 32
    return cfg, open_target(cfg)


def start(family: str, folder: Path, log_file: Path, **hardware: Any) -> VllmEngine:
    """The engine, loaded."""
    cfg, target = configured(family, folder, **hardware)
    return VllmEngine(cfg, target, log_file=log_file)


def make_samples(lengths: Iterable[int], seed: int = 0, shared: int = 0) -> list[Sample]:
    """Random documents that begin with the same `shared` tokens."""
    random = np.random.default_rng(seed)
    beginning = random.integers(3, SPOILT - 1, shared)
    made: list[Sample] = []
    for number, length in enumerate(lengths):
        ids = np.concatenate([beginning, random.integers(3, SPOILT - 1, length)]).astype(np.int32)
        made.append(Sample(f"{seed}-{number}", ids, np.ones(len(ids), dtype=bool), "train", str(number)))
    return made


def hugging_face(
    target: Target, samples: Sequence[Sample], dtype: torch.dtype = torch.float32
) -> dict[str, list[torch.Tensor]]:
    """States at ids 0 ... n of each sample, one at a time, computed in `dtype` on the CPU."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=dtype).eval()
    ids = range(target.shape.num_layers + 1)
    found: dict[str, list[torch.Tensor]] = {}
    for sample in samples:
        with StateTaps(target.adapter.layers(model), target.adapter, ids) as caught, torch.no_grad():
            model(torch.from_numpy(sample.input_ids[None].astype(np.int64)))
            found[sample.id] = [caught[k][0] for k in ids]
    return found


def captured(engine: VllmEngine, samples: Sequence[Sample], layer_ids: Iterable[int]) -> dict[str, dict[int, Any]]:
    """States by sample id and layer id."""
    return {found.sample_id: found.states for found in engine.capture(samples, list(layer_ids))}


def assert_same(
    found: dict[str, dict[int, Any]], expected: dict[str, list[torch.Tensor]], samples: Sequence[Sample]
) -> None:
    """Every state of every sample agrees to the last bits of float32."""
    for sample in samples:
        for k, state in found[sample.id].items():
            reference = expected[sample.id][k]
            assert state.shape == reference.shape, (sample.id, k)
            assert (state - reference).abs().max() <= 1e-5 * reference.abs().max().clamp_min(1.0), (sample.id, k)


def assert_same_bits(
    found: dict[str, dict[int, Any]],
    extracted: dict[tuple[int, ...], torch.Tensor],
    samples: Sequence[Sample],
    layer_ids: Sequence[int],
) -> None:
    """Every state of every sample is what vLLM extracted of these layers (states [T, K, H] by token ids)."""
    for sample in samples:
        states = extracted[tuple(sample.input_ids.tolist())]
        for place, k in enumerate(layer_ids):
            assert torch.equal(found[sample.id][k], states[:, place]), (sample.id, k)
