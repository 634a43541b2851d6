"""The unroll's attention on a GPU, in Triton; what each function computes is said in `plain`.

FlashAttention (arXiv 2205.14135, 2307.08691) over the step-0 columns, with the row's own few columns joined to the same
running softmax at the end of a block: nothing is concatenated and no mask is stored. Queries are walked in ascending
position whatever the rows' order, so that a block of them sees one range of columns, and only its two ends are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.row_layout import KEY_BLOCK, RowLayout

LOG2E = 1.4426950408889634


def attend(qkv: Tensor, step: int, heads: tuple[int, int, int], layout: RowLayout, out: Tensor, lse: Tensor) -> None:
    q_heads, kv_heads, width = heads
    first, last = layout.bounds(step)
    block = 128
    grid = (triton.cdiv(last - first, block), q_heads)
    _attend[grid](
        qkv[first:last],
        *_columns_of(qkv, heads, layout),
        qkv[:, q_heads * width :],
        out,
        lse,
        layout.order[step],
        layout.slots,
        layout.starts,
        layout.offsets,
        last - first,
        qkv.stride(0),
        q_heads,
        kv_heads,
        step,
        LOG2E / math.sqrt(width),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        QUERIES=block,
        KEYS=64 if width > 64 else 128,
        num_warps=8,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["rows", "step"])
def _attend(
    queries, keys, values, own_columns, out, lse, order, slots, starts, offsets, rows, stride, q_heads, kv_heads, step,
    scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The last blocks see most columns: they start first.
    index = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1)
    group = head // (q_heads // kv_heads)
    live = index < rows
    row = tl.load(order + index, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots + row)
    start = tl.load(starts + slot)
    lane = tl.arange(0, PADDED)
    wide = lane < WIDTH
    both = live[:, None] & wide[None, :]
    query = tl.load(queries + row[:, None] * stride + head * WIDTH + lane[None, :], mask=both, other=0.0)
    low = tl.min(tl.where(live, start, 2147483647), 0)
    high = tl.max(tl.where(live, slot, -1), 0) + 1
    # Columns that every query of the block sees.
    all_low = tl.max(tl.where(live, start, -1), 0)
    all_high = tl.min(tl.where(live, slot, 2147483647), 0) + 1
    key = keys + group * WIDTH
    value = values + group * WIDTH
    one = low + tl.cdiv(tl.maximum(all_low - low, 0), KEYS) * KEYS
    two = one + tl.maximum(all_high - one, 0) // KEYS * KEYS
    one = tl.minimum(one, tl.maximum(two, low))
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, PADDED], tl.float32)
    if one > low:
        mixed, top, total = _walk(
            mixed, top, total, query, key, value, stride, low, one, high, slot, start, scale, lane, wide, True, KEYS
        )
    mixed, top, total = _walk(
        mixed, top, total, query, key, value, stride, one, two, high, slot, start, scale, lane, wide, False, KEYS
    )
    mixed, top, total = _walk(
        mixed, top, total, query, key, value, stride, two, high, high, slot, start, scale, lane, wide, True, KEYS
    )
    query = query.to(tl.float32)
    for j in range(1, step + 1):
        own = own_columns + (tl.load(offsets + j) + row)[:, None] * stride + group * WIDTH + lane[None, :]
        own_key = tl.load(own, mask=both, other=0.0).to(tl.float32)
        score = tl.sum(query * own_key, 1) * scale
        now = tl.maximum(top, score)
        old = tl.exp2(top - now)
        weight = tl.exp2(score - now)
        own_value = tl.load(own + kv_heads * WIDTH, mask=both, other=0.0).to(tl.float32)
        mixed = mixed * old[:, None] + weight[:, None] * own_value
        total = total * old + weight
        top = now
    place = out + (row * q_heads + head)[:, None] * WIDTH + lane[None, :]
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=both)
    tl.store(lse + head * rows + row, (top + tl.log2(total)) * 0.6931471805599453, mask=live)


@triton.jit
def _walk(
    mixed, top, total, query, key, value, stride, begin, end, high, slot, start, scale, lane, wide,
    MASKED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Takes the columns [begin, end) into the running softmax of a block of queries."""
    for at in range(begin, end, KEYS):
        column = at + tl.arange(0, KEYS)
        inside = (column < high)[:, None] & wide[None, :]
        place = column.to(tl.int64)[:, None] * stride + lane[None, :]
        keys = tl.load(key + place, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(keys)) * scale
        if MASKED:
            visible = (column[None, :] <= slot[:, None]) & (column[None, :] >= start[:, None])
            score = tl.where(visible, score, -float("inf"))
        now = tl.maximum(top, tl.max(score, 1))
        # A query of a later document than these columns' has seen nothing yet.
        safe = tl.where(now == -float("inf"), 0.0, now)
        weight = tl.exp2(score - safe[:, None])
        old = tl.exp2(top - safe)
        total = total * old + tl.sum(weight, 1)
        values = tl.load(value + place, mask=inside, other=0.0)
        mixed = tl.dot(weight.to(values.dtype), values, mixed * old[:, None])
        top = now
    return mixed, top, total


