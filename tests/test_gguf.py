"""GGUF → Hugging Face folder, against the checkpoint that the GGUF file was written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3.errors import RequestError
from eagle3.gguf_checkpoint import convert_gguf
from tests.conftest import write_target

gguf = pytest.importorskip("gguf")
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a query or key projection's rows (its convert_hf_to_gguf.py)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, folder: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Writes a Hugging Face Llama folder as GGUF, down projections in Q8_0; returns the weights as they are then."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config, state = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocabulary: list[str] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocabulary))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, value in list(state.items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        top = {
            "model.embed_tokens.weight": "token_embd",
            "model.norm.weight": "output_norm",
            "lm_head.weight": "output",
        }
        if name in top:
            writer.add_tensor(f"{top[name]}.weight", value)
            continue
        layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        target = f"blk.{layer}.{NAMES[part]}.weight"
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            value = _permuted(value, heads[part.removeprefix("self_attn.")[0]])
        if part == "mlp.down_proj":
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(value, kind)
            state[name] = gguf.quants.dequantize(packed, kind)
            writer.add_tensor(target, packed, raw_dtype=kind)
        else:
            writer.add_tensor(target, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_is_the_model_that_the_file_was_written_from(tmp_path: Path, tied: bool) -> None:
    source = write_target(
        tmp_path / "source", tie_word_embeddings=tied, intermediate_size=96, rope_parameters={
            "rope_type": "default", "rope_theta": 50000.0
        }
    )  # fmt: skip
    state = write_gguf(tmp_path / "model.gguf", source)
    folder = tmp_path / "converted"
    convert_gguf(tmp_path / "model.gguf", folder)

    original = AutoModelForCausalLM.from_pretrained(source).eval()
    original.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert converted.dtype == torch.float32
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)

    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["rms_norm_eps"] == 1e-6
    assert config["tie_word_embeddings"] is tied
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert (folder / "model.safetensors").stat().st_mode & 0o044


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_and_template(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    write_gguf(tmp_path / "model.gguf", source)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "converted")
    original: Any = AutoTokenizer.from_pretrained(source)
    converted: Any = AutoTokenizer.from_pretrained(tmp_path / "converted")
    original.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), original.backend_tokenizer.pre_tokenizer]
    )
    text = "<|im_start|>user\nthe quick fox, 2048 times 🙂<|im_end|>\n"
    assert converted(text)["input_ids"] == original(text)["input_ids"]
    assert converted.convert_ids_to_tokens(converted(" 12")["input_ids"]) == ["Ġ", "1", "2"]
    assert converted.chat_template == original.chat_template
    assert (converted.eos_token, converted.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_other_architectures_and_broken_files_are_refused(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    write_gguf(tmp_path / "other.gguf", source, "falcon")
    with pytest.raises(RequestError, match=r"other.gguf: found a GGUF of architecture 'falcon' .*expected 'llama'"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")
    (tmp_path / "broken.gguf").write_bytes(b"no gguf at all")
    with pytest.raises(RequestError, match=r"broken.gguf: found no readable GGUF file"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
