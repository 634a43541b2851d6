"""Synthetic drafters, teachers and packed batches at published sizes, for the training step's benchmarks.

Tokens are drawn from the draft vocabulary, so that no unroll step loses rows: the most work that a mask can ask for.
Teacher rows outside the draft vocabulary are small, so that the argmax is mostly inside, as with real text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle3.batches import PackedBatch
from eagle3.blueprint import LATENT_SIZES
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.linear_loss import DraftTeacher
from tests.drafters import Document, pack

# hidden, intermediate, heads, key heads, head width, vocabulary, draft vocabulary, rope theta
SHAPES = {
    "tiny": (256, 1024, 4, 4, 64, 4096, 1024, 10000.0),
    "small": (1024, 2816, 16, 8, 64, 32000, 8000, 10000.0),
    "llama8b": (4096, 14336, 32, 8, 128, 128256, 32000, 500000.0),
    "kimi": (7168, 18432, 64, 64, 128, 163840, 32000, 50000.0),
    "kimi_full": (7168, 18432, 64, 64, 128, 163840, 163840, 50000.0),
    "kimi_latent": (7168, 18432, 64, 64, 192, 163840, 32000, 50000.0),
}
# Latent attention's sizes: ranks of queries and of columns; a head's parts without and with position, its value.
LATENT = {"kimi_latent": (1536, 512, 128, 64, 128)}


@dataclass(frozen=True)
class Synthetic:
    """A drafter and its teacher on one device, with what a batch needs to know of them."""

    drafter: Eagle3Drafter
    teacher: DraftTeacher
    draft_ids: np.ndarray

    def batch(
        self, lengths: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]], steps: int, seed: int = 1
    ) -> PackedBatch:
        """Documents of the given lengths and supervised spans, packed, on the drafter's device."""
        shape, device = self.drafter.shape, self.drafter.embedding.device
        rng = np.random.default_rng(seed)
        generator = torch.Generator(device).manual_seed(seed)
        documents = []
        for number, (length, supervised) in enumerate(zip(lengths, spans, strict=True)):
            mask = np.zeros(length, dtype=bool)
            for start, stop in supervised:
                mask[start:stop] = True
            states = torch.randn(
                length, 4 * shape.target_hidden_size, generator=generator, device=device, dtype=torch.bfloat16
            )
            *captured, final = states.chunk(4, dim=-1)
            ids = self.draft_ids[rng.integers(0, len(self.draft_ids), length)]
            documents.append(Document(f"synthetic-{number}", ids, mask, captured, final))
        vocab = self.drafter.t2d.cpu().numpy() if self.drafter.target_ids is not None else None
        return pack(documents, steps, vocab, with_layout=True).to(device)


def drafter_shape(name: str, tokens: int) -> DrafterShape:
    """The drafter of a published size, long enough for `tokens`."""
    hidden, inter, heads, kv_heads, width, vocab, draft_vocab, theta = SHAPES[name]
    latent = dict(zip(LATENT_SIZES, LATENT[name], strict=True)) if name in LATENT else {}
    return DrafterShape(
        hidden, hidden, (2, 16, 29), vocab, draft_vocab, inter, heads, kv_heads, width, 1e-5, theta, None, tokens,
        attention="mla" if latent else "dense", **latent,
    )  # fmt: skip


def build(name: str, tokens: int, device: str, seed: int = 0) -> Synthetic:
    """Random weights: fp32 masters of the drafter, embedding and teacher in bf16 (fp32 on a CPU)."""
    shape = drafter_shape(name, tokens)
    frozen = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(seed)
    with torch.device(device):
        drafter = Eagle3Drafter(shape, torch.randn(shape.vocab_size, shape.hidden_size, dtype=frozen) * 0.02)
        weight = torch.randn(shape.vocab_size, shape.hidden_size, dtype=frozen) * (3 / math.sqrt(shape.hidden_size))
    draft_ids = None
    if shape.draft_vocab_size < shape.vocab_size:
        chosen = torch.randperm(shape.vocab_size)[: shape.draft_vocab_size].sort().values
        inside = torch.zeros(shape.vocab_size, dtype=torch.bool)
        inside[chosen] = True
        drafter.set_vocabulary(chosen - torch.arange(len(chosen)), inside)
        weight[~inside.to(device)] *= 0.5
        draft_ids = chosen.to(device)
    eps = shape.rms_norm_eps
    teacher = DraftTeacher(
        lambda states: torch.nn.functional.rms_norm(states, states.shape[-1:], eps=eps), weight, draft_ids
    )
    ids = np.arange(shape.vocab_size) if draft_ids is None else draft_ids.cpu().numpy()
    return Synthetic(drafter, teacher, ids)


def turns(length: int, fraction: float, count: int) -> list[tuple[int, int]]:
    """`count` supervised spans that end a turn each and together cover `fraction` of a document."""
    edges = [length * i // count for i in range(count + 1)]
    return [(stop - round((stop - start) * fraction), stop) for start, stop in itertools.pairwise(edges)]
