"""What each server reads, as rules: refusals with their reason, the meaning of layer ids, and SGLang's loader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.errors import RequestError
from eagle3.export import export_drafter
from eagle3.servers import RELEASES, check, nested_ids, refusals, release
from tests.test_export import H, V, make_drafter, make_target

DEEPSEEK = "DeepseekV3ForCausalLM"


def test_a_version_leads_to_its_rules() -> None:
    assert release("vllm", "0.32.1").oldest == release("vllm", None).oldest == (0, 26)
    assert release("vllm", "0.15.0").counts == (3,)
    with pytest.raises(RequestError, match=r"export\.engine_version: found '0\.11'.*from 0\.26 on, from 0\.14 on"):
        release("vllm", "0.11")
    with pytest.raises(RequestError, match=r"ends in 0 needs quotes: 'export\.engine_version=\"0\.20\"'"):
        release("vllm", "0.2")  # what Hydra makes of 0.20


@pytest.mark.parametrize(
    ("engine", "version", "shape", "target", "words"),
    [
        ("vllm", "0.15", {"layer_ids": (2, 20, 30, 58)}, {}, r"4 states .* sizes fc for 3"),
        ("vllm", "0.15", {"fc_norm": True}, {}, r"drafter\.fc_norm: found true, but vllm 0\.15"),
        ("vllm", None, {}, {"architecture": "GPT2LMHeadModel"}, r"no hidden states of GPT2LMHeadModel, only of Llama"),
        ("sglang", None, {"norm_before_residual": True}, {}, r"drafter\.norm_before_residual: found true, but sglang"),
        ("sglang", None, {"norm_before_fc": True}, {}, r"drafter\.norm_before_fc"),
        ("sglang", None, {"layer_ids": (2, 30, 61)}, {}, r"found 61, the output of the last layer"),
        ("sglang", None, {"layer_ids": (0, 30, 58)}, {}, r"found 0, the embedding"),
        ("sglang", None, {"layer_ids": (1, 30, 58)}, {"architecture": DEEPSEEK}, r"begins with 1 as one layer later"),
        ("hf", None, {"layer_ids": (2, 58)}, {}, r"2 states"),
        ("speculators", None, {"attention": "mla"}, {}, r"drafter\.attention: found 'mla'"),
    ],
)
def test_x6_x7_what_a_server_cannot_read_is_refused_with_the_reason(
    engine: str, version: str | None, shape: dict[str, Any], target: dict[str, Any], words: str
) -> None:
    import dataclasses

    whole = dataclasses.replace(make_drafter().shape, **shape)
    with pytest.raises(RequestError, match=words):
        check(engine, version, whole, make_target(**target))


def test_every_reason_is_given_at_once() -> None:
    import dataclasses

    shape = dataclasses.replace(make_drafter().shape, norm_before_fc=True, layer_ids=(0, 61))
    assert len(refusals("sglang", None, shape, make_target())) == 3


@pytest.mark.parametrize("engine", list(RELEASES))
def test_the_papers_drafter_is_read_by_all(engine: str) -> None:
    assert refusals(engine, None, make_drafter().shape, make_target()) == []


def sglang_captures(architecture: str, nested: list[int]) -> list[int]:
    """SGLang 0.5.14's rule for the inputs of layers that it hands out (llama.py, deepseek_v2.py)."""
    if architecture.startswith("Deepseek") and nested[0] != 1:
        return nested
    return [i + 1 for i in nested]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", DEEPSEEK, "DeepseekV2ForCausalLM"])
@pytest.mark.parametrize("ids", [(2, 30, 58), (3, 20, 40, 60), (5, 6)])
def test_x3_sglang_hands_out_the_layers_that_were_trained_on(architecture: str, ids: tuple[int, ...]) -> None:
    nested = list(nested_ids("sglang", architecture, ids))
    assert sglang_captures(architecture, nested) == list(ids)


def test_vllm_reads_its_own_ids_in_both_places(tmp_path: Path) -> None:
    assert nested_ids("vllm", "LlamaForCausalLM", (2, 30, 58)) == (2, 30, 58)
    export_drafter(make_drafter(), make_target(), tmp_path, torch.float32, "sglang")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]


