"""Adapters: each family's answers about its real config, refusals, and the registry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from eagle3.adapter import Adapter, families
from eagle3.adapters.deepseek_v3 import DeepseekV3Adapter
from eagle3.adapters.kimi_k25 import KimiK25Adapter
from eagle3.adapters.llama import LlamaAdapter
from eagle3.adapters.qwen import QwenAdapter
from eagle3.errors import RequestError
from tests import test_engine_transformers
from tests.vllm import test_states
from tests.vllm.engines import ADAPTERS


def published(config: Any, architecture: str) -> Any:
    config.architectures = [architecture]
    return config


LLAMA_31_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": [128001, 128008, 128009],
}


def test_llama_shape_with_scaled_rope():
    shape = LlamaAdapter().shape(published(LlamaConfig(**LLAMA_31_8B), "LlamaForCausalLM"))
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.num_key_value_heads) == (32, 4096, 128, 8)
    assert shape.rope_theta == 500000.0
    assert shape.rope_scaling is not None
    assert (shape.rope_scaling["rope_type"], shape.rope_scaling["factor"]) == ("llama3", 8.0)
    assert shape.eos_token_ids == (128001, 128008, 128009)
    assert LlamaAdapter().drafter_defaults(shape)["num_key_value_heads"] == 8


def test_plain_rope_is_no_scaling():
    shape = LlamaAdapter().shape(published(MistralConfig(), "MistralForCausalLM"))
    assert shape.rope_scaling is None
    assert shape.architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("config", "architecture"), [(Qwen2Config(), "Qwen2ForCausalLM"), (Qwen3Config(), "Qwen3ForCausalLM")]
)
def test_qwen_shape(config: Any, architecture: str):
    shape = QwenAdapter().shape(published(config, architecture))
    assert shape.hidden_size == config.hidden_size
    assert shape.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def test_deepseek_head_dim_is_not_its_rotary_part():
    """FACTS section 5: the config's head_dim is 64, which a dense drafter must not copy."""
    config = published(DeepseekV3Config(), "DeepseekV3ForCausalLM")
    shape = DeepseekV3Adapter().shape(config)
    assert shape.head_dim == config.v_head_dim == 128
    defaults = DeepseekV3Adapter().drafter_defaults(shape)
    assert defaults["num_key_value_heads"] == defaults["num_attention_heads"] == config.num_attention_heads


def test_kimi_reads_the_text_config_inside_the_wrapper():
    text = DeepseekV3Config(
        num_hidden_layers=61,
        vocab_size=163840,
        hidden_size=7168,
        rope_parameters={"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "beta_fast": 32.0},
    )
    wrapper = SimpleNamespace(architectures=["KimiK25ForConditionalGeneration"], text_config=text)
    adapter = KimiK25Adapter()
    adapter.check(wrapper, "config.json")
    shape = adapter.shape(wrapper)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (61, 7168, 163840)
    assert (shape.rope_theta, shape.rope_scaling is not None) == (50000.0, True)
    assert adapter.weight_names.head == "language_model.lm_head.weight"
    assert adapter.layers_path == "language_model.model.layers"
    assert adapter.expected_backends()["moe_bits"] == 4


def test_layers_path_is_followed_through_a_wrapper():
    model = torch.nn.Module()
    model.language_model = torch.nn.Module()
    model.language_model.model = torch.nn.Module()
    model.language_model.model.layers = torch.nn.ModuleList([torch.nn.Identity()])
    assert len(KimiK25Adapter().layers(model)) == 1
    with pytest.raises(RequestError, match=r"no `model\.layers` in Module"):
        LlamaAdapter().layers(model)


def test_kimi_refuses_a_tokenizer_that_splits_think(monkeypatch: pytest.MonkeyPatch, tiny_target: Any):
    """D6: a generic class that breaks <think> into pieces spoils every sample; the message names the class."""
    with pytest.raises(RequestError, match=r"TokenizersBackend makes \d+ ids of .*trust_remote_code=true"):
        KimiK25Adapter().tokenizer(tiny_target)


def test_another_family_is_refused():
    config = published(LlamaConfig(), "GemmaForCausalLM")
    with pytest.raises(RequestError, match=r"^here: found architectures \['GemmaForCausalLM'\].*stage=adapters"):
        LlamaAdapter().check(config, "here")
    with pytest.raises(RequestError, match=r"none of \['deepseek_v3', .*'qwen'\] answers for it.*README.md to add one"):
        LlamaAdapter().check(config, "here")
    with pytest.raises(RequestError, match=r"for the adapter 'llama'; gpt_oss is the one for it"):
        LlamaAdapter().check(published(LlamaConfig(), "GptOssForCausalLM"), "here")


def test_residual_of_each_kind_of_layer_output():
    """Hugging Face layers return the stream, or a tuple that starts with it; vLLM's return its two summands."""
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    adapter = LlamaAdapter()
    assert adapter.residual(hidden) is hidden
    assert adapter.residual((hidden,)) is hidden
    assert adapter.residual((hidden, None)) is hidden
    assert adapter.residual((hidden, torch.ones(2, 4, 3, 3))) is hidden
    assert adapter.residual((hidden, residual)).tolist() == [[3.0] * 3] * 2


def test_final_norm_is_rms_norm_in_float32():
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 100
    weight = torch.rand(8, generator=torch.Generator().manual_seed(1))
    wide = states.double()
    expected = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    found = LlamaAdapter().final_norm(states, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    halves = LlamaAdapter().final_norm(states.bfloat16(), weight.bfloat16(), 1e-5)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.double(), expected, rtol=2e-2, atol=2e-2)


def test_a_family_ran_where_its_states_are_compared_and_nowhere_else():
    """`stage=adapters` says where each family ran: gpt-oss was said to run in an engine that refused it."""
    compared = {
        "transformers": {adapter for adapter, _ in test_engine_transformers.FAMILIES.values()},
        "vllm": {ADAPTERS[family] for family in ("llama", *test_states.FAMILIES)},
    }
    for family in families().values():
        place = f"{family.__module__.rpartition('.')[2]}.{family.__name__}"
        ran = {words.split()[0] for words in family.ran_on if words.endswith("CPU")}
        assert ran == {engine for engine, adapters in compared.items() if place in adapters}, family.name
        assert ran <= {*family.engines}


def test_families_are_found_by_name_and_describe_themselves():
    found = families()
    assert {"llama", "qwen", "deepseek_v3", "kimi_k25"} <= set(found)
    for name, family in found.items():
        adapter = family()
        assert isinstance(adapter, Adapter)
        assert adapter.describe()["name"] == name
        assert adapter.describe()["architectures"]
