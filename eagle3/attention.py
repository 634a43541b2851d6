"""The unroll's attention: causal over a document's step-0 columns, joined with the slot's own later columns.

A query of step k (walk: step 6) sees the step-0 columns 0 … t of its document and its own columns of steps 1 … k under
one softmax. The step-0 columns are dense and shared by all steps; the own columns are one key a query and step. So the
two parts are computed apart and share one log-sum-exp; nothing is concatenated over T and no T x T mask exists. Only
the rows that a step needs are queries. This is the plain version for any device, exact and blocked over queries: it
skips the keys after a block's last query and keeps no scores for the backward pass, which recomputes them from the
log-sum-exp (FlashAttention's backward, arXiv 2205.14135, applied to the merged softmax).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

QUERY_BLOCK = 128


class Block(NamedTuple):
    """Queries [first, last) of a step's rows, all of one document, against step-0 columns [start, stop)."""

    first: int
    last: int
    start: int
    stop: int


def attention_blocks(rows: Tensor, cu_seqlens: Tensor, block: int = QUERY_BLOCK) -> tuple[Block, ...]:
    """Cuts a step's rows (packed positions, ascending) by document, then into blocks of at most `block` queries."""
    blocks = []
    bounds = torch.searchsorted(rows, cu_seqlens).tolist()
    for document, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for first in range(begin, end, block):
            last = min(first + block, end)
            blocks.append(Block(first, last, int(cu_seqlens[document]), int(rows[last - 1]) + 1))
    return tuple(blocks)


def unroll_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    rows: Tensor,
    blocks: Sequence[Block],
) -> Tensor:
    """Attends from a step's rows: queries [R, heads, D] → [R, heads, E].

    `key` [T, kv_heads, D] and `value` [T, kv_heads, E] are step 0's, for all packed rows; `own_keys` and `own_values`
    hold the same for the R rows, one for each later step up to this one; `rows` [R] are the queries' packed positions.
    Rotary embedding is already applied. Heads of one group lie side by side (grouped-query attention).
    """
    return _UnrollAttention.apply(query, key, value, rows, tuple(blocks), len(own_keys), *own_keys, *own_values)


