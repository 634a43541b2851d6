"""Attention of selected rows over the step-0 columns, in Triton: FlashAttention (arXiv 2205.14135, 2307.08691) by rows.

Queries are walked in ascending position whatever the rows' order, so that a block of them sees one range of columns and
only its two ends are masked. The rows' own columns are joined afterwards (`own`).
"""

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle3.row_layout import KEY_BLOCK, RowLayout

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """How a kernel cuts its work: queries and keys to a block, warps, stages of the software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int

    def fit(self, rows: Tensor) -> Tile:
        """Operands of four bytes take half the tile, for the shared memory's sake."""
        return self if rows.element_size() < 4 else Tile(64, min(self.keys, 64), self.warps, 1)


ATTEND = Tile(64, 64, 4, 3)
QUERIES = Tile(128, 64, 8, 3)
COLUMNS = Tile(64, KEY_BLOCK, 4, 2)


def attend_columns(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: int,
    heads: tuple[int, int, int],
    layout: RowLayout,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of a step's queries [n, …] over columns key, value [T, …] alone; all three share a row stride.

    out [n, q_heads * D]; lse fp32 [q_heads, n], queries in ascending order.
    """
    q_heads, kv_heads, width = heads
    tile = ATTEND.fit(query)
    rows = len(query)
    _attend[(q_heads, triton.cdiv(rows, tile.queries))](
        query,
        key,
        value,
        out,
        lse,
        layout.order(step),
        layout.ascending(step),
        layout.starts,
        rows,
        query.stride(0),
        q_heads,
        q_heads // kv_heads,
        1 / math.sqrt(width),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        QUERIES=tile.queries,
        KEYS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["rows"])
def _attend(
    query, key, value, out, lse, order, slots, starts, rows, stride, q_heads, heads_to_key, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The last blocks see most columns: they start first, in all heads.
    index = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(0)
    near = tl.minimum(index, rows - 1)
    row = tl.load(order + near).to(tl.int64)
    slot = tl.load(slots + near)
    start = tl.load(starts + slot)
    low, high, one, two = _reach(slot, start, KEYS)
    lane = tl.arange(0, PADDED)
    wide = lane < WIDTH
    q = _rows(query + head * WIDTH, row, stride, lane, wide, WIDTH == PADDED)
    k = key + head // heads_to_key * WIDTH
    v = value + head // heads_to_key * WIDTH
    scale *= LOG2E
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, PADDED], tl.float32)
    mixed, top, total = _walk(
        mixed,
        top,
        total,
        q,
        k,
        v,
        stride,
        low,
        one,
        two,
        high,
        slot,
        start,
        scale,
        lane,
        wide,
        False,
        KEYS,
        WIDTH,
        PADDED,
    )
    mixed, top, total = _walk(
        mixed,
        top,
        total,
        q,
        k,
        v,
        stride,
        low,
        one,
        two,
        high,
        slot,
        start,
        scale,
        lane,
        wide,
        True,
        KEYS,
        WIDTH,
        PADDED,
    )
    live = index < rows
    place = out + (row * q_heads + head)[:, None] * WIDTH + lane[None, :]
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=live[:, None] & wide[None, :])
    tl.store(lse + head * rows + index, (top + tl.log2(total)) * LN2, mask=live)


@triton.jit
def _reach(slot, start, KEYS: tl.constexpr):
    """The columns [low, high) that some query of a block sees, and within them [one, two) that all see."""
    low, high = tl.min(start, 0), tl.max(slot, 0) + 1
    one = low + tl.cdiv(tl.max(start, 0) - low, KEYS) * KEYS
    two = one + tl.maximum(tl.min(slot, 0) + 1 - one, 0) // KEYS * KEYS
    # Where no column is seen by all, everything is walked as the rest.
    return low, high, tl.where(two > one, one, low), tl.where(two > one, two, low)


@triton.jit
def _turns(low, one, two, high, REST: tl.constexpr, SIZE: tl.constexpr):
    """How many tiles [one, two) has, which is whole; or how many [low, one) and [two, high) have together."""
    if REST:
        return (one - low) // SIZE + tl.cdiv(high - two, SIZE)
    return (two - one) // SIZE


@triton.jit
def _place(turn, low, one, two, REST: tl.constexpr, SIZE: tl.constexpr):
    """Where a tile of these begins."""
    if REST:
        before = (one - low) // SIZE
        return tl.where(turn < before, low + turn * SIZE, two + (turn - before) * SIZE)
    return one + turn * SIZE


@triton.jit
def _rows(base, row, stride, lane, wide, EXACT: tl.constexpr):
    """The rows of a matrix at these indices, [n, PADDED]."""
    place = base + row[:, None] * stride + lane[None, :]
    if EXACT:
        return tl.load(place)
    return tl.load(place, mask=wide[None, :], other=0.0)


@triton.jit
def _tile(base, at, high, stride, lane, wide, MASKED: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr):
    """The rows [at, at + KEYS) of a matrix, zero from `high` on."""
    start = base + tl.cast(at, tl.int64) * stride
    row = tl.arange(0, KEYS)
    place = start + row[:, None] * stride + lane[None, :]
    if MASKED:
        return tl.load(place, mask=(at + row < high)[:, None] & wide[None, :], other=0.0)
    if EXACT:
        return tl.load(place)
    return tl.load(place, mask=wide[None, :], other=0.0)


@triton.jit
def _visible(column, slot, start):
    return (column[None, :] <= slot[:, None]) & (column[None, :] >= start[:, None])


@triton.jit
def _walk(
    mixed, top, total, q, key, value, stride, low, one, two, high, slot, start, scale, lane, wide,
    MASKED: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Takes the columns that all queries of a block see, [one, two), or the rest into their running softmax."""
    for turn in range(_turns(low, one, two, high, MASKED, KEYS)):
        at = _place(turn, low, one, two, MASKED, KEYS)
        k = _tile(key, at, high, stride, lane, wide, MASKED, KEYS, WIDTH == PADDED)
        score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if MASKED:
            score = tl.where(_visible(at + tl.arange(0, KEYS), slot, start), score, -float("inf"))
        now = tl.maximum(top, tl.max(score, 1) * scale)
        shift = now
        if MASKED:  # a query of a later document than these columns' has seen nothing yet
            shift = tl.where(now == -float("inf"), 0.0, now)
        weight = tl.exp2(score * scale - shift[:, None])
        old = tl.exp2(top - shift)
        total = total * old + tl.sum(weight, 1)
        v = _tile(value, at, high, stride, lane, wide, MASKED, KEYS, WIDTH == PADDED)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * old[:, None], input_precision="tf32x3")
        top = now
    return mixed, top, total


