"""The unroll's loss: drafter head and teacher, chunk by chunk, so that no full logits tensor lives (walk: step 6).

A token of the text teaches up to `steps` slots, one at each unroll step. Chunks therefore run over teacher tokens: the
teacher's logits are computed once a token from its stored final state (final norm, target head), and all the drafter
rows that this token teaches are compared with them at once. As the weight of each row is known beforehand, the
gradients of the drafter's rows and head are made in the forward pass and no logits are kept (the idea of Liger Kernel's
fused linear cross-entropy).

Losses are functions of the drafter's log-probabilities and the teacher's probabilities over the draft vocabulary:
soft cross-entropy (EAGLE-3, arXiv 2503.01840), -log of the acceptance rate (LK), reverse KL, total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.errors import RequestError
from eagle3.slots import SlotRows

RowLoss = Callable[[Tensor, Tensor], Tensor]
OOV = ("mask", "keep")
# Elements of the widest logits tensor of a chunk: large enough for efficient products, 64 MB in fp32.
CHUNK_ELEMENTS = 1 << 24


class Teacher(Protocol):
    """What gives the target's logits [U, V] from its final (pre-norm) states [U, H]."""

    def __call__(self, states: Tensor) -> Tensor: ...


def soft_cross_entropy(log_q: Tensor, p: Tensor) -> Tensor:
    """-Σ p log q a row: [R, D], [R, D] → [R]; the loss of EAGLE-3."""
    return -(p * log_q).sum(-1)


def reverse_kl(log_q: Tensor, p: Tensor) -> Tensor:
    """Σ q (log q - log p) a row."""
    return (log_q.exp() * (log_q - p.clamp_min(torch.finfo(p.dtype).tiny).log())).sum(-1)


def total_variation(log_q: Tensor, p: Tensor) -> Tensor:
    """½ Σ |p - q| a row: one minus the probability that a sampled draft is accepted (arXiv 2211.17192)."""
    return 0.5 * (p - log_q.exp()).abs().sum(-1)


def lk(log_q: Tensor, p: Tensor) -> Tensor:
    """-log Σ min(p, q) a row: the likelihood that a sampled draft is accepted."""
    return -torch.minimum(p, log_q.exp()).sum(-1).clamp_min(torch.finfo(p.dtype).tiny).log()


LOSSES: dict[str, RowLoss] = {
    "soft_cross_entropy": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "lk": lk,
}


def mix_losses(weights: Mapping[str, float]) -> RowLoss:
    """The weighted sum that `drafter.losses` names, or soft cross-entropy where it names none.

    RequestError for an unknown name, and for weights that make no loss: each is finite and at least 0, one above it.
    """
    unknown = sorted(set(weights) - set(LOSSES))
    if unknown:
        raise RequestError(
            f"drafter.losses: found {unknown}, expected names among {sorted(LOSSES)}; "
            "try drafter.losses.soft_cross_entropy=1.0"
        )
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise RequestError(
                f"drafter.losses.{name}: found {weight}, expected a finite weight of at least 0 (a negative one trains "
                f"away from the target); try drafter.losses.{name}=1.0"
            )
    mixed = {name: weight for name, weight in weights.items() if weight > 0}
    if weights and not mixed:
        raise RequestError(
            f"drafter.losses: found {dict(weights)}, expected a weight above 0, or there is nothing to learn; try "
            "drafter.losses.soft_cross_entropy=1.0"
        )
    if not mixed or mixed == {"soft_cross_entropy": 1.0}:
        return soft_cross_entropy

    def loss(log_q: Tensor, p: Tensor) -> Tensor:
        return sum((weight * LOSSES[name](log_q, p) for name, weight in mixed.items()), start=log_q.new_zeros(()))

    return loss


def mix_weights(weights: Mapping[str, float]) -> tuple[float, float, float, float]:
    """`drafter.losses` as weights in the order of LOSSES, for the step on a GPU. RequestError as `mix_losses`."""
    mix_losses(weights)
    found = [float(weights.get(name, 0.0)) for name in LOSSES]
    return (found[0], found[1], found[2], found[3]) if weights else (1.0, 0.0, 0.0, 0.0)


class UnrollLoss(NamedTuple):
    """The loss of one packed batch and what happened at each of its M supervised (step, slot) pairs, step by step.

    loss       scalar, Σ over pairs of step weight x row loss; differentiable
    row_losses [M] fp32, 0 where the row is masked; hits [M] bool: the argmax, mapped to the target's vocabulary, is the
    text's next token; oov [M] bool: the teacher's argmax over the full vocabulary lies outside the draft vocabulary
    """

    loss: Tensor
    row_losses: Tensor
    hits: Tensor
    oov: Tensor


