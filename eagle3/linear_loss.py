"""The drafter's head and the unroll's loss in one, without a full logits tensor (walk: step 6).

As `loss.unroll_loss`, for the rows of `unroll`: teacher tokens are taken in chunks, each with all the rows that it
teaches, and a chunk's logits become gradients in place. Logits of the teacher are fp32 sums, and so is the head's
gradient; softmax arithmetic is fp32. Idea of gradients in the forward pass: Liger Kernel's fused linear cross-entropy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.compute_weights import product_of_rows_
from eagle3.kernels import kernels_for
from eagle3.loss import UnrollLoss
from eagle3.row_layout import RowLayout

Mix = tuple[float, float, float, float]
CHUNK_BYTES = 1 << 30  # of logits that live at once


class DraftTeacher:
    """The target's head with the rows of the draft vocabulary first, so that their logits are a slice and no gather.

    weight [V, H]: D rows of the draft vocabulary in its order, then the others. `normed` applies the final norm.
    """

    def __init__(self, normed: Callable[[Tensor], Tensor], weight: Tensor, draft_ids: Tensor | None) -> None:
        self.normed = normed
        self.draft_vocab_size = len(weight) if draft_ids is None else len(draft_ids)
        if draft_ids is not None:
            others = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
            others[draft_ids] = False
            weight = torch.cat((weight[draft_ids], weight[others]))
        self.weight, self.draft_ids = weight, draft_ids

    @torch.no_grad()
    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of final states [U, H]: logits over the draft vocabulary [U, D] and their log-sum-exps [U]; and whether the
        argmax over the full vocabulary lies outside [U]."""
        normed = self.normed(states).to(self.weight.dtype)
        logits = exact_product(normed, self.weight[: self.draft_vocab_size])
        sums, tops = kernels_for(logits.device).row_sums(logits)
        if self.draft_vocab_size == len(self.weight):
            return logits, sums, torch.zeros(len(states), dtype=torch.bool, device=states.device)
        others = exact_product(normed, self.weight[self.draft_vocab_size :])
        return logits, sums, others.amax(-1) > tops


def exact_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, H] times weight [m, H] transposed, with sums of fp32 kept as they are."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows, weight.T, out_dtype=torch.float32)
    return rows @ weight.T


def stacked_loss(
    outputs: Tensor,
    head: Tensor,
    product: Tensor,
    final_states: Tensor,
    teacher: DraftTeacher,
    layout: RowLayout,
    step_weights: Tensor,
    mix: Mix = (1.0, 0.0, 0.0, 0.0),
    mask_oov: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
) -> UnrollLoss:
    """Compares stacked outputs [M, H] of `unroll` with the target's distributions.

    `head` [D, H] is the drafter's lm_head, `product` the same in the dtype of `outputs`, `final_states` [T, H] the
    target's, `step_weights` [steps] = decay^k over the count of rows supervised at k. Returns what `loss.unroll_loss`
    does.
    """
    loss, row_losses, hits, outside = _StackedLoss.apply(
        outputs, head, product, final_states, teacher, layout, step_weights, mix, mask_oov, chunk_bytes
    )
    by_step = layout.by_step
    return UnrollLoss(loss, row_losses[by_step], hits[by_step], outside[by_step])


class _StackedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        head: Tensor,
        weight: Tensor,
        final_states: Tensor,
        teacher: DraftTeacher,
        layout: RowLayout,
        step_weights: Tensor,
        mix: Mix,
        mask_oov: bool,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        needs_grad = any(ctx.needs_input_grad[:2])
        kernels = kernels_for(outputs.device)
        rows = outputs.index_select(0, layout.pairs)
        row_losses = torch.zeros(len(rows), dtype=exact, device=rows.device)
        guesses = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        outside = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        weights = step_weights.to(exact)[layout.steps_of]
        grad_head = torch.empty(head.shape, dtype=exact, device=rows.device) if needs_grad else None
        if grad_head is not None and len(rows) == 0:
            grad_head.zero_()
        for start, stop in _chunks(layout.pair_bounds, len(teacher.weight), len(head), chunk_bytes):
            first, last = int(layout.pair_bounds[start]), int(layout.pair_bounds[stop])
            targets, sums, oov = teacher(final_states.index_select(0, layout.teacher_tokens[start:stop]))
            index = layout.teachers[first:last] - start
            outside[first:last] = oov[index]
            if mask_oov:
                weights[first:last].masked_fill_(outside[first:last], 0)
            mine = rows[first:last]
            logits = mine @ weight.T
            row_losses[first:last], guesses[first:last] = kernels.compare_(
                logits, targets, sums, index, weights[first:last], mix
            )
            if grad_head is not None:
                product_of_rows_(grad_head, logits, mine, accumulate=first > 0)
                torch.mm(logits, weight, out=mine)
        if mask_oov:
            row_losses.masked_fill_(outside, 0)
        if grad_head is not None:
            if len(rows) == len(outputs):
                grad_outputs = rows.index_select(0, layout.pair_of_row)
            else:
                grad_outputs = torch.zeros_like(outputs).index_copy_(0, layout.pairs.long(), rows)
            ctx.save_for_backward(grad_outputs, grad_head)
            ctx.head_dtype = head.dtype
        targets = guesses if teacher.draft_ids is None else teacher.draft_ids[guesses]
        hits = targets == layout.labels
        ctx.mark_non_differentiable(row_losses, hits, outside)
        return (weights * row_losses).sum(), row_losses, hits, outside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_outputs, grad_head = ctx.saved_tensors
        scale = grads[0]
        return grad_outputs.mul_(scale), grad_head.mul_(scale).to(ctx.head_dtype), *[None] * 8


def _chunks(bounds: np.ndarray, target_vocab: int, draft_vocab: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Ranges of teacher tokens whose logits, the teacher's and the drafter's, stay within a budget of memory."""
    count, pairs = len(bounds) - 1, int(bounds[-1])
    if count == 0:
        return []
    size = 4 * target_vocab * count + 2 * draft_vocab * pairs
    pieces = min(max(-(-size // chunk_bytes), 1), count)
    edges = [count * i // pieces for i in range(pieces + 1)]
    return list(itertools.pairwise(edges))
