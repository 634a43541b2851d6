"""Tiny random drafters and documents, and one training step on them, for the tests of the training room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from eagle3.batches import PackedBatch, PackedDataModule, assemble
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.loss import UnrollLoss, soft_cross_entropy, unroll_loss

VOCAB = 23


@dataclass(frozen=True)
class Document:
    """One sample with its states: captured ones [N, H_target] by layer, in the drafter's order, and the final ones."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    hidden_states: Sequence[Tensor]
    final_states: Tensor


def stored(data: PackedDataModule, row: int) -> Document:
    """A prepared sample with its stored states."""
    sample, final = data.prepared.samples[row], data.store.final_id
    states = data.store.read(sample.id, [*data.layer_ids, final])
    captured = [states[i] for i in data.layer_ids]
    return Document(sample.id, sample.input_ids, sample.loss_mask, captured, states[final])


def pack(
    documents: Sequence[Document],
    steps: int,
    in_draft_vocab: np.ndarray | None = None,
    alignment: str = "exact",
    row_counts: Sequence[int] | None = None,
    with_layout: bool = False,
) -> PackedBatch:
    """The batch of these documents; without `row_counts` it is a whole optimizer step of its own."""
    texts = [(document.sample_id, document.input_ids, document.loss_mask) for document in documents]
    hidden_states = final_states = torch.empty(0, 0)
    if documents:
        hidden_states = torch.cat([torch.stack([*document.hidden_states], dim=1) for document in documents])
        final_states = torch.cat([document.final_states for document in documents])
    return assemble(texts, hidden_states, final_states, steps, in_draft_vocab, alignment, row_counts, with_layout)


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
