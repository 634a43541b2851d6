"""What a first pass over the data learned about the teacher: which of its tokens lie outside the draft vocabulary.

The test needs the target's logits over its whole vocabulary, which for a small target is a third of a CPU step, and its
answer never changes. So each sample's answers are kept, one byte a token, and later passes compute the draft
vocabulary's logits only (walk: step 6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.batches import PackedBatch
from eagle3.loss import UnrollLoss

UNKNOWN, INSIDE, OUTSIDE = -1, 0, 1


class OovMemory:
    """The answers per sample id: int8 [T], for each token UNKNOWN, INSIDE or OUTSIDE as a teacher's argmax."""

    def __init__(self) -> None:
        self.samples: dict[str, Tensor] = {}

    def recall(self, batch: PackedBatch) -> Tensor | None:
        """The answers for a batch's teacher tokens, bool [U]; None unless all are known."""
        if not batch.sample_ids or any(sample not in self.samples for sample in batch.sample_ids):
            return None
        answers = torch.cat([self.samples[sample] for sample in batch.sample_ids])
        answers = answers[batch.slots.teacher_tokens]
        return None if bool((answers == UNKNOWN).any()) else answers == OUTSIDE

    def learn(self, batch: PackedBatch, result: UnrollLoss) -> None:
        """Keeps what a batch's loss found out."""
        if not batch.sample_ids:
            return
        slots = batch.slots
        answers = torch.full((batch.tokens,), UNKNOWN, dtype=torch.int8)
        answers[slots.teacher_tokens[slots.teachers]] = result.oov.to(torch.int8)
        self.samples.update(zip(batch.sample_ids, answers.split(batch.cu_seqlens.diff().tolist()), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint: a resumed run computes the same products as one that never stopped."""
        return {sample: answers.clone() for sample, answers in self.samples.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` gave."""
        self.samples = dict(state)