def attend_backward(
    qkv: Tensor,
    step: int,
    heads: tuple[int, int, int],
    layout: RowLayout,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grads: Tensor,
    column_grads: Tensor,
    own_weights: Tensor,
    own_scores: Tensor,
) -> None:
    q_heads, kv_heads, width = heads
    first, last = layout.bounds(step)
    rows = last - first
    delta = torch.empty_like(lse)
    scale = 1 / math.sqrt(width)
    padded = triton.next_power_of_2(width)
    _queries[(triton.cdiv(rows, 128), q_heads)](
        qkv[first:last],
        *_columns_of(qkv, heads, layout),
        qkv[:, q_heads * width :],
        out,
        grad_out,
        lse,
        delta,
        grads[first:last],
        own_weights,
        own_scores,
        layout.order[step],
        layout.slots,
        layout.starts,
        layout.offsets,
        rows,
        qkv.stride(0),
        q_heads,
        kv_heads,
        step,
        scale,
        WIDTH=width,
        PADDED=padded,
        QUERIES=128,
        KEYS=64,
        num_warps=8,
        num_stages=2,
    )
    _columns[(triton.cdiv(layout.tokens, KEY_BLOCK), kv_heads)](
        qkv[first:last],
        *_columns_of(qkv, heads, layout),
        grad_out,
        lse,
        delta,
        column_grads,
        layout.order[step],
        layout.slots,
        layout.starts,
        layout.key_ranges[step],
        rows,
        layout.tokens,
        qkv.stride(0),
        q_heads,
        kv_heads,
        scale,
        WIDTH=width,
        PADDED=padded,
        QUERIES=64,
        KEYS=KEY_BLOCK,
        num_warps=4,
        num_stages=2,
    )


