"""Attention of selected rows over the step-0 columns, in Triton: FlashAttention (arXiv 2205.14135, 2307.08691) by rows.

Queries are walked in ascending position whatever the rows' order, so that a block of them sees one range of columns and
only its two ends are masked. The rows' own columns are joined afterwards (`own`). Where all heads' keys share a part,
scores are two products: the shared part is read as it lies, once for all heads, and no head is padded.
"""

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from eagle3.head_rows import HeadRows
from eagle3.kernels.operands import operands, padded_widths
from eagle3.row_layout import KEY_BLOCK, RowLayout

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """How a kernel cuts its work: queries and keys to a block, warps, stages of the software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """As a launch takes them."""
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    """Those of the three kernels."""

    attend: Tile
    queries: Tile
    columns: Tile


# By whether keys have a shared part and whether operands take four bytes: what fits Hopper's shared memory at 128 + 64.
TILES = {
    (False, False): Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, KEY_BLOCK, 4, 3)),
    (False, True): Tiles(Tile(64, 64, 4, 1), Tile(64, 64, 8, 1), Tile(64, KEY_BLOCK, 4, 1)),
    (True, False): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, KEY_BLOCK, 8, 1)),
    (True, True): Tiles(Tile(64, 64, 4, 1), Tile(64, 32, 8, 1), Tile(32, KEY_BLOCK, 8, 1)),
}


def tiles_of(rows: HeadRows) -> Tiles:
    """How the work on these rows is cut."""
    return TILES[rows.widths[2] > 0, rows.query.element_size() == 4]


def attend_columns(rows: HeadRows, step: int, layout: RowLayout, out: Tensor, lse: Tensor) -> None:
    """Attention of a step's queries over step 0's columns alone.

    out [n, q_heads * E]; lse fp32 [q_heads, n], queries in ascending order.
    """
    q_heads, kv_heads = rows.heads
    tile = tiles_of(rows).attend
    _attend[(q_heads, triton.cdiv(len(out), tile.queries))](
        *operands(rows, layout.bounds(step), layout.stacked),
        out,
        lse,
        layout.order(step),
        layout.ascending(step),
        layout.starts,
        len(out),
        q_heads,
        q_heads // kv_heads,
        rows.scale,
        **padded_widths(rows),
        **tile.options,
    )


@triton.jit(do_not_specialize=["rows"])
def _attend(
    query, key, value, shared, q_stride, q_head, kv_stride, kv_head, shared_stride, out, lse, order, slots, starts,
    rows, q_heads, heads_to_key, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    index, _, row, slot, start = _block(order, slots, starts, rows, QUERIES)
    low, high, one, two = _reach(slot, start, KEYS)
    q = _rows(query + head * q_head, row, q_stride, D, DP)
    if R:
        rest = _rows(query + head * q_head + D, row, q_stride, R, RP)
    key += head // heads_to_key * kv_head
    value += head // heads_to_key * kv_head
    scale *= LOG2E
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, EP], tl.float32)
    for masked in tl.static_range(2):
        # The columns that all queries of the block see, [one, two), then the rest.
        for turn in range(_turns(low, one, two, high, masked, KEYS)):
            at = _place(turn, low, one, two, masked, KEYS)
            k = _tile(key, at, high, kv_stride, masked, KEYS, D, DP)
            score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
            if R:
                k = _tile(shared, at, high, shared_stride, masked, KEYS, R, RP)
                score = tl.dot(rest, tl.trans(k), score, input_precision="tf32x3")
            if masked:
                score = tl.where(_visible(at + tl.arange(0, KEYS), slot, start), score, -float("inf"))
            now = tl.maximum(top, tl.max(score, 1) * scale)
            shift = now
            if masked:  # a query of a later document than these columns' has seen nothing yet
                shift = tl.where(now == -float("inf"), 0.0, now)
            weight = tl.exp2(score * scale - shift[:, None])
            old = tl.exp2(top - shift)
            total = total * old + tl.sum(weight, 1)
            v = _tile(value, at, high, kv_stride, masked, KEYS, E, EP)
            mixed = tl.dot(weight.to(v.dtype), v, mixed * old[:, None], input_precision="tf32x3")
            top = now
    live = index < rows
    lane = tl.arange(0, EP)
    place = out + (row * q_heads + head)[:, None] * E + lane[None, :]
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (lane < E)[None, :])
    tl.store(lse + head * rows + index, (top + tl.log2(total)) * LN2, mask=live)


@triton.jit
def _block(order, slots, starts, rows, QUERIES: tl.constexpr):
    """A block of queries: their numbers, those that exist, their rows, packed positions and documents' starts."""
    # The last blocks see most columns: they start first, in all heads.
    index = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES + tl.arange(0, QUERIES)
    near = tl.minimum(index, rows - 1)
    slot = tl.load(slots + near)
    return index, near, tl.load(order + near).to(tl.int64), slot, tl.load(starts + slot)


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
def _rows(base, row, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The rows of a matrix at these indices, [n, PADDED]."""
    lane = tl.arange(0, PADDED)
    place = base + row[:, None] * stride + lane[None, :]
    if WIDTH == PADDED:
        return tl.load(place)
    return tl.load(place, mask=(lane < WIDTH)[None, :], other=0.0)


@triton.jit
def _tile(
    base, at, high, stride, MASKED: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The rows [at, at + KEYS) of a matrix, zero from `high` on where MASKED."""
    start = base + tl.cast(at, tl.int64) * stride
    row, lane = tl.arange(0, KEYS), tl.arange(0, PADDED)
    place = start + row[:, None] * stride + lane[None, :]
    if MASKED:
        return tl.load(place, mask=(at + row < high)[:, None] & (lane < WIDTH)[None, :], other=0.0)
    if WIDTH == PADDED:
        return tl.load(place)
    return tl.load(place, mask=(lane < WIDTH)[None, :], other=0.0)


@triton.jit
def _visible(column, slot, start):
    return (column[None, :] <= slot[:, None]) & (column[None, :] >= start[:, None])


def attend_columns_backward(
    rows: HeadRows,
    step: int,
    layout: RowLayout,
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    grad_query: Tensor,
    grad_columns: Tensor,
) -> None:
    """Gradients of a step's queries, of their strides, and of the columns, added to fp32 [T, kv_heads, D + E + R].

    `lse` and `delta` [q_heads, n], queries in ascending order: the log-sum-exps and Σ out * grad_out of the whole
    softmax, own columns included.
    """
    q_heads, kv_heads = rows.heads
    places = operands(rows, layout.bounds(step), layout.stacked)
    given = (grad_out, lse, delta)
    walked = (layout.order(step), layout.ascending(step), layout.starts)
    tile = tiles_of(rows).queries
    _queries[(q_heads, triton.cdiv(len(grad_out), tile.queries))](
        *places,
        *given,
        grad_query,
        *walked,
        len(grad_out),
        q_heads,
        q_heads // kv_heads,
        rows.scale,
        **padded_widths(rows),
        **tile.options,
    )
    _columns[(kv_heads, triton.cdiv(layout.tokens, KEY_BLOCK))](
        *places,
        *given,
        grad_columns,
        *walked,
        layout.key_ranges(step),
        len(grad_out),
        layout.tokens,
        q_heads,
        kv_heads,
        rows.scale,
        **padded_widths(rows),
        **tiles_of(rows).columns.options,
    )


@triton.jit(do_not_specialize=["rows"])
def _queries(
    query, key, value, shared, q_stride, q_head, kv_stride, kv_head, shared_stride, grad_out, lse, delta, grad_query,
    order, slots, starts, rows, q_heads, heads_to_key, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries."""
    head = tl.program_id(0)
    index, near, row, slot, start = _block(order, slots, starts, rows, QUERIES)
    low, high, one, two = _reach(slot, start, KEYS)
    q = _rows(query + head * q_head, row, q_stride, D, DP)
    if R:
        rest = _rows(query + head * q_head + D, row, q_stride, R, RP)
    g = _rows(grad_out + head * E, row, q_heads * E, E, EP)
    share = tl.load(delta + head * rows + near)
    log_sum = tl.load(lse + head * rows + near) * LOG2E
    key += head // heads_to_key * kv_head
    value += head // heads_to_key * kv_head
    total = tl.zeros([QUERIES, DP], tl.float32)
    if R:
        total_rest = tl.zeros([QUERIES, RP], tl.float32)
    for masked in tl.static_range(2):
        for turn in range(_turns(low, one, two, high, masked, KEYS)):
            at = _place(turn, low, one, two, masked, KEYS)
            k = _tile(key, at, high, kv_stride, masked, KEYS, D, DP)
            v = _tile(value, at, high, kv_stride, masked, KEYS, E, EP)
            score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
            if R:
                s = _tile(shared, at, high, shared_stride, masked, KEYS, R, RP)
                score = tl.dot(rest, tl.trans(s), score, input_precision="tf32x3")
            weight = tl.exp2(score * (scale * LOG2E) - log_sum[:, None])
            if masked:
                weight = tl.where(_visible(at + tl.arange(0, KEYS), slot, start), weight, 0.0)
            weight = weight * (tl.dot(g, tl.trans(v), input_precision="tf32x3") - share[:, None])
            total = tl.dot(weight.to(k.dtype), k, total, input_precision="tf32x3")
            if R:
                total_rest = tl.dot(weight.to(k.dtype), s, total_rest, input_precision="tf32x3")
    place = grad_query + head * q_head + row[:, None] * q_stride
    lane = tl.arange(0, DP)[None, :]
    live = (index < rows)[:, None]
    tl.store(place + lane, (total * scale).to(grad_query.dtype.element_ty), mask=live & (lane < D))
    if R:
        lane = tl.arange(0, RP)[None, :]
        tl.store(place + D + lane, (total_rest * scale).to(grad_query.dtype.element_ty), mask=live & (lane < R))


@triton.jit(do_not_specialize=["rows", "tokens"])
def _columns(
    query, key, value, shared, q_stride, q_head, kv_stride, kv_head, shared_stride, grad_out, lse, delta, grad_columns,
    order, slots, starts, ranges, rows, tokens, q_heads, kv_heads, scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one step's part to the gradients of a block of step-0 keys and values."""
    group, block = tl.program_id(0), tl.program_id(1)
    column = block * KEYS + tl.arange(0, KEYS)
    k = _tile(key + group * kv_head, block * KEYS, tokens, kv_stride, True, KEYS, D, DP)
    v = _tile(value + group * kv_head, block * KEYS, tokens, kv_stride, True, KEYS, E, EP)
    grad_key = tl.zeros([KEYS, DP], tl.float32)
    grad_value = tl.zeros([KEYS, EP], tl.float32)
    if R:
        s = _tile(shared, block * KEYS, tokens, shared_stride, True, KEYS, R, RP)
        grad_shared = tl.zeros([KEYS, RP], tl.float32)
    begin = tl.load(ranges + block * 3)
    full = tl.load(ranges + block * 3 + 1)
    end = tl.load(ranges + block * 3 + 2)
    full = begin + tl.cdiv(full - begin, QUERIES) * QUERIES
    whole = full + tl.maximum(end - full, 0) // QUERIES * QUERIES
    # Where no whole tile sees all of it, everything is walked as the rest.
    full, whole = tl.where(whole > full, full, begin), tl.where(whole > full, whole, begin)
    heads = q_heads // kv_heads
    for masked in tl.static_range(2):
        # What a group's queries give: those in [full, whole), which see all of the block, then the rest.
        tiles = _turns(begin, full, whole, end, masked, QUERIES)
        for turn in range(tiles * heads):
            head = group * heads + turn // tiles
            index = _place(turn % tiles, begin, full, whole, masked, QUERIES) + tl.arange(0, QUERIES)
            near = tl.minimum(index, end - 1) if masked else index
            row = tl.load(order + near).to(tl.int64)
            q = _rows(query + head * q_head, row, q_stride, D, DP)
            if R:
                rest = _rows(query + head * q_head + D, row, q_stride, R, RP)
            g = _rows(grad_out + head * E, row, q_heads * E, E, EP)
            log_sum = tl.load(lse + head * rows + near) * LOG2E
            share = tl.load(delta + head * rows + near)
            score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
            if R:
                score = tl.dot(rest, tl.trans(s), score, input_precision="tf32x3")
            weight = tl.exp2(score * (scale * LOG2E) - log_sum[:, None])
            if masked:
                slot = tl.load(slots + near)
                visible = _visible(column, slot, tl.load(starts + slot))
                weight = tl.where(visible & (index < end)[:, None], weight, 0.0)
            grad_value = tl.dot(tl.trans(weight.to(g.dtype)), g, grad_value, input_precision="tf32x3")
            weight = weight * (tl.dot(g, tl.trans(v), input_precision="tf32x3") - share[:, None])
            grad_key = tl.dot(tl.trans(weight.to(q.dtype)), q, grad_key, input_precision="tf32x3")
            if R:
                grad_shared = tl.dot(tl.trans(weight.to(q.dtype)), rest, grad_shared, input_precision="tf32x3")
    place = grad_columns + (column.to(tl.int64) * kv_heads + group)[:, None] * (D + E + R)
    inside = (column < tokens)[:, None]
    _add(place, grad_key * scale, inside, D, DP)
    _add(place + D, grad_value, inside, E, EP)
    if R:
        _add(place + D + E, grad_shared * scale, inside, R, RP)


@triton.jit
def _add(place, part, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Adds rows [n, PADDED] to those that begin at `place` [n, 1]."""
    lane = tl.arange(0, PADDED)[None, :]
    inside = inside & (lane < WIDTH)
    tl.store(place + lane, tl.load(place + lane, mask=inside, other=0.0) + part, mask=inside)