KIMI_ROPE = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        (KIMI_ROPE, 1.0),
        ({**KIMI_ROPE, "mscale_all_dim": 0.0}, 0.1 * math.log(64) + 1),
        ({"attention_factor": 1.2}, 1.2),
    ],
)
def test_x5_servers_without_mscale_turn_a_dense_layer_by_as_much(
    tmp_path: Path, rope: dict[str, Any], wanted: float
) -> None:
    """vLLM 0.26 and SGLang 0.5.14 multiply cos and sin of a dense layer by (0.1 ln factor + 1) * attn_factor."""
    drafter = make_drafter(rope_scaling={**KIMI_ROPE, **rope})
    assert drafter.rotary.attention_scaling == pytest.approx(wanted)
    export_drafter(drafter, make_target(architecture="KimiK25ForConditionalGeneration"), tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    for written in (config["rope_scaling"], config["rope_parameters"]):
        served = (0.1 * math.log(written["factor"]) + 1) * written.get("attn_factor", 1.0)
        assert served == pytest.approx(wanted)


class SglangLoader:
    """The parameters that SGLang 0.5.14 makes for a dense drafter's config, and its way of filling them.

    Its loader skips names that it does not know and says nothing, so the test counts what was filled and what was not.
    """

    STACKED = (
        (".qkv_proj", ".q_proj", 0),
        (".qkv_proj", ".k_proj", 1),
        (".qkv_proj", ".v_proj", 2),
        (".gate_up_proj", ".gate_proj", 0),
        (".gate_up_proj", ".up_proj", 1),
    )

    def __init__(self, config: dict[str, Any]) -> None:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        h, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        d, f = config["head_dim"], config["intermediate_size"]
        width = config.get("target_hidden_size", h)
        count = config.get("num_aux_hidden_states")
        if count is None:
            count = len((config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or [0, 0, 0])
        layer = "model.layers.0."
        self.parts: dict[str, list[tuple[int, ...]]] = {
            "model.embed_tokens.weight": [(config["vocab_size"], h)],
            "model.fc.weight": [(h, width * count)],
            layer + "self_attn.qkv_proj.weight": [(n * d, 2 * h) for n in (heads, kv, kv)],
            layer + "self_attn.o_proj.weight": [(h, heads * d)],
            layer + "mlp.gate_up_proj.weight": [(f, h), (f, h)],
            layer + "mlp.down_proj.weight": [(h, f)],
            layer + "input_layernorm.weight": [(h,)],
            layer + "hidden_norm.weight": [(h,)],
            layer + "post_attention_layernorm.weight": [(h,)],
            "model.norm.weight": [(h,)],
            "lm_head.weight": [(config["draft_vocab_size"], h)],
        }
        if config.get("fc_norm"):
            self.parts |= {f"model.fc_norm.{i}.weight": [(width,)] for i in range(count)}
        self.filled: dict[tuple[str, int], torch.Tensor] = {}
        self.skipped: list[str] = []
        self.hot_token_id: torch.Tensor | None = None

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            name = name.replace("midlayer", "layers.0")
            if "d2t" in name:
                self.hot_token_id = weight + torch.arange(len(weight))
                continue
            if "t2d" in name:
                continue
            part = 0
            for stacked, single, number in self.STACKED:
                if single in name:
                    name, part = name.replace(single, stacked), number
                    break
            known = name if name in self.parts else f"model.{name}"
            if known not in self.parts:
                self.skipped.append(name)
                continue
            assert tuple(weight.shape) == self.parts[known][part], name
            self.filled[known, part] = weight

    def unfilled(self) -> list[str]:
        wanted = {(name, part) for name, parts in self.parts.items() for part in range(len(parts))}
        return sorted({name for name, _ in wanted - self.filled.keys()})


@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_vocab_size": V}, {"layer_ids": (2, 58)}, {"layer_ids": (2, 9, 20, 40, 58)}, {"fc_norm": True}],
    ids=["reduced", "full", "two states", "five states", "fc_norm"],
)
def test_x2_sglang_fills_every_parameter_and_reads_every_tensor(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = make_drafter(**changes)
    export_drafter(drafter, make_target(), tmp_path, torch.float32, "sglang")
    loader = SglangLoader(json.loads((tmp_path / "config.json").read_text()))
    weights = load_file(tmp_path / "model.safetensors")
    loader.load(weights)
    assert loader.skipped == []
    # The embedding is the target's, which SGLang sets after loading.
    assert loader.unfilled() == ["model.embed_tokens.weight"]
    if drafter.target_ids is None:
        assert loader.hot_token_id is None
    else:
        assert loader.hot_token_id is not None
        assert torch.equal(loader.hot_token_id, drafter.target_ids)
    assert torch.equal(loader.filled["model.fc.weight", 0], drafter.fc.weight)
    assert torch.equal(loader.filled["lm_head.weight", 0], drafter.lm_head.weight)


def test_x2_the_small_loader_notices_a_renamed_and_a_missing_tensor(tmp_path: Path) -> None:
    export_drafter(make_drafter(), make_target(), tmp_path, torch.float32, "sglang")
    loader = SglangLoader(json.loads((tmp_path / "config.json").read_text()))
    weights = load_file(tmp_path / "model.safetensors")
    weights["hidden_norm.weight"] = weights.pop("midlayer.hidden_norm.weight")
    loader.load(weights)
    assert loader.skipped == ["hidden_norm.weight"]
    assert "model.layers.0.hidden_norm.weight" in loader.unfilled()
    assert weights["fc.weight"].shape == (H, 3 * H)


LATENT = {
    "attention": "mla",
    "num_key_value_heads": 4,
    "head_dim": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


class SglangLatentLoader(SglangLoader):
    """The same for a latent drafter (kimi_k25_eagle3.py): q_a and kv_a are fused, other names are skipped as well."""

    STACKED = SglangLoader.STACKED[3:]

    def __init__(self, config: dict[str, Any]) -> None:
        assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
        super().__init__({**config, "architectures": ["LlamaForCausalLMEagle3"]})
        h, heads, f = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
        q, kv, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
        count = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        attention = "model.layers.0.self_attn."
        parts = {name: part for name, part in self.parts.items() if not name.startswith(attention)}
        self.parts = parts | {
            "model.fc.weight": [(h, h * count)],
            attention + "fused_qkv_a_proj_with_mqa.weight": [(q, 2 * h), (kv + rope, 2 * h)],
            attention + "q_a_layernorm.weight": [(q,)],
            attention + "q_b_proj.weight": [(heads * (nope + rope), q)],
            attention + "kv_a_layernorm.weight": [(kv,)],
            attention + "kv_b_proj.weight": [(heads * (nope + v), kv)],
            attention + "o_proj.weight": [(h, heads * v)],
            "model.layers.0.mlp.gate_up_proj.weight": [(f, h), (f, h)],
        }

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        fused = ".fused_qkv_a_proj_with_mqa."
        for part, name in enumerate((".q_a_proj.", ".kv_a_proj_with_mqa.")):
            for found in [known for known in weights if name in known]:
                weight = weights.pop(found)
                stacked = "model." + found.replace("midlayer", "layers.0").replace(name, fused)
                assert tuple(weight.shape) == self.parts[stacked][part], found
                self.filled[stacked, part] = weight
        super().load(weights)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": V, "fc_norm": True, "layer_ids": (2, 9, 30, 58)}])
def test_x2_sglang_fills_every_parameter_of_a_latent_drafter(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = make_drafter(**LATENT, **changes)
    target = make_target(architecture=DEEPSEEK)
    checks = export_drafter(drafter, target, tmp_path, torch.float32, "sglang")
    assert checks["logits_equal"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(drafter.shape.layer_ids)
    # vLLM and SGLang turn a `deepseek_v3` draft into something else.
    assert config["model_type"] == "kimi_k2"
    assert config["head_dim"] == config["qk_rope_head_dim"] == 8
    loader = SglangLatentLoader(config)
    loader.load(load_file(tmp_path / "model.safetensors"))
    assert loader.skipped == []
    assert loader.unfilled() == ["model.embed_tokens.weight"]
