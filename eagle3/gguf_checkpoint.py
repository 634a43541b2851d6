"""Before the walk: a GGUF file of the Llama architecture becomes a Hugging Face checkpoint folder in float32.

The small models that ship inside Python packages are GGUF files; everything in eagle3 reads Hugging Face folders. This
converter dequantises each tensor itself and rebuilds the tokenizer from the file's own vocabulary and merges, because
the library's GGUF loader keeps neither the pre-tokenizer of SmolLM2 (each digit is a token of its own) nor a model that
can be saved again. One thing has no inverse: the weights stay those of the quantised file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.errors import Eagle3Error, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # tokenizer.ggml.token_type


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes `folder` (config, float32 safetensors, tokenizer, chat template) from the GGUF file `source`.

    The folder must not exist; it is complete when this returns. Raises RequestError when the `gguf` package is missing
    or the file is of another architecture, and Eagle3Error when the written folder does not load as a model again.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise RequestError(
            f"{source}: reading a GGUF file needs the package gguf, not installed; run `pip install eagle3[gguf]`"
        ) from None
    try:
        reader = GGUFReader(source)
    except (ValueError, OSError) as error:
        raise RequestError(f"{source}: found no readable GGUF file ({error}); fetch it again") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture, vocabulary = fields.get("general.architecture"), fields.get("tokenizer.ggml.model")
    if architecture != "llama" or vocabulary != "gpt2":
        raise RequestError(
            f"{source}: found a GGUF of architecture {architecture!r} with a {vocabulary!r} tokenizer, expected "
            "'llama' with 'gpt2' (byte-level BPE); convert it yourself and pass the folder with model.path="
        )
    folder.mkdir(parents=True)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", _config(fields, tied))
    special = {f"{name}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    _write_json(folder / "generation_config.json", {k: v for k, v in special.items() if v is not None})
    _write_weights(reader, fields, folder / "model.safetensors")
    _write_tokenizer(fields, folder)
    _check(folder)


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """A LlamaConfig as JSON; names that library versions 4 and 5 spell differently stand in both spellings."""
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    theta = float(fields.get("llama.rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        # The file keeps a float32: 9.9999997e-06 is 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = fields["llama.attention.head_count"]
    key_value_heads = fields.get("llama.attention.head_count_kv", heads)
    weights: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in _TOP_NAMES:
            name = _TOP_NAMES[tensor.name]
        elif tensor.name == "rope_freqs.weight":
            continue  # derived from the config again
        else:
            _, layer, part, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
            if part in ("attn_q", "attn_k"):
                value = _halves(value, heads if part == "attn_q" else key_value_heads)
        weights[name] = np.ascontiguousarray(value)
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private; a cache may be shared


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's interleaving: Hugging Face rotates a head's halves against each other, llama.cpp its pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in {**_SPECIAL, "unk": "unknown"}.items()
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bpe(fields),
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # version 5's own name is unknown to version 4
    config["model_input_names"] = ["input_ids", "attention_mask"]
    for private in ("is_local", "local_files_only"):
        config.pop(private, None)
    _write_json(path, config)


def _bpe(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if fields.get("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    else:
        tokenizer.pre_tokenizer = bytes_
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL_TOKEN, True), (_USER_TOKEN, False)):
        added = [token for token, t in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if t == kind]
        entries = [AddedToken(token, normalized=False, special=special) for token in added]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(entries)
    return tokenizer


def _check(folder: Path) -> None:
    """Loads what was written, without its weights: the tensors' names and shapes must be those that the model wants."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        found = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    if wanted != found:
        differing = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        raise Eagle3Error(f"{folder}: the converted weights do not fit {config.architectures}: {differing[:8]}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    probe = "Well, 2048 is 2^11.\n\tЁ 🙂"
    ids = tokenizer(probe)["input_ids"]
    if tokenizer.decode(ids) != probe or len(tokenizer) != config.vocab_size:
        raise Eagle3Error(f"{folder}: the converted tokenizer does not give back the text {probe!r}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
