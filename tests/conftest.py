"""Shared fixtures: tiny random checkpoints, which are real models with real tokenizers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny products gain nothing from threads, and threads that wait for a busy core cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

from eagle3.config import Config, HardwareConfig, LayersConfig, ModelConfig
from eagle3.prepared import PreparedWriter
from eagle3.tokens import Sample, Tokens, sample_id

# A shell that starts the tests in the background ignores Ctrl-C for them and all their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "What is the capital of France? The capital of France is Paris.",
    "Write a short story about a ship that sails to the north and never returns.",
    "one two three four five six seven eight nine ten; print('hello world')",
]


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> int:
    """Writes a byte-level BPE tokenizer with the ChatML special tokens; returns its vocabulary size (about 400)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return len(fast)


def write_target(folder: Path, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE, **config: Any) -> Path:
    """Writes a random Llama checkpoint (6 layers, H 48) with tokenizer; `config` overrides fields of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder, chat_template)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        # Wide enough that greedy choices do not hang on the last bit.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama checkpoint with a chat template that has generation markers. Do not write into it."""
    return write_target(tmp_path_factory.mktemp("tiny_target"))


def target_config(
    target: Path, output: Path | None = None, adapter: str = "llama.LlamaAdapter", **groups: Any
) -> Config:
    """A whole config for a checkpoint on the CPU; `groups` replaces groups, for example store=StoreConfig(...)."""
    chosen: dict[str, Any] = {
        "model": ModelConfig(name="tiny", path=str(target), adapter={"_target_": f"eagle3.adapters.{adapter}"}),
        "hardware": HardwareConfig(name="cpu", batch_tokens=256, generate_slots=4),
        "layers": LayersConfig(name="eagle"),
        **groups,
    }
    return Config(output_dir=str(output or target / "outputs"), **chosen)


def random_samples(lengths: Sequence[int], vocab_size: int = 400, seed: int = 0) -> list[Sample]:
    """Samples of random ids in the given lengths, their second half supervised."""
    random = np.random.default_rng(seed)
    samples = []
    for row, length in enumerate(lengths):
        input_ids = random.integers(3, vocab_size, length).astype(np.int32)
        mask = np.arange(length) >= length // 2
        samples.append(Sample(sample_id(input_ids), input_ids, mask, "train", f"random:{row}"))
    return samples


def write_prepared(folder: Path, samples: Sequence[Sample]) -> Path:
    """Writes samples as a complete prepared artifact's folder."""
    folder.mkdir(parents=True)
    with PreparedWriter(folder) as writer:
        for sample in samples:
            writer.add(Tokens(sample.input_ids, sample.loss_mask), sample.key, sample.key.encode())
        writer.finish(validation_samples=0, seed=0, vocab_size=400, heldout=[])
    manifest = {"kind": "prepared", "id": folder.name, "metrics": {"samples": len(samples)}, "special_ids": [0, 1, 2]}
    manifest |= {"stop_ids": [2], "vocab_size": 400, "tokenizer_hash": "tiny"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