class _UnrollAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor,
        blocks: tuple[Block, ...],
        columns: int,
        *own: Tensor,
    ) -> Tensor:
        scaled = _group(query, key.shape[1]) / math.sqrt(query.shape[-1])  # [R, kv, G, D]
        own_scores = _own_scores(scaled, own[:columns])  # [R, kv, G, columns]
        output = scaled.new_empty((*scaled.shape[:3], value.shape[-1]))
        log_sums = _wide(scaled.new_empty(scaled.shape[:3]))
        for block in blocks:
            first, last, start, stop = block
            scores = _scores(scaled, key, rows, block)  # [kv, G, r, n]
            mine = own_scores[first:last].permute(1, 2, 0, 3)
            top = scores.amax(-1)
            if columns:
                top = torch.maximum(top, mine.amax(-1))
            weights = scores.sub_(top[..., None]).exp_()
            total = weights.sum(-1) + torch.exp(mine - top[..., None]).sum(-1)
            mixed = _mix(weights.to(value.dtype), value[start:stop])
            output[first:last] = (mixed / total[..., None]).permute(2, 0, 1, 3)
            log_sums[first:last] = (top + total.log()).permute(2, 0, 1)
        own_weights = torch.exp(own_scores - log_sums[..., None]).to(value.dtype)
        for column, own_value in enumerate(own[columns:]):
            output.addcmul_(own_weights[..., column, None], own_value[:, :, None])
        ctx.save_for_backward(query, key, value, rows, output, log_sums, *own)
        ctx.blocks, ctx.columns = blocks, columns
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, rows, output, log_sums, *own = ctx.saved_tensors
        columns, scale = ctx.columns, 1.0 / math.sqrt(query.shape[-1])
        scaled = _group(query, key.shape[1]) * scale
        grad = grads[0].reshape(output.shape)
        delta = (_wide(grad) * _wide(output)).sum(-1)  # [R, kv, G]
        grad_query = torch.empty_like(scaled)
        grad_key = torch.zeros_like(_wide(key))
        grad_value = torch.zeros_like(_wide(value))
        for block in ctx.blocks:
            first, last, start, stop = block
            scores = _scores(scaled, key, rows, block)
            kv, group, r, n = scores.shape
            weights = scores.sub_(log_sums[first:last].permute(1, 2, 0)[..., None]).exp_()
            grad_rows = _by_head(grad[first:last])
            flat = weights.view(kv, group * r, n)
            grad_value[start:stop] += torch.bmm(flat.to(grad.dtype).mT, grad_rows).permute(1, 0, 2)
            grad_scores = _wide(torch.bmm(grad_rows, value[start:stop].permute(1, 2, 0))).view(kv, group, r, n)
            grad_scores.sub_(delta[first:last].permute(1, 2, 0)[..., None]).mul_(weights)
            grad_flat = grad_scores.view(kv, group * r, n).to(query.dtype)
            mixed = torch.bmm(grad_flat, key[start:stop].permute(1, 0, 2))
            grad_query[first:last] = mixed.view(kv, group, r, -1).permute(2, 0, 1, 3)
            grad_key[start:stop] += torch.bmm(grad_flat.mT, _by_head(scaled[first:last])).permute(1, 0, 2)
        own_key_grads: list[Tensor] = []
        own_value_grads: list[Tensor] = []
        own_weights = torch.exp(_own_scores(scaled, own[:columns]) - log_sums[..., None])
        for column, (own_key, own_value) in enumerate(zip(own[:columns], own[columns:], strict=True)):
            weight = own_weights[..., column, None]
            own_value_grads.append((weight * grad).sum(2).to(own_value.dtype))
            grad_weight = (_wide(grad) * _wide(own_value[:, :, None])).sum(-1, keepdim=True)
            grad_score = (weight * (grad_weight - delta[..., None])).to(query.dtype)
            own_key_grads.append((grad_score * scaled).sum(2))
            grad_query.addcmul_(grad_score, own_key[:, :, None])
        return (
            grad_query.mul_(scale).view(query.shape),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None,
            None,
            None,
            *own_key_grads,
            *own_value_grads,
        )


def _wide(x: Tensor) -> Tensor:
    """Softmax arithmetic is fp32, or fp64 for fp64 input."""
    return x if x.dtype == torch.float64 else x.float()


def _group(query: Tensor, kv_heads: int) -> Tensor:
    return query.reshape(query.shape[0], kv_heads, query.shape[1] // kv_heads, query.shape[2])


def _by_head(rows: Tensor) -> Tensor:
    """[r, kv_heads, G, D] → [kv_heads, G * r, D]: one matrix product for the heads that share keys."""
    return rows.permute(1, 2, 0, 3).reshape(rows.shape[1], -1, rows.shape[3])


def _scores(scaled: Tensor, key: Tensor, rows: Tensor, block: Block) -> Tensor:
    """Masked scores of one block: [kv_heads, G, r, n]."""
    first, last, start, stop = block
    kv, group = scaled.shape[1], scaled.shape[2]
    scores = _wide(torch.bmm(_by_head(scaled[first:last]), key[start:stop].permute(1, 2, 0)))
    scores = scores.view(kv, group, last - first, stop - start)
    columns = torch.arange(start, stop, device=rows.device)
    return scores.masked_fill_(columns[None, :] > rows[first:last, None], float("-inf"))


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    kv, group, r, n = weights.shape
    return torch.bmm(weights.view(kv, group * r, n), values.permute(1, 0, 2)).view(kv, group, r, -1)


def _own_scores(scaled: Tensor, own_keys: Sequence[Tensor]) -> Tensor:
    """Scores of each query with its own columns: [R, kv_heads, G, columns]."""
    if not own_keys:
        return _wide(scaled.new_empty((*scaled.shape[:3], 0)))
    return torch.stack([(_wide(scaled) * _wide(own_key[:, :, None])).sum(-1) for own_key in own_keys], dim=-1)