@triton.jit(do_not_specialize=["rows", "step"])
def _queries(
    queries, keys, values, own_columns, out, grad_out, lse, delta, grads, own_weights, own_scores,
    order, slots, starts, offsets, rows, stride, q_heads, kv_heads, step, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries, and what their own columns need."""
    index = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(1)
    group = head // (q_heads // kv_heads)
    live = index < rows
    row = tl.load(order + index, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots + row)
    start = tl.load(starts + slot)
    lane = tl.arange(0, PADDED)
    wide = lane < WIDTH
    both = live[:, None] & wide[None, :]
    place = row[:, None] * stride + head * WIDTH + lane[None, :]
    query = tl.load(queries + place, mask=both, other=0.0)
    attended = (row * q_heads + head)[:, None] * WIDTH + lane[None, :]
    grad = tl.load(grad_out + attended, mask=both, other=0.0)
    output = tl.load(out + attended, mask=both, other=0.0)
    share = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(delta + head * rows + row, share, mask=live)
    log_sum = tl.load(lse + head * rows + row, mask=live, other=0.0) * 1.4426950408889634
    low = tl.min(tl.where(live, start, 2147483647), 0)
    high = tl.max(tl.where(live, slot, -1), 0) + 1
    all_low = tl.max(tl.where(live, start, -1), 0)
    all_high = tl.min(tl.where(live, slot, 2147483647), 0) + 1
    key = keys + group * WIDTH
    value = values + group * WIDTH
    one = low + tl.cdiv(tl.maximum(all_low - low, 0), KEYS) * KEYS
    two = one + tl.maximum(all_high - one, 0) // KEYS * KEYS
    one = tl.minimum(one, tl.maximum(two, low))
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    if one > low:
        total = _walk_back(
            total, query, grad, log_sum, share, key, value, stride, low, one, high, slot, start, scale, lane, wide,
            True, KEYS,
        )  # fmt: skip
    total = _walk_back(
        total, query, grad, log_sum, share, key, value, stride, one, two, high, slot, start, scale, lane, wide,
        False, KEYS,
    )  # fmt: skip
    total = _walk_back(
        total, query, grad, log_sum, share, key, value, stride, two, high, high, slot, start, scale, lane, wide,
        True, KEYS,
    )  # fmt: skip
    query, grad = query.to(tl.float32), grad.to(tl.float32)
    for j in range(1, step + 1):
        own = own_columns + (tl.load(offsets + j) + row)[:, None] * stride + group * WIDTH + lane[None, :]
        own_key = tl.load(own, mask=both, other=0.0).to(tl.float32)
        own_value = tl.load(own + kv_heads * WIDTH, mask=both, other=0.0).to(tl.float32)
        weight = tl.exp2(tl.sum(query * own_key, 1) * (scale * 1.4426950408889634) - log_sum)
        score = weight * (tl.sum(grad * own_value, 1) - share)
        total += score[:, None] * own_key
        at = ((j - 1) * q_heads + head) * rows + row
        tl.store(own_weights + at, weight, mask=live)
        tl.store(own_scores + at, score, mask=live)
    tl.store(grads + place, (total * scale).to(grads.dtype.element_ty), mask=both)


@triton.jit
def _walk_back(
    total, query, grad, log_sum, share, key, value, stride, begin, end, high, slot, start, scale, lane, wide,
    MASKED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds what the columns [begin, end) give to the gradient of a block of queries."""
    for at in range(begin, end, KEYS):
        column = at + tl.arange(0, KEYS)
        inside = (column < high)[:, None] & wide[None, :]
        place = column.to(tl.int64)[:, None] * stride + lane[None, :]
        keys = tl.load(key + place, mask=inside, other=0.0)
        values = tl.load(value + place, mask=inside, other=0.0)
        weight = tl.exp2(tl.dot(query, tl.trans(keys)) * (scale * 1.4426950408889634) - log_sum[:, None])
        if MASKED:
            visible = (column[None, :] <= slot[:, None]) & (column[None, :] >= start[:, None])
            weight = tl.where(visible, weight, 0.0)
        score = weight * (tl.dot(grad, tl.trans(values)) - share[:, None])
        total = tl.dot(score.to(keys.dtype), keys, total)
    return total


@triton.jit(do_not_specialize=["rows", "tokens"])
def _columns(
    queries, all_keys, all_values, grad_out, lse, delta, column_grads, order, slots, starts, ranges, rows, tokens, stride,
    q_heads, kv_heads, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one step's part to the gradients of a block of step-0 keys and values."""
    block = tl.program_id(0)
    group = tl.program_id(1)
    column = block * KEYS + tl.arange(0, KEYS)
    lane = tl.arange(0, PADDED)
    wide = lane < WIDTH
    inside = (column < tokens)[:, None] & wide[None, :]
    place = column.to(tl.int64)[:, None] * stride + group * WIDTH + lane[None, :]
    keys = tl.load(all_keys + place, mask=inside, other=0.0)
    values = tl.load(all_values + place, mask=inside, other=0.0)
    begin = tl.load(ranges + block * 3)
    full = tl.load(ranges + block * 3 + 1)
    end = tl.load(ranges + block * 3 + 2)
    full = tl.minimum(begin + tl.cdiv(full - begin, QUERIES) * QUERIES, end)
    key_total = tl.zeros([KEYS, PADDED], tl.float32)
    value_total = tl.zeros([KEYS, PADDED], tl.float32)
    heads = q_heads // kv_heads
    for head in range(group * heads, (group + 1) * heads):
        key_total, value_total = _gather(
            key_total, value_total, keys, values, queries, grad_out, lse, delta, order, slots, starts, rows, stride,
            q_heads, head, begin, full, end, column, scale, lane, wide, True, WIDTH, QUERIES,
        )  # fmt: skip
        key_total, value_total = _gather(
            key_total, value_total, keys, values, queries, grad_out, lse, delta, order, slots, starts, rows, stride,
            q_heads, head, full, end, end, column, scale, lane, wide, False, WIDTH, QUERIES,
        )  # fmt: skip
    place = column_grads + column.to(tl.int64)[:, None] * (2 * kv_heads * WIDTH) + group * WIDTH + lane[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + key_total * scale, mask=inside)
    place += kv_heads * WIDTH
    tl.store(place, tl.load(place, mask=inside, other=0.0) + value_total, mask=inside)


@triton.jit
def _gather(
    key_total, value_total, keys, values, queries, grad_out, lse, delta, order, slots, starts, rows, stride,
    q_heads, head, begin, end, stop, column, scale, lane, wide,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Adds what the queries order[begin:end) of one head give to a block of columns."""
    for at in range(begin, end, QUERIES):
        index = at + tl.arange(0, QUERIES)
        live = index < stop
        row = tl.load(order + index, mask=live, other=0).to(tl.int64)
        both = live[:, None] & wide[None, :]
        query = tl.load(queries + row[:, None] * stride + head * WIDTH + lane[None, :], mask=both, other=0.0)
        grad = tl.load(grad_out + (row * q_heads + head)[:, None] * WIDTH + lane[None, :], mask=both, other=0.0)
        log_sum = tl.load(lse + head * rows + row, mask=live, other=float("inf")) * 1.4426950408889634
        share = tl.load(delta + head * rows + row, mask=live, other=0.0)
        weight = tl.exp2(tl.dot(keys, tl.trans(query)) * (scale * 1.4426950408889634) - log_sum[None, :])
        if MASKED:
            slot = tl.load(slots + row)
            start = tl.load(starts + slot)
            visible = (column[:, None] <= slot[None, :]) & (column[:, None] >= start[None, :])
            weight = tl.where(visible, weight, 0.0)
        value_total = tl.dot(weight.to(grad.dtype), grad, value_total)
        score = weight * (tl.dot(values, tl.trans(grad)) - share[None, :])
        key_total = tl.dot(score.to(query.dtype), query, key_total)
    return key_total, value_total


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
    q_heads, kv_heads, width = heads
    first, last = layout.bounds(step)
    rows = last - first
    padded = triton.next_power_of_2(width)
    some = 16
    total = torch.zeros(2, rows, kv_heads * width, dtype=torch.float32, device=qkv.device)
    for later in range(step, layout.steps):
        begin, end = layout.bounds(later)
        if begin == end:
            break
        _own[(triton.cdiv(end - begin, some), kv_heads)](
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
            PADDED=padded,
            ROWS=some,
            num_warps=4,
        )
    grads[first:last, q_heads * width :].view(rows, 2, -1).copy_(total.transpose(0, 1))


@triton.jit(do_not_specialize=["later_rows", "rows"])
def _own(
    queries, grad_out, own_weights, own_scores, total, later_rows, rows, stride, q_heads, kv_heads, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.program_id(1)
    lane = tl.arange(0, PADDED)
    live = row < later_rows
    both = live[:, None] & (lane < WIDTH)[None, :]
    key_total = tl.zeros([ROWS, PADDED], tl.float32)
    value_total = tl.zeros([ROWS, PADDED], tl.float32)
    heads = q_heads // kv_heads
    for head in range(group * heads, (group + 1) * heads):
        at = head * WIDTH + lane[None, :]
        query = tl.load(queries + row[:, None] * stride + at, mask=both, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + row[:, None] * (q_heads * WIDTH) + at, mask=both, other=0.0).to(tl.float32)
        key_total += tl.load(own_scores + head * later_rows + row, mask=live, other=0.0)[:, None] * query
        value_total += tl.load(own_weights + head * later_rows + row, mask=live, other=0.0)[:, None] * grad
    place = total + row[:, None] * (kv_heads * WIDTH) + group * WIDTH + lane[None, :]
    tl.store(place, tl.load(place, mask=both, other=0.0) + key_total * scale, mask=both)
    place += tl.cast(rows, tl.int64) * kv_heads * WIDTH
    tl.store(place, tl.load(place, mask=both, other=0.0) + value_total, mask=both)



def _columns_of(qkv: Tensor, heads: tuple[int, int, int], layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Where the keys and the values of step 0 begin."""
    q_heads, kv_heads, width = heads
    rows = qkv[layout.stacked :]
    return rows[:, q_heads * width :], rows[:, (q_heads + kv_heads) * width :]