def attend_columns_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: int,
    heads: tuple[int, int, int],
    layout: RowLayout,
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    grad_query: Tensor,
    grad_columns: Tensor,
) -> None:
    """Gradients of the queries [n, …], of `query`'s row stride, and of the columns, added to fp32 [T, 2 kv_heads * D].

    `lse` and `delta` [q_heads, n], queries in ascending order: the log-sum-exps and Σ out * grad_out of the whole
    softmax, own columns included.
    """
    q_heads, kv_heads, width = heads
    rows = len(query)
    scale, padded = 1 / math.sqrt(width), triton.next_power_of_2(width)
    tile = QUERIES.fit(query)
    _queries[(q_heads, triton.cdiv(rows, tile.queries))](
        query,
        key,
        value,
        grad_out,
        lse,
        delta,
        grad_query,
        layout.order(step),
        layout.ascending(step),
        layout.starts,
        rows,
        query.stride(0),
        q_heads,
        q_heads // kv_heads,
        scale,
        WIDTH=width,
        PADDED=padded,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tile = COLUMNS.fit(query)
    _columns[(kv_heads, triton.cdiv(layout.tokens, KEY_BLOCK))](
        query,
        key,
        value,
        grad_out,
        lse,
        delta,
        grad_columns,
        layout.order(step),
        layout.ascending(step),
        layout.starts,
        layout.key_ranges(step),
        rows,
        layout.tokens,
        query.stride(0),
        q_heads,
        kv_heads,
        scale,
        WIDTH=width,
        PADDED=padded,
        QUERIES=tile.queries,
        KEYS=KEY_BLOCK,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["rows"])
def _queries(
    query, key, value, grad_out, lse, delta, grad_query, order, slots, starts, rows, stride, q_heads, heads_to_key,
    scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries."""
    index = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES + tl.arange(0, QUERIES)
    head = tl.program_id(0)
    near = tl.minimum(index, rows - 1)
    row = tl.load(order + near).to(tl.int64)
    slot = tl.load(slots + near)
    start = tl.load(starts + slot)
    low, high, one, two = _reach(slot, start, KEYS)
    lane = tl.arange(0, PADDED)
    wide = lane < WIDTH
    q = _rows(query + head * WIDTH, row, stride, lane, wide, WIDTH == PADDED)
    g = _rows(grad_out + head * WIDTH, row, q_heads * WIDTH, lane, wide, WIDTH == PADDED)
    share = tl.load(delta + head * rows + near)
    log_sum = tl.load(lse + head * rows + near) * LOG2E
    k = key + head // heads_to_key * WIDTH
    v = value + head // heads_to_key * WIDTH
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    total = _walk_back(
        total, q, g, log_sum, share, k, v, stride, low, one, two, high, slot, start, scale, lane, wide, False, KEYS,
        WIDTH, PADDED,
    )  # fmt: skip
    total = _walk_back(
        total, q, g, log_sum, share, k, v, stride, low, one, two, high, slot, start, scale, lane, wide, True, KEYS,
        WIDTH, PADDED,
    )  # fmt: skip
    place = grad_query + head * WIDTH + row[:, None] * stride + lane[None, :]
    tl.store(place, (total * scale).to(grad_query.dtype.element_ty), mask=(index < rows)[:, None] & wide[None, :])


@triton.jit
def _walk_back(
    total, q, g, log_sum, share, key, value, stride, low, one, two, high, slot, start, scale, lane, wide,
    MASKED: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Adds what the columns that all queries of a block see, or the rest, give to the queries' gradient."""
    for turn in range(_turns(low, one, two, high, MASKED, KEYS)):
        at = _place(turn, low, one, two, MASKED, KEYS)
        k = _tile(key, at, high, stride, lane, wide, MASKED, KEYS, WIDTH == PADDED)
        v = _tile(value, at, high, stride, lane, wide, MASKED, KEYS, WIDTH == PADDED)
        score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        weight = tl.exp2(score * (scale * LOG2E) - log_sum[:, None])
        if MASKED:
            weight = tl.where(_visible(at + tl.arange(0, KEYS), slot, start), weight, 0.0)
        weight = weight * (tl.dot(g, tl.trans(v), input_precision="tf32x3") - share[:, None])
        total = tl.dot(weight.to(k.dtype), k, total, input_precision="tf32x3")
    return total


@triton.jit(do_not_specialize=["rows", "tokens"])
def _columns(
    query, key, value, grad_out, lse, delta, grad_columns, order, slots, starts, ranges, rows, tokens, stride, q_heads,
    kv_heads, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one step's part to the gradients of a block of step-0 keys and values."""
    group, block = tl.program_id(0), tl.program_id(1)
    column = block * KEYS + tl.arange(0, KEYS)
    lane = tl.arange(0, PADDED)
    wide = lane < WIDTH
    k = _tile(key + group * WIDTH, block * KEYS, tokens, stride, lane, wide, True, KEYS, WIDTH == PADDED)
    v = _tile(value + group * WIDTH, block * KEYS, tokens, stride, lane, wide, True, KEYS, WIDTH == PADDED)
    begin = tl.load(ranges + block * 3)
    full = tl.load(ranges + block * 3 + 1)
    end = tl.load(ranges + block * 3 + 2)
    full = begin + tl.cdiv(full - begin, QUERIES) * QUERIES
    whole = full + tl.maximum(end - full, 0) // QUERIES * QUERIES
    # Where no whole tile sees all of it, everything is walked as the rest.
    full, whole = tl.where(whole > full, full, begin), tl.where(whole > full, whole, begin)
    grad_key = tl.zeros([KEYS, PADDED], tl.float32)
    grad_value = tl.zeros([KEYS, PADDED], tl.float32)
    heads = q_heads // kv_heads
    grad_key, grad_value = _gather(
        grad_key, grad_value, k, v, query, grad_out, lse, delta, order, slots, starts, rows, stride, q_heads,
        group * heads, heads, begin, full, whole, end, column, scale, lane, wide, False, QUERIES, WIDTH, PADDED,
    )  # fmt: skip
    grad_key, grad_value = _gather(
        grad_key, grad_value, k, v, query, grad_out, lse, delta, order, slots, starts, rows, stride, q_heads,
        group * heads, heads, begin, full, whole, end, column, scale, lane, wide, True, QUERIES, WIDTH, PADDED,
    )  # fmt: skip
    inside = (column < tokens)[:, None] & wide[None, :]
    place = grad_columns + column.to(tl.int64)[:, None] * (2 * kv_heads * WIDTH) + group * WIDTH + lane[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + grad_key * scale, mask=inside)
    place += kv_heads * WIDTH
    tl.store(place, tl.load(place, mask=inside, other=0.0) + grad_value, mask=inside)


@triton.jit
def _gather(
    grad_key, grad_value, k, v, query, grad_out, lse, delta, order, slots, starts, rows, stride, q_heads, first_head,
    heads, begin, full, whole, end, column, scale, lane, wide,
    MASKED: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Adds what a group's queries give to a block of columns: those in [full, whole) see all of it, or the rest."""
    tiles = _turns(begin, full, whole, end, MASKED, QUERIES)
    for turn in range(tiles * heads):
        head = first_head + turn // tiles
        index = _place(turn % tiles, begin, full, whole, MASKED, QUERIES) + tl.arange(0, QUERIES)
        near = tl.minimum(index, end - 1) if MASKED else index
        row = tl.load(order + near).to(tl.int64)
        q = _rows(query + head * WIDTH, row, stride, lane, wide, WIDTH == PADDED)
        g = _rows(grad_out + head * WIDTH, row, q_heads * WIDTH, lane, wide, WIDTH == PADDED)
        log_sum = tl.load(lse + head * rows + near) * LOG2E
        share = tl.load(delta + head * rows + near)
        score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        weight = tl.exp2(score * (scale * LOG2E) - log_sum[:, None])
        if MASKED:
            slot = tl.load(slots + near)
            visible = _visible(column, slot, tl.load(starts + slot))
            weight = tl.where(visible & (index < end)[:, None], weight, 0.0)
        grad_value = tl.dot(tl.trans(weight.to(g.dtype)), g, grad_value, input_precision="tf32x3")
        weight = weight * (tl.dot(g, tl.trans(v), input_precision="tf32x3") - share[:, None])
        grad_key = tl.dot(tl.trans(weight.to(q.dtype)), q, grad_key, input_precision="tf32x3")
    return grad_key, grad_value