def unroll_loss(
    hidden: Tensor,
    head: Tensor,
    final_states: Tensor,
    teacher: Teacher,
    slots: SlotRows,
    step_weights: Tensor,
    draft_ids: Tensor | None = None,
    in_draft_vocab: Tensor | None = None,
    row_loss: RowLoss = soft_cross_entropy,
    oov: str = "mask",
    chunk_elements: int = CHUNK_ELEMENTS,
    outside: Tensor | None = None,
) -> UnrollLoss:
    """Compares the drafter's supervised rows with the target's distributions.

    `hidden` [M, H] are the normed drafter outputs of the supervised slots, step by step; `head` [D, H] its lm_head;
    `final_states` [T, H] the target's final states of the packed batch; `step_weights` [steps] = decay^k over the count
    of rows supervised at k; `draft_ids` int64 [D] maps draft to target ids and `in_draft_vocab` is bool [V] (both None
    when the vocabularies are equal). `oov="mask"` takes rows out of the loss whose teacher's argmax is outside, "keep"
    does not. When `outside` bool [U] already says for each teacher token whether it is, `teacher` gives logits over the
    draft vocabulary [U, D] only. Softmax arithmetic is fp32 (fp64 for fp64 input), matrix products run in the autocast
    dtype.
    """
    if oov not in OOV:
        raise RequestError(f"drafter.oov: found '{oov}', expected one of {list(OOV)}; try drafter.oov=mask")
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    mask = oov == "mask"
    chunk = _Chunk(final_states, teacher, slots, step_weights, draft_ids, in_draft_vocab, row_loss, mask, outside)
    with torch.autocast(device, enabled=False):
        needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
        ordered = hidden[slots.by_teacher].to(compute)
        outputs = _ChunkedLoss.apply(ordered, head.to(compute), chunk, chunk_elements, needs_grad)
    loss, row_losses, hits, masked = outputs
    # Back from teacher order to step order.
    back = torch.empty_like(slots.by_teacher)
    back[slots.by_teacher] = torch.arange(len(back), device=back.device)
    return UnrollLoss(loss, row_losses[back], hits[back], masked[back])


@dataclass(frozen=True)
class _Chunk:
    """What a chunk of teacher tokens is compared with; row tensors are in teacher order."""

    final_states: Tensor
    teacher: Teacher
    slots: SlotRows
    step_weights: Tensor
    draft_ids: Tensor | None
    in_draft_vocab: Tensor | None
    row_loss: RowLoss
    mask_oov: bool
    outside: Tensor | None

    def teach(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Probabilities over the draft vocabulary [U, D] and the out-of-vocabulary test [U] of teacher tokens."""
        logits = self.teacher(self.final_states[self.slots.teacher_tokens[start:stop]])
        if self.outside is not None:
            return F.softmax(_exact(logits), dim=-1), self.outside[start:stop]
        if self.draft_ids is None or self.in_draft_vocab is None:
            outside = torch.zeros(stop - start, dtype=torch.bool, device=logits.device)
            return F.softmax(_exact(logits), dim=-1), outside
        outside = ~self.in_draft_vocab[logits.argmax(-1)]
        return F.softmax(_exact(logits.index_select(1, self.draft_ids)), dim=-1), outside


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, chunk: _Chunk, chunk_elements: int, needs_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots = chunk.slots
        pairs, (draft_vocab, _) = len(hidden), head.shape
        real = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        row_losses = torch.zeros(pairs, dtype=real, device=hidden.device)
        hits = torch.zeros(pairs, dtype=torch.bool, device=hidden.device)
        outside = torch.zeros_like(hits)
        weights = chunk.step_weights.to(real)[slots.steps_of[slots.by_teacher]]
        teachers, labels = slots.teachers[slots.by_teacher], slots.labels[slots.by_teacher]
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_head = torch.zeros_like(head, dtype=real) if needs_grad else None
        target_vocab = len(chunk.in_draft_vocab) if chunk.in_draft_vocab is not None else draft_vocab
        tokens = max(chunk_elements // max(target_vocab, slots.steps * draft_vocab), 1)
        for start in range(0, len(slots.teacher_tokens), tokens):
            stop = min(start + tokens, len(slots.teacher_tokens))
            rows = slice(int(slots.bounds[start]), int(slots.bounds[stop]))
            p, oov = chunk.teach(start, stop)
            index = teachers[rows] - start
            logits = _exact(hidden[rows] @ head.T)
            guess = logits.argmax(-1)
            hits[rows] = (guess if chunk.draft_ids is None else chunk.draft_ids[guess]) == labels[rows]
            outside[rows] = oov[index]
            if chunk.mask_oov:
                weights[rows] = weights[rows].masked_fill(outside[rows], 0)
            with torch.set_grad_enabled(needs_grad):
                logits.requires_grad_(needs_grad)
                losses = chunk.row_loss(F.log_softmax(logits, dim=-1), p[index])
            row_losses[rows] = losses.detach()
            if grad_hidden is not None and grad_head is not None:
                (grad,) = torch.autograd.grad(losses, logits, weights[rows])
                grad = grad.to(hidden.dtype)
                grad_hidden[rows] = grad @ head
                grad_head += grad.T @ hidden[rows]
        if chunk.mask_oov:
            row_losses.masked_fill_(outside, 0)
        if grad_hidden is not None and grad_head is not None:
            ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        ctx.mark_non_differentiable(row_losses, hits, outside)
        return (weights * row_losses).sum(), row_losses, hits, outside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grads[0]
        return grad_hidden * scale, grad_head * scale, None, None, None


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
