"""Tiny random drafters and documents, and one training step on them, for the tests of the training room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from eagle3.batches import Document, pack
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.loss import UnrollLoss, soft_cross_entropy, unroll_loss

VOCAB = 23


class Teacher(nn.Module):
    """A random final norm and head: states [..., H] → logits [..., V]."""

    def __init__(self, vocab_size: int, hidden_size: int, seed: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("weight", torch.randn(vocab_size, hidden_size, generator=generator))
        self.register_buffer("norm_weight", torch.rand(hidden_size, generator=generator) + 0.5)

    def forward(self, states: Tensor) -> Tensor:
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6) * self.norm_weight
        return (normed.to(self.weight.dtype) @ self.weight.T) * 0.7


def make_shape(**changes: object) -> DrafterShape:
    values: dict = {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "layer_ids": (1, 2, 3),
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
    }
    return DrafterShape(**{**values, **changes})


MLA = {
    "attention": "mla",
    "head_dim": 10,
    "q_lora_rank": 7,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def make_drafter(shape: DrafterShape, seed: int = 0, dtype: torch.dtype = torch.float64) -> Eagle3Drafter:
    """Weights wide enough that every part of the network matters; a reduced vocabulary has every other token."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(shape, torch.randn(shape.vocab_size, shape.hidden_size, generator=generator))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    if shape.draft_vocab_size < shape.vocab_size:
        target_ids = torch.linspace(0, shape.vocab_size - 1, shape.draft_vocab_size).long()
        t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
        t2d[target_ids] = True
        drafter.set_vocabulary(target_ids - torch.arange(len(target_ids)), t2d)
    return drafter.to(dtype)


def make_document(
    shape: DrafterShape, spans: Sequence[tuple[int, int]], length: int, seed: int, in_vocab: float = 0.9
) -> Document:
    """Random tokens and states; about `in_vocab` of the tokens are in the draft vocabulary of `make_drafter`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, shape.vocab_size, length)
    if shape.draft_vocab_size < shape.vocab_size:
        target_ids = torch.linspace(0, shape.vocab_size - 1, shape.draft_vocab_size).long().numpy()
        ids = np.where(rng.random(length) < in_vocab, rng.choice(target_ids, length), ids)
    mask = np.zeros(length, dtype=bool)
    for start, stop in spans:
        mask[start:stop] = True
    generator = torch.Generator().manual_seed(seed)
    states = [
        torch.randn(length, shape.target_hidden_size, generator=generator, dtype=torch.float64)
        for _ in range(len(shape.layer_ids) + 1)
    ]
    return Document(f"sample-{seed}", ids, mask, states[:-1], states[-1])


def train_step(
    drafter: Eagle3Drafter,
    documents: Sequence[Document],
    steps: int,
    decay: float = 0.8,
    oov: str = "mask",
    row_loss=soft_cross_entropy,
    alignment: str = "exact",
    chunk_elements: int = 4000,
    row_counts: Sequence[int] | None = None,
) -> UnrollLoss:
    """Unroll and loss of one packed batch; the small chunk makes several chunks of a tiny batch."""
    reduced = drafter.target_ids is not None
    batch = pack(documents, steps, drafter.t2d.numpy() if reduced else None, alignment, row_counts)
    hidden = drafter.unroll(batch.input_ids, batch.hidden_states, batch.position_ids, batch.slots, batch.blocks)
    weights = decay ** torch.arange(steps, dtype=drafter.dtype) / batch.row_counts.clamp_min(1)
    return unroll_loss(
        hidden,
        drafter.lm_head.weight,
        batch.final_states,
        Teacher(drafter.shape.vocab_size, drafter.shape.hidden_size).to(drafter.dtype),
        batch.slots,
        weights,
        drafter.target_ids,
        drafter.t2d if reduced else None,
        row_loss,
        oov,
        chunk_elements,
    )
