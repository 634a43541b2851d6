"""A row's own columns: the few keys and values that its later unroll steps added, joined to the softmax over the rest.

Every row has its own, so nothing here is a matrix product. Per query and step they are one score each; what the
backward pass needs of them is kept in fp32 [steps, q_heads, n].
"""

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.row_layout import RowLayout

ROWS = 16  # rows to a program


def join(
    query: Tensor, columns: Tensor, step: int, heads: tuple[int, int, int], layout: RowLayout, out: Tensor, lse: Tensor
) -> None:
    """Joins the columns of steps 1 … step to `out` [n, q_heads * D] and `lse` [q_heads, n] of step 0's, in place.

    `query` [n, …] and `columns` (all steps' keys and values, stacked as the layout says) share a row stride; `lse` is
    in ascending order of queries.
    """
    q_heads, kv_heads, width = heads
    _join[(triton.cdiv(len(query), ROWS), q_heads)](
        query,
        columns,
        out,
        lse,
        layout.order(step),
        layout.offsets,
        len(query),
        query.stride(0),
        q_heads,
        kv_heads,
        step,
        1 / math.sqrt(width),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        SIZE=ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "step"])
def _join(
    query, columns, out, lse, order, offsets, rows, stride, q_heads, kv_heads, step, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    head = tl.program_id(1)
    group = head // (q_heads // kv_heads)
    live = index < rows
    row = tl.load(order + index, mask=live, other=0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    both = live[:, None] & (lane < WIDTH)[None, :]
    q = (
        tl.load(query + row[:, None] * stride + head * WIDTH + lane[None, :], mask=both, other=0.0).to(tl.float32)
        * scale
    )
    place = out + (row * q_heads + head)[:, None] * WIDTH + lane[None, :]
    mixed = tl.load(place, mask=both, other=0.0).to(tl.float32)
    top = tl.load(lse + head * rows + index, mask=live, other=0.0)
    total = tl.full([SIZE], 1.0, tl.float32)
    for j in range(1, step + 1):
        own = columns + (tl.load(offsets + j) + row)[:, None] * stride + group * WIDTH + lane[None, :]
        score = tl.sum(q * tl.load(own, mask=both, other=0.0).to(tl.float32), 1)
        now = tl.maximum(top, score)
        old, weight = tl.exp(top - now), tl.exp(score - now)
        value = tl.load(own + kv_heads * WIDTH, mask=both, other=0.0).to(tl.float32)
        mixed = mixed * old[:, None] + weight[:, None] * value
        total = total * old + weight
        top = now
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=both)
    tl.store(lse + head * rows + index, top + tl.log(total), mask=live)


def deltas(out: Tensor, grad_out: Tensor, q_heads: int, order: Tensor) -> Tensor:
    """Σ out * grad_out over each head's width: fp32 [q_heads, n], queries in ascending order."""
    rows, width = len(out), out.shape[1] // q_heads
    found = torch.empty(q_heads, rows, dtype=torch.float32, device=out.device)
    _deltas[(triton.cdiv(rows, ROWS), q_heads)](
        out,
        grad_out,
        found,
        order,
        rows,
        q_heads,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        SIZE=ROWS,
        num_warps=4,
    )
    return found


@triton.jit(do_not_specialize=["rows"])
def _deltas(out, grad_out, found, order, rows, q_heads, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    head = tl.program_id(1)
    live = index < rows
    row = tl.load(order + index, mask=live, other=0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    both = live[:, None] & (lane < WIDTH)[None, :]
    at = (row * q_heads + head)[:, None] * WIDTH + lane[None, :]
    left = tl.load(out + at, mask=both, other=0.0).to(tl.float32)
    right = tl.load(grad_out + at, mask=both, other=0.0).to(tl.float32)
    tl.store(found + head * rows + index, tl.sum(left * right, 1), mask=live)


def join_backward(
    query: Tensor,
    columns: Tensor,
    step: int,
    heads: tuple[int, int, int],
    layout: RowLayout,
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    grad_query: Tensor,
    own_weights: Tensor,
    own_scores: Tensor,
) -> None:
    """Adds the own columns' part to `grad_query` and leaves their weights and scores' gradients [step, q_heads, n]."""
    q_heads, kv_heads, width = heads
    _join_backward[(triton.cdiv(len(query), ROWS), q_heads)](
        query,
        columns,
        lse,
        delta,
        grad_out,
        grad_query,
        own_weights,
        own_scores,
        layout.order(step),
        layout.offsets,
        len(query),
        query.stride(0),
        q_heads,
        kv_heads,
        step,
        1 / math.sqrt(width),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        SIZE=ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "step"])
def _join_backward(
    query, columns, lse, delta, grad_out, grad_query, own_weights, own_scores, order, offsets, rows, stride, q_heads,
    kv_heads, step, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    head = tl.program_id(1)
    group = head // (q_heads // kv_heads)
    live = index < rows
    row = tl.load(order + index, mask=live, other=0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    both = live[:, None] & (lane < WIDTH)[None, :]
    at = row[:, None] * stride + head * WIDTH + lane[None, :]
    q = tl.load(query + at, mask=both, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + (row * q_heads + head)[:, None] * WIDTH + lane[None, :], mask=both, other=0.0).to(
        tl.float32
    )
    total = tl.load(grad_query + at, mask=both, other=0.0).to(tl.float32)
    log_sum = tl.load(lse + head * rows + index, mask=live, other=0.0)
    share = tl.load(delta + head * rows + index, mask=live, other=0.0)
    for j in range(1, step + 1):
        own = columns + (tl.load(offsets + j) + row)[:, None] * stride + group * WIDTH + lane[None, :]
        key = tl.load(own, mask=both, other=0.0).to(tl.float32)
        value = tl.load(own + kv_heads * WIDTH, mask=both, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key, 1) * scale - log_sum)
        score = weight * (tl.sum(grad * value, 1) - share)
        total += (score * scale)[:, None] * key
        place = ((j - 1) * q_heads + head) * rows + row
        tl.store(own_weights + place, weight, mask=live)
        tl.store(own_scores + place, score, mask=live)
    tl.store(grad_query + at, total.to(grad_query.dtype.element_ty), mask=both)


def own_backward(
    qkv: Tensor,
    step: int,
    heads: tuple[int, int, int],
    layout: RowLayout,
    grad_out: Tensor,
    grads: Tensor,
    own_weights: Sequence[Tensor],
    own_scores: Sequence[Tensor],
) -> None:
    """As `plain.own_backward`."""
    q_heads, kv_heads, width = heads
    first, last = layout.bounds(step)
    rows = last - first
    total = torch.zeros(2, rows, kv_heads * width, dtype=torch.float32, device=qkv.device)
    for later in range(step, layout.steps):
        begin, end = layout.bounds(later)
        if begin == end:
            break
        _own[(triton.cdiv(end - begin, ROWS), kv_heads)](
            qkv[begin:end],
            grad_out[begin:end],
            own_weights[later][step - 1],
            own_scores[later][step - 1],
            total,
            end - begin,
            rows,
            qkv.stride(0),
            q_heads,
            kv_heads,
            1 / math.sqrt(width),
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            SIZE=ROWS,
            num_warps=4,
        )
    grads[first:last, q_heads * width :].view(rows, 2, -1).copy_(total.transpose(0, 1))


@triton.jit(do_not_specialize=["later_rows", "rows"])
def _own(
    query, grad_out, own_weights, own_scores, total, later_rows, rows, stride, q_heads, kv_heads, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    group = tl.program_id(1)
    lane = tl.arange(0, PADDED)
    live = row < later_rows
    both = live[:, None] & (lane < WIDTH)[None, :]
    key_total = tl.zeros([SIZE, PADDED], tl.float32)
    value_total = tl.zeros([SIZE, PADDED], tl.float32)
    heads = q_heads // kv_heads
    for head in range(group * heads, (group + 1) * heads):
        at = head * WIDTH + lane[None, :]
        q = tl.load(query + row[:, None] * stride + at, mask=both, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + row[:, None] * (q_heads * WIDTH) + at, mask=both, other=0.0).to(tl.float32)
        key_total += tl.load(own_scores + head * later_rows + row, mask=live, other=0.0)[:, None] * q
        value_total += tl.load(own_weights + head * later_rows + row, mask=live, other=0.0)[:, None] * grad
    place = total + row[:, None] * (kv_heads * WIDTH) + group * WIDTH + lane[None, :]
    tl.store(place, tl.load(place, mask=both, other=0.0) + key_total * scale, mask=both)
    place += tl.cast(rows, tl.int64) * kv_heads * WIDTH
    tl.store(place, tl.load(place, mask=both, other=0.0) + value_total, mask=both)
