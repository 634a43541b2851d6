"""Triton versions of the row-wise kernels; what each computes is said in `plain`."""

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.head_rows import HeadRows
from eagle3.kernels.flash import attend_columns, attend_columns_backward
from eagle3.kernels.losses import compare_, row_sums
from eagle3.kernels.own import deltas, join, join_backward, own_backward
from eagle3.row_layout import RowLayout

__all__ = [
    "add_embedded_",
    "attend",
    "attend_backward",
    "compare_",
    "norm",
    "norm_backward",
    "own_backward",
    "rotate_",
    "row_sums",
    "scale_columns_",
    "swiglu",
    "swiglu_backward_",
]

NORM_PROGRAMS = 264  # two to each of the 132 processors of a Hopper GPU; partial sums of a weight's gradient
WIDE = 1024  # elements of a row to a program
SCALED_ROWS = 64


def attend(rows: HeadRows, step: int, layout: RowLayout, out: Tensor, lse: Tensor) -> None:
    """As in `plain`, but `lse` has its queries in ascending order."""
    attend_columns(rows, step, layout, out, lse)
    if step:
        join(rows, step, layout, out, lse)


def attend_backward(
    rows: HeadRows,
    step: int,
    layout: RowLayout,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grads: HeadRows,
    column_grads: Tensor,
    own_weights: Tensor,
    own_scores: Tensor,
) -> None:
    grad_query = grads.query[slice(*layout.bounds(step))]
    delta = deltas(out, grad_out, rows.heads[0], layout.order(step))
    attend_columns_backward(rows, step, layout, lse, delta, grad_out, grad_query, column_grads)
    if step:
        join_backward(rows, step, layout, lse, delta, grad_out, grad_query, own_weights, own_scores)


def norm(
    x: Tensor, added: Tensor | None, weights: Sequence[Tensor], outs: Sequence[Tensor], rstd: Tensor, eps: float
) -> None:
    if len(x) == 0:
        return
    width = x.shape[1]
    second = len(outs) > 1
    _norm[(len(x),)](
        x,
        x if added is None else added,
        weights[0],
        outs[0],
        weights[-1],
        outs[-1],
        rstd,
        len(outs[-1]),
        x.stride(0),
        width,
        eps,
        ADDED=added is not None,
        SECOND=second,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4,
    )


