"""Peers' EAGLE-3 training steps on the shapes of `synthetic`, each in a process of its own, started by `train_step`.

Their own classes, unpatched: SpecForge's OnlineEagle3Model with its strategy and optimizer, speculators'
Eagle3DraftModel with its optimizer. Random states; the documents are given by their lengths, the
last `fraction` of each is supervised.
Needs `pip install --no-deps specforge==0.2.0 speculators==0.9.0` and what these import.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.synthetic import SHAPES
from tests.benchmarks.timing import time_steps


def specforge(shape: str, lengths: list[int], fraction: float, steps: int) -> Callable[[], Any]:
    """SpecForge 0.2.0 at its fastest: flex attention, full teacher. Documents are rows, padded to the longest."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    hidden, inter, heads, kv_heads, width, vocab, draft_vocab, theta = SHAPES[shape]
    longest = max(lengths)
    config: Any = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inter,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        num_hidden_layers=1,
        vocab_size=vocab,
        max_position_embeddings=max(longest, 2048),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    config.rope_theta, config.draft_vocab_size, config.pretraining_tp = theta, draft_vocab, 1
    draft = LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
    if draft_vocab < vocab:
        kept = torch.randperm(vocab)[:draft_vocab].sort().values
        draft.t2d.zero_()
        draft.t2d[kept] = True
        draft.d2t.copy_(kept - torch.arange(draft_vocab))
    draft.freeze_embedding()
    draft = draft.to("cuda", torch.bfloat16)
    model = OnlineEagle3Model(draft_model=draft, length=steps, attention_backend="flex_attention").to("cuda")
    head = TargetHead.__new__(TargetHead)  # its constructor reads a checkpoint
    torch.nn.Module.__init__(head)
    head.fc = torch.nn.Linear(hidden, vocab, bias=False, device="cuda", dtype=torch.bfloat16)
    torch.nn.init.normal_(head.fc.weight, std=3 / math.sqrt(hidden))
    head.freeze_weights()
    head.config = types.SimpleNamespace(vocab_size=vocab)
    strategy = Eagle3TrainStrategy(model, target_head=head, compact_teacher=False)
    optimizer = BF16Optimizer(draft, lr=1e-4, total_steps=1000, warmup_ratio=0.0)
    size = (len(lengths), longest)
    mask = torch.zeros(size, dtype=torch.long, device="cuda")
    present = torch.zeros_like(mask)
    for row, length in enumerate(lengths):
        mask[row, length - round(length * fraction) : length - 1] = 1
        present[row, :length] = 1
    batch = TrainBatch(
        sample_ids=[str(row) for row in range(len(lengths))],
        strategy="eagle3",
        tensors={
            "input_ids": torch.randint(1, vocab, size, device="cuda"),
            "attention_mask": present,
            "loss_mask": mask,
            "target": torch.randn(*size, hidden, device="cuda", dtype=torch.bfloat16),
            "hidden_state": torch.randn(*size, 3 * hidden, device="cuda", dtype=torch.bfloat16),
        },
        metadata={"target_repr": "hidden_state"},
    )

    def step() -> None:
        strategy.forward_loss(batch).loss.backward()
        optimizer.step()

    return step


def speculators(shape: str, lengths: list[int], fraction: float, steps: int) -> Callable[[], Any]:
    """speculators 0.9.0 at its fastest: compiled flex attention, eager loss. Documents are packed, the head frozen."""
    from safetensors.torch import save_file
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig
    from transformers import LlamaConfig

    hidden, inter, heads, kv_heads, width, vocab, draft_vocab, _ = SHAPES[shape]
    tokens = sum(lengths)

    def config(layers: int) -> Any:
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=inter,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=width,
            max_position_embeddings=max(4096, tokens),
            tie_word_embeddings=False,
        )

    folder = Path(tempfile.mkdtemp())
    target = config(8)
    target.architectures = ["LlamaForCausalLM"]
    target.save_pretrained(folder)
    weights = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, device="cuda") * 0.02,
        "lm_head.weight": torch.randn(vocab, hidden, device="cuda") * 3 / math.sqrt(hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    save_file({name: weight.bfloat16().cpu() for name, weight in weights.items()}, folder / "model.safetensors")
    kept = torch.randperm(vocab)[:draft_vocab].sort().values
    inside = torch.zeros(vocab, dtype=torch.bool)
    inside[kept] = True
    layer = config(1)
    layer.layer_types, layer.sliding_window = ["full_attention"], None
    options = {
        "verifier_name_or_path": str(folder),
        "draft_vocab_size": draft_vocab,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "ttt_steps": steps,
        "ttt_step_loss_decay": 1.0,
        "draft_attn_impl": "simple_flex_attention",
        "loss_fn": "kl_div",
        "loss_implementation": "eager",
        "target_layer_ids": [2, 4, 5],
    }
    d2t = kept - torch.arange(draft_vocab)
    model: Any = Eagle3DraftModel.from_training_args(verifier_config=layer, t2d=inside, d2t=d2t, **options).to("cuda")
    arguments, _ = Eagle3DraftModel.get_trainer_kwargs(**options)
    settings = TrainerConfig(lr=1e-4, num_epochs=1, save_path=str(folder / "ck"), optimizer="adamw")
    optimizers = build_optimizers(model, settings)
    mask = torch.cat([torch.arange(n) >= n - round(n * fraction) for n in lengths]).long()
    batch = {
        "hidden_states": torch.randn(1, tokens, 3 * hidden, dtype=torch.bfloat16),
        "input_ids": torch.randint(1, vocab, (1, tokens)),
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        "loss_mask": mask[None],
        "position_ids": torch.cat([torch.arange(n) + 1 for n in lengths])[None],
        "verifier_last_hidden_states": torch.randn(1, tokens, hidden, dtype=torch.bfloat16),
    }
    batch = {name: tensor.cuda() for name, tensor in batch.items()}

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss, _ = model(**batch, **arguments)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return step


def main() -> None:
    """Reads a request from the command line, prints one line of JSON."""
    request = json.loads(sys.argv[1])
    peer = request.pop("peer")
    torch.manual_seed(0)
    step = {"specforge": specforge, "speculators": speculators}[peer](**request)
    measured = time_steps(step, steps=15, warmup=4)
    tokens = sum(request["lengths"])
    print(
        json.dumps(
            {
                "peer": f"{peer} {version(peer)}",
                **request,
                **measured,
                "tokens_per_s": round(1e3 * tokens / measured["median_ms"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
