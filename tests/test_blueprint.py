"""What a new drafter's sizes come from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config

from eagle3.adapters.deepseek_v3 import DeepseekV3Adapter
from eagle3.adapters.kimi_k25 import KimiK25Adapter
from eagle3.blueprint import drafter_shape
from eagle3.config import DrafterConfig
from eagle3.errors import RequestError


def kimi() -> Any:
    """Kimi-K2.5's published sizes."""
    text = DeepseekV3Config(
        num_hidden_layers=61,
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=64,
        rope_parameters={"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "mscale_all_dim": 1.0},
    )
    config = SimpleNamespace(architectures=["KimiK25ForConditionalGeneration"], text_config=text)
    adapter = KimiK25Adapter()
    return SimpleNamespace(adapter=adapter, config=config, shape=adapter.shape(config))


def test_latent_attention_takes_its_sizes_from_the_target() -> None:
    """FACTS section 5: the ranks 1536 and 512, and heads of 128 + 64 for queries and 128 for values."""
    shape = drafter_shape(DrafterConfig(name="mla", attention="mla"), kimi(), (2, 30, 58), 163840)
    assert (shape.q_lora_rank, shape.kv_lora_rank) == (1536, 512)
    assert (shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim) == (128, 64, 128)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (64, 64, 192)
    assert shape.intermediate_size == 18432


def test_sizes_that_are_given_win() -> None:
    cfg = DrafterConfig(name="mla", attention="mla", kv_lora_rank=256, num_attention_heads=32, intermediate_size=9000)
    shape = drafter_shape(cfg, kimi(), (2, 30, 58), 32000)
    assert (shape.kv_lora_rank, shape.num_key_value_heads, shape.intermediate_size) == (256, 32, 9000)


def test_a_dense_drafter_has_no_latent() -> None:
    shape = drafter_shape(DrafterConfig(name="dense"), kimi(), (2, 30, 58), 163840)
    assert (shape.attention, shape.q_lora_rank, shape.head_dim, shape.num_key_value_heads) == ("dense", 0, 128, 64)


def test_a_target_without_a_rank_of_queries_asks_for_one() -> None:
    """DeepSeek-V2-Lite: its queries have no latent, and a latent drafter's must."""
    config = DeepseekV2Config(q_lora_rank=None, num_hidden_layers=27, hidden_size=2048, num_attention_heads=16)
    config.architectures = ["DeepseekV2ForCausalLM"]
    adapter = DeepseekV3Adapter()
    lite: Any = SimpleNamespace(adapter=adapter, config=config, shape=adapter.shape(config))
    with pytest.raises(RequestError, match=r"which has no q_lora_rank to take over; set drafter\.q_lora_rank"):
        drafter_shape(DrafterConfig(name="mla", attention="mla"), lite, (2, 13, 24), 32000)
    shape = drafter_shape(DrafterConfig(name="mla", attention="mla", q_lora_rank=768), lite, (2, 13, 24), 32000)
    assert (shape.q_lora_rank, shape.kv_lora_rank, shape.head_dim) == (768, 512, 192)
    dense = drafter_shape(DrafterConfig(name="dense"), lite, (2, 13, 24), 32000)
    assert (dense.num_attention_heads, dense.num_key_value_heads, dense.head_dim) == (16, 16, 128)