@triton.jit(do_not_specialize=["rows2"])
def _norm(
    x, added, weight, out, weight2, out2, rstd, rows2, stride, width, eps,
    ADDED: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < width
    at, place = row * width + column, x + row * stride + column
    value = tl.load(place, mask=live, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(added + at, mask=live, other=0.0).to(tl.float32)
        tl.store(place, value.to(x.dtype.element_ty), mask=live)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(rstd + row, scale)
    value = value * scale
    tl.store(out + at, (value * tl.load(weight + column, mask=live, other=0.0)).to(out.dtype.element_ty), mask=live)
    if SECOND:
        live = live & (row < rows2)
        scaled = value * tl.load(weight2 + column, mask=live, other=0.0)
        tl.store(out2 + at, scaled.to(out2.dtype.element_ty), mask=live)


def norm_backward(
    x: Tensor,
    rstd: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    added: Tensor | None,
    out: Tensor,
) -> list[Tensor]:
    rows, width = x.shape
    programs = max(min(rows, NORM_PROGRAMS), 1)
    partial = torch.empty((len(grads), programs, width), dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        x,
        rstd,
        weights[0],
        grads[0],
        len(grads[0]),
        weights[-1],
        grads[-1],
        len(grads[-1]),
        x if added is None else added,
        0 if added is None else len(added),
        out,
        partial,
        rows,
        x.stride(0),
        width,
        SECOND=len(grads) > 1,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4,
    )
    return list(partial.sum(1))


@triton.jit(do_not_specialize=["grad_rows", "grad2_rows", "added_rows", "rows"])
def _norm_backward(
    x, rstd, weight, grad, grad_rows, weight2, grad2, grad2_rows, added, added_rows, out, partial, rows, stride,
    width,
    SECOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    live = column < width
    scale = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if SECOND:
        scale2 = tl.load(weight2 + column, mask=live, other=0.0).to(tl.float32)
        total2 = tl.zeros([BLOCK], tl.float32)
    for index in range(program, rows, programs):
        row = tl.cast(index, tl.int64)
        at, place = row * width + column, row * stride + column
        inverse = tl.load(rstd + row)
        unit = tl.load(x + place, mask=live, other=0.0).to(tl.float32) * inverse
        received = tl.load(grad + at, mask=live & (row < grad_rows), other=0.0).to(tl.float32)
        total += received * unit
        grad_unit = received * scale
        if SECOND:
            received = tl.load(grad2 + at, mask=live & (row < grad2_rows), other=0.0).to(tl.float32)
            total2 += received * unit
            grad_unit += received * scale2
        result = (grad_unit - unit * (tl.sum(grad_unit * unit, 0) / width)) * inverse
        result += tl.load(added + at, mask=live & (row < added_rows), other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=live)
    tl.store(partial + program * width + column, total, mask=live)
    if SECOND:
        tl.store(partial + (programs + program) * width + column, total2, mask=live)


def add_embedded_(rows: Tensor, embedded: Tensor, slots: Tensor, step: int, backward: bool = False) -> None:
    count, width = rows.shape
    if count == 0:
        return
    places = (rows, rows.stride(0), embedded, embedded.stride(0))
    _add[(count, triton.cdiv(width, WIDE))](
        *places, len(embedded), slots, step, width, BACKWARD=backward, BLOCK=WIDE, num_warps=4
    )


@triton.jit(do_not_specialize=["tokens", "step"])
def _add(
    rows, row_stride, embedded, embedded_stride, tokens, slots, step, width, BACKWARD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(slots + row) + 1 + step).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (column < width) & (token < tokens)
    place, source = rows + row * row_stride + column, embedded + token * embedded_stride + column
    total = tl.load(place, mask=live, other=0.0).to(tl.float32) + tl.load(source, mask=live, other=0.0).to(tl.float32)
    if BACKWARD:
        tl.store(source, total, mask=live)
    else:
        tl.store(place, total.to(rows.dtype.element_ty), mask=live)


def rotate_(
    rows: Tensor,
    embedded: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    step: int,
    rotary: tuple[Tensor, Tensor],
    rotated: int,
    neighbours: bool = False,
    backward: bool = False,
) -> None:
    count, heads, _ = rows.shape
    if count == 0:
        return
    source = rows if embedded is None else embedded  # heads lie alike in both
    half = rotary[0].shape[1]
    block = triton.next_power_of_2(half)
    some = max(min(triton.next_power_of_2(heads), 2048 // block), 1)
    _turn[(count, triton.cdiv(heads, some))](
        rows,
        rows.stride(0),
        source,
        source.stride(0),
        rows.stride(1),
        len(source),
        slots,
        positions,
        step,
        *rotary,
        heads,
        rotated,
        half,
        ADDED=embedded is not None,
        NEIGHBOURS=neighbours,
        BACKWARD=backward,
        HEADS=some,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens", "step"])
def _turn(
    rows, row_stride, embedded, embedded_stride, head_stride, tokens, slots, positions, step, cos, sin, heads, rotated,
    half,
    ADDED: tl.constexpr, NEIGHBOURS: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token = (slot + 1 + step).to(tl.int64)
    position = tl.load(positions + slot) + step
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = (head < heads) & (column < half)
    turned = live & (head < rotated)
    at, other = head * head_stride + column, half
    if NEIGHBOURS:
        at, other = at + column, 1
    place = rows + row * row_stride + at
    first = tl.load(place, mask=live, other=0.0).to(tl.float32)
    second = tl.load(place + other, mask=live, other=0.0).to(tl.float32)
    c = tl.load(cos + position * half + column, mask=turned, other=1.0)
    s = tl.load(sin + position * half + column, mask=turned, other=0.0)
    if ADDED:
        inside = live & (token < tokens)
        source = embedded + token * embedded_stride + at
        other_first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        other_second = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        left = first * c + second * s
        right = second * c - first * s
        if ADDED:
            tl.store(source, left + other_first, mask=inside)
            tl.store(source + other, right + other_second, mask=inside)
    else:
        if ADDED:
            first += other_first
            second += other_second
        left = first * c - second * s
        right = second * c + first * s
    tl.store(place, left.to(rows.dtype.element_ty), mask=live)
    tl.store(place + other, right.to(rows.dtype.element_ty), mask=live)


def scale_columns_(grads: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    rows, width = grads.shape
    pieces = triton.cdiv(rows, SCALED_ROWS)
    partial = torch.empty(pieces, width, dtype=torch.float32, device=grads.device)
    grid = (triton.cdiv(width, WIDE), pieces)
    _scale_columns[grid](
        grads, grads.stride(0), weight, weight.stride(0), scale, partial, rows, width, ROWS=SCALED_ROWS, BLOCK=WIDE
    )
    return partial.sum(0)


@triton.jit
def _scale_columns(
    grads, stride, weight, weight_stride, scale, partial, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    factor = tl.load(scale + column, mask=live, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(1) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        place = grads + tl.cast(row, tl.int64) * stride + column
        value = tl.load(place, mask=live, other=0.0)
        other = tl.load(weight + tl.cast(row, tl.int64) * weight_stride + column, mask=live, other=0.0)
        total += value * other.to(tl.float32)
        tl.store(place, value * factor, mask=live)
    tl.store(partial + tl.program_id(1) * width + column, total, mask=live)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    _swiglu_launch(gate_up, out, backward=False)


def swiglu_backward_(gate_up: Tensor, grad: Tensor) -> None:
    _swiglu_launch(gate_up, grad, backward=True)


def _swiglu_launch(gate_up: Tensor, other: Tensor, backward: bool) -> None:
    if len(other) == 0:
        return
    width = other.shape[1]
    grid = (len(other), triton.cdiv(width, WIDE))
    _swiglu[grid](gate_up, other, width, BACKWARD=backward, BLOCK=WIDE, num_warps=4)


@triton.jit
def _swiglu(gate_up, other, width, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    gates = gate_up + row * 2 * width + column
    places = other + row * width + column
    gate = tl.load(gates, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=live, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    if BACKWARD:
        grad = tl.load(places, mask=live, other=0.0).to(tl.float32)
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(gates, grad_gate.to(gate_up.dtype.element_ty), mask=live)
        tl.store(gates + width, (grad * gate * sigmoid).to(gate_up.dtype.element_ty), mask=live)
    tl.store(places, (gate * sigmoid * up).to(other.dtype.element_ty), mask=live)
