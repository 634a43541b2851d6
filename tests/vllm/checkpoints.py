"""Recipes of tiny checkpoints that the real vLLM loads on a CPU; each family has one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.conftest import write_tokenizer

# The CPU engine's attention takes heads of 32 and its latent attention kv_lora_rank + rope = 576 only.
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **COMMON,
    **MOE,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def _save(folder: Path, model_class: Any, config: Any, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif parameter.ndim >= 2:
                    parameter.normal_(0, 0.1)
        model.save_pretrained(folder)
    return folder


def llama(folder: Path, **config: Any) -> Path:
    """Llama: layers that return (hidden, residual)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**COMMON, **HEADS, "vocab_size": write_tokenizer(folder), "intermediate_size": 128, **config}
    return _save(folder, LlamaForCausalLM, LlamaConfig(**sizes), 0)


def qwen3(folder: Path, **config: Any) -> Path:
    """Qwen 3: norms on queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**COMMON, **HEADS, "vocab_size": write_tokenizer(folder), "intermediate_size": 128, **config}
    return _save(folder, Qwen3ForCausalLM, Qwen3Config(**sizes), 1)


def qwen3_moe(folder: Path, **config: Any) -> Path:
    """Qwen 3 with experts in every layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**COMMON, **HEADS, **MOE, "vocab_size": write_tokenizer(folder), "intermediate_size": 128}
    return _save(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**sizes, "num_experts": 8, **config}), 2)


def deepseek_v3_config(vocab_size: int, **config: Any) -> Any:
    """A tiny DeepSeek-V3 config: latent attention, one dense layer, then experts."""
    from transformers import DeepseekV3Config

    sizes = {**LATENT, "vocab_size": vocab_size, "q_lora_rank": 64, "routed_scaling_factor": 2.5}
    router = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return DeepseekV3Config(**{**sizes, **router, **config})


def deepseek_v2(folder: Path, **config: Any) -> Path:
    """DeepSeek V2 as V2-Lite is: queries without a latent, experts chosen by softmax."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = {**LATENT, "vocab_size": write_tokenizer(folder), "q_lora_rank": None}
    router = {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"}
    return _save(folder, DeepseekV2ForCausalLM, DeepseekV2Config(**{**sizes, **router, **config}), 5)


def deepseek_v3(folder: Path, **config: Any) -> Path:
    """DeepSeek V3."""
    from transformers import DeepseekV3ForCausalLM

    return _save(folder, DeepseekV3ForCausalLM, deepseek_v3_config(write_tokenizer(folder), **config), 3)


def kimi_k2(folder: Path) -> Path:
    """Kimi-K2: DeepSeek V3 under another model type, whose config is code in the checkpoint."""
    deepseek_v3(folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_deepseek.py").write_text(
        "from transformers.models.deepseek_v3 import configuration_deepseek_v3 as published\n\n\n"
        'class DeepseekV3Config(published.DeepseekV3Config):\n    model_type = "kimi_k2"\n'
    )
    return folder


def kimi_k25(folder: Path) -> Path:
    """Kimi-K2.5: the vision wrapper around DeepSeek V3, with the weights of the language model only."""
    import transformers
    from safetensors.torch import load_file, save_file

    family: Any = transformers.Kimi_K25Config
    deepseek_v3(folder)
    text = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "transformers_version", "dtype"):
        text.pop(key, None)
    vision = family().vision_config.to_dict()
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    vision.update({key: value for key, value in small.items() if key in vision})
    config = family(text_config=text, vision_config=vision, image_token_id=1, media_placeholder_token_id=1)
    config.architectures = ["KimiK25ForConditionalGeneration"]
    config.dtype = "float32"
    config.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def gpt_oss(folder: Path) -> Path:
    """gpt-oss: attention sinks, sliding windows and experts with biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {
        **COMMON,
        **HEADS,
        "vocab_size": write_tokenizer(folder),
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    }
    return _save(folder, GptOssForCausalLM, GptOssConfig(**sizes), 4)


PREPROCESSOR = {
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    },
}
RECIPES: dict[str, Callable[..., Path]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": kimi_k2,
    "kimi_k25": kimi_k25,
    "gpt_oss": gpt_oss,
}
