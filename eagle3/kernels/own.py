"""A row's own columns: the few keys and values that its later unroll steps added, joined to the softmax over the rest.

Every row has its own, so nothing here is a matrix product. Per query and step they are one score each; what the
backward pass needs of them is kept in fp32, as `row_layout.own_columns` says.
"""

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.head_rows import HeadRows
from eagle3.kernels.operands import operands, padded_widths
from eagle3.row_layout import RowLayout

ROWS = 16  # rows to a program


def join(rows: HeadRows, step: int, layout: RowLayout, out: Tensor, lse: Tensor) -> None:
    """Joins the columns of steps 1 … step to `out` [n, q_heads * E] and `lse` [q_heads, n] of step 0's, in place.

    `lse` is in ascending order of queries.
    """
    q_heads, kv_heads = rows.heads
    _join[(triton.cdiv(len(out), ROWS), q_heads)](
        *operands(rows, layout.bounds(step), 0),
        out,
        lse,
        layout.order(step),
        layout.offsets,
        len(out),
        q_heads,
        kv_heads,
        step,
        rows.scale,
        **padded_widths(rows),
        SIZE=ROWS,
        num_warps=4,
    )


@triton.jit
def _some(order, rows, SIZE: tl.constexpr):
    """A program's queries: their numbers in ascending order, which exist, their rows."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live = index < rows
    return index, live, tl.load(order + index, mask=live, other=0).to(tl.int64)


@triton.jit
def _wide(base, both, lane):
    """Rows that begin at `base` [n, 1], in fp32, zero where not `both`."""
    return tl.load(base + lane, mask=both, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "step"])
def _join(
    query, key, value, shared, q_stride, q_head, kv_stride, kv_head, shared_stride, out, lse, order, offsets, rows,
    q_heads, kv_heads, step, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    group = head // (q_heads // kv_heads)
    index, live, row = _some(order, rows, SIZE)
    lane, value_lane = tl.arange(0, DP)[None, :], tl.arange(0, EP)[None, :]
    both, value_both = live[:, None] & (lane < D), live[:, None] & (value_lane < E)
    at = query + row[:, None] * q_stride + head * q_head
    q = _wide(at, both, lane) * scale
    if R:
        rest_lane = tl.arange(0, RP)[None, :]
        rest_both = live[:, None] & (rest_lane < R)
        rest = _wide(at + D, rest_both, rest_lane) * scale
    place = out + (row * q_heads + head)[:, None] * E + value_lane
    mixed = tl.load(place, mask=value_both, other=0.0).to(tl.float32)
    top = tl.load(lse + head * rows + index, mask=live, other=0.0)
    total = tl.full([SIZE], 1.0, tl.float32)
    for j in range(1, step + 1):
        own = (tl.load(offsets + j) + row)[:, None]
        column = own * kv_stride + group * kv_head
        score = tl.sum(q * _wide(key + column, both, lane), 1)
        if R:
            score += tl.sum(rest * _wide(shared + own * shared_stride, rest_both, rest_lane), 1)
        now = tl.maximum(top, score)
        old, weight = tl.exp(top - now), tl.exp(score - now)
        mixed = mixed * old[:, None] + weight[:, None] * _wide(value + column, value_both, value_lane)
        total = total * old + weight
        top = now
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=value_both)
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
    head = tl.program_id(1)
    index, live, row = _some(order, rows, SIZE)
    lane = tl.arange(0, PADDED)[None, :]
    both = live[:, None] & (lane < WIDTH)
    at = (row * q_heads + head)[:, None] * WIDTH
    product = _wide(out + at, both, lane) * _wide(grad_out + at, both, lane)
    tl.store(found + head * rows + index, tl.sum(product, 1), mask=live)


def join_backward(
    rows: HeadRows,
    step: int,
    layout: RowLayout,
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    grad_query: Tensor,
    own_weights: Tensor,
    own_scores: Tensor,
) -> None:
    """Adds the own columns' part to `grad_query` and leaves their weights and scores' gradients [step, q_heads, n_0].

    `grad_query` has the queries' strides.
    """
    q_heads, kv_heads = rows.heads
    _join_backward[(triton.cdiv(len(grad_out), ROWS), q_heads)](
        *operands(rows, layout.bounds(step), 0),
        lse,
        delta,
        grad_out,
        grad_query,
        own_weights,
        own_scores,
        layout.order(step),
        layout.offsets,
        len(grad_out),
        own_weights.stride(1),
        q_heads,
        kv_heads,
        step,
        rows.scale,
        **padded_widths(rows),
        SIZE=ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "own_stride", "step"])
def _join_backward(
    query, key, value, shared, q_stride, q_head, kv_stride, kv_head, shared_stride, lse, delta, grad_out, grad_query,
    own_weights, own_scores, order, offsets, rows, own_stride, q_heads, kv_heads, step, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    group = head // (q_heads // kv_heads)
    index, live, row = _some(order, rows, SIZE)
    lane, value_lane = tl.arange(0, DP)[None, :], tl.arange(0, EP)[None, :]
    both, value_both = live[:, None] & (lane < D), live[:, None] & (value_lane < E)
    at = row[:, None] * q_stride + head * q_head
    q = _wide(query + at, both, lane)
    total = _wide(grad_query + at, both, lane)
    if R:
        rest_lane = tl.arange(0, RP)[None, :]
        rest_both = live[:, None] & (rest_lane < R)
        rest = _wide(query + at + D, rest_both, rest_lane)
        total_rest = _wide(grad_query + at + D, rest_both, rest_lane)
    grad = _wide(grad_out + (row * q_heads + head)[:, None] * E, value_both, value_lane)
    log_sum = tl.load(lse + head * rows + index, mask=live, other=0.0)
    share = tl.load(delta + head * rows + index, mask=live, other=0.0)
    for j in range(1, step + 1):
        own = (tl.load(offsets + j) + row)[:, None]
        column = own * kv_stride + group * kv_head
        k = _wide(key + column, both, lane)
        score = tl.sum(q * k, 1)
        if R:
            s = _wide(shared + own * shared_stride, rest_both, rest_lane)
            score += tl.sum(rest * s, 1)
        weight = tl.exp(score * scale - log_sum)
        score = weight * (tl.sum(grad * _wide(value + column, value_both, value_lane), 1) - share)
        total += (score * scale)[:, None] * k
        if R:
            total_rest += (score * scale)[:, None] * s
        place = ((j - 1) * q_heads + head) * own_stride + row
        tl.store(own_weights + place, weight, mask=live)
        tl.store(own_scores + place, score, mask=live)
    tl.store(grad_query + at + lane, total.to(grad_query.dtype.element_ty), mask=both)
    if R:
        tl.store(grad_query + at + D + rest_lane, total_rest.to(grad_query.dtype.element_ty), mask=rest_both)


def own_backward(
    rows: HeadRows,
    step: int,
    layout: RowLayout,
    grad_out: Tensor,
    grads: HeadRows,
    own_weights: Tensor,
    own_scores: Tensor,
) -> None:
    """As `plain.own_backward`."""
    q_heads, kv_heads = rows.heads
    first, last = layout.bounds(step)
    shared = torch.empty(last - first, kv_heads, rows.widths[2], dtype=torch.float32, device=grad_out.device)
    _own[(triton.cdiv(last - first, ROWS), kv_heads)](
        rows.query,
        grad_out,
        own_weights,
        own_scores,
        grads.key[first:last],
        grads.value[first:last],
        shared,
        layout.offsets,
        *rows.query.stride()[:2],
        *grads.key.stride()[:2],
        last - first,
        layout.stacked,
        own_weights.stride(1),
        q_heads,
        kv_heads,
        step,
        layout.steps,
        rows.scale,
        **padded_widths(rows),
        SIZE=ROWS,
        num_warps=4,
    )
    if rows.widths[2]:
        grads.shared[first:last].copy_(shared.sum(1))


@triton.jit(do_not_specialize=["rows", "stacked", "own_stride", "step", "steps"])
def _own(
    query, grad_out, own_weights, own_scores, grad_key, grad_value, grad_shared, offsets, q_stride, q_head, kv_stride,
    kv_head, rows, stacked, own_stride, q_heads, kv_heads, step, steps, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    group = tl.program_id(1)
    lane, value_lane = tl.arange(0, DP)[None, :], tl.arange(0, EP)[None, :]
    key_total = tl.zeros([SIZE, DP], tl.float32)
    value_total = tl.zeros([SIZE, EP], tl.float32)
    if R:
        rest_lane = tl.arange(0, RP)[None, :]
        shared_total = tl.zeros([SIZE, RP], tl.float32)
    heads = q_heads // kv_heads
    for turn in range((steps - step) * heads):
        later, head = step + turn // heads, group * heads + turn % heads
        begin = tl.load(offsets + later)
        end = tl.load(offsets + later + 1, mask=later + 1 < steps, other=stacked)
        live = row < end - begin
        own = ((later * (later - 1) // 2 + step - 1) * q_heads + head) * own_stride + row
        score = tl.load(own_scores + own, mask=live, other=0.0)[:, None]
        weight = tl.load(own_weights + own, mask=live, other=0.0)[:, None]
        live = live[:, None]
        at = query + (begin + row)[:, None] * q_stride + head * q_head
        key_total += score * _wide(at, live & (lane < D), lane)
        at_grad = grad_out + ((begin + row) * q_heads + head)[:, None] * E
        value_total += weight * _wide(at_grad, live & (value_lane < E), value_lane)
        if R:
            shared_total += score * _wide(at + D, live & (rest_lane < R), rest_lane)
    live = (row < rows)[:, None]
    at = row[:, None] * kv_stride + group * kv_head
    kind = grad_key.dtype.element_ty
    tl.store(grad_key + at + lane, (key_total * scale).to(kind), mask=live & (lane < D))
    tl.store(grad_value + at + value_lane, value_total.to(kind), mask=live & (value_lane < E))
    if R:
        place = grad_shared + (row * kv_heads + group)[:, None] * R + rest_lane
        tl.store(place, shared_total * scale, mask=live & (rest_lane < R))
