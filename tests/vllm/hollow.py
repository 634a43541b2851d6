"""Checkpoints with true configs, indexes, headers and sizes whose data is a hole in the file: size costs nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3.memory import BYTES

Tensor = tuple[str, list[int]]

DEEPSEEK_SIZES: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "actorder": None,
                    "block_structure": None,
                    "observer": "minmax",
                    "observer_kwargs": {},
                },
            }
        },
    },
}


def write_hollow(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shard_bytes: float) -> Path:
    """Writes config.json, the index and sparse shards with these tensors (name → dtype, shape)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, (dtype, shape) in tensors.items():
        count = math.prod(shape) * BYTES[dtype]
        if shards[-1] and size + count > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += count
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        header, offset = {}, 0
        for name, (dtype, shape) in shard.items():
            end = offset + math.prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + offset)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def ends(prefix: str, vocab_size: int, hidden_size: int) -> dict[str, Tensor]:
    """The three tensors that a drafter needs of any target."""
    return {
        f"{prefix}model.embed_tokens.weight": ("BF16", [vocab_size, hidden_size]),
        f"{prefix}model.norm.weight": ("BF16", [hidden_size]),
        f"{prefix}lm_head.weight": ("BF16", [vocab_size, hidden_size]),
    }


def kimi_k25(folder: Path, **sizes: Any) -> Path:
    """Kimi-K2.5 as published (61 layers, experts packed in 4 bits, 594 GB of holes) but for the sizes given."""
    text = {**DEEPSEEK_SIZES, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], **sizes}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {},
        "media_placeholder_token_id": 163605,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": text["quantization_config"],
    }
    tensors = dict(_kimi_tensors("language_model.", text))
    tensors["vision_tower.patch_embed.proj.weight"] = ("BF16", [1152, 588])
    tensors["mm_projector.proj.0.weight"] = ("BF16", [4608, 4608])
    return write_hollow(folder, config, tensors, shard_bytes=8.8e9)


def _kimi_tensors(prefix: str, sizes: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, heads, q, kv = (sizes[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]
    yield from ends(prefix, sizes["vocab_size"], hidden).items()
    for layer in range(sizes["num_hidden_layers"]):
        at = f"{prefix}model.layers.{layer}."
        yield f"{at}input_layernorm.weight", ("BF16", [hidden])
        yield f"{at}post_attention_layernorm.weight", ("BF16", [hidden])
        attention = {
            "q_a_proj": [q, hidden],
            "q_b_proj": [heads * (nope + rope), q],
            "kv_a_proj_with_mqa": [kv + rope, hidden],
            "kv_b_proj": [heads * (nope + v), kv],
            "o_proj": [hidden, heads * v],
        }
        for name, shape in attention.items():
            yield f"{at}self_attn.{name}.weight", ("BF16", shape)
        yield f"{at}self_attn.q_a_layernorm.weight", ("BF16", [q])
        yield f"{at}self_attn.kv_a_layernorm.weight", ("BF16", [kv])
        if layer < sizes["first_k_dense_replace"]:
            yield from _mlp(f"{at}mlp.", hidden, sizes["intermediate_size"])
            continue
        yield f"{at}mlp.gate.weight", ("BF16", [sizes["n_routed_experts"], hidden])
        yield f"{at}mlp.gate.e_score_correction_bias", ("F32", [sizes["n_routed_experts"]])
        yield from _mlp(f"{at}mlp.shared_experts.", hidden, sizes["moe_intermediate_size"])
        for expert in range(sizes["n_routed_experts"]):
            for name, (rows, columns) in _matrices(hidden, sizes["moe_intermediate_size"]).items():
                stem = f"{at}mlp.experts.{expert}.{name}."
                yield stem + "weight_packed", ("I32", [rows, columns // 8])
                yield stem + "weight_scale", ("BF16", [rows, columns // 32])
                yield stem + "weight_shape", ("I32", [2])


def _mlp(at: str, hidden: int, width: int) -> Iterator[tuple[str, Tensor]]:
    for name, shape in _matrices(hidden, width).items():
        yield f"{at}{name}.weight", ("BF16", shape)


def _matrices(hidden: int, width: int) -> dict[str, list[int]]:
    return {"gate_proj": [width, hidden], "up_proj": [width, hidden], "down_proj": [hidden, width]}
