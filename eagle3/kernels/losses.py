"""Triton kernels of the loss, a row of logits to a program; what each computes is said in `plain`."""

from __future__ import annotations

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096  # elements of a row to a turn


def row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = logits.shape
    sums, tops = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _row_sums[(rows,)](logits, sums, tops, width, BLOCK=_columns(width), num_warps=8)
    return sums, tops


@triton.jit
def _row_sums(logits, sums, tops, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    top = -float("inf")
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.load(logits + row * width + start + column, mask=start + column < width, other=-float("inf"))
        value = value.to(tl.float32)
        now = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - now) + tl.exp(value - now)
        top = now
    tl.store(sums + row, top + tl.log(tl.sum(total, 0)))
    tl.store(tops + row, top)


def compare_(
    logits: Tensor,
    teacher: Tensor,
    teacher_sums: Tensor,
    index: Tensor,
    weights: Tensor,
    mix: tuple[float, float, float, float],
) -> tuple[Tensor, Tensor]:
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    guesses = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _compare[(rows,)](
            logits,
            teacher,
            teacher_sums,
            index,
            weights,
            losses,
            guesses,
            width,
            *mix,
            REVERSE=mix[1] != 0,
            ACCEPTED=mix[2] != 0 or mix[3] != 0,
            BLOCK=_columns(width),
            num_warps=8,
        )
    return losses, guesses


def _columns(width: int) -> int:
    return min(triton.next_power_of_2(width), COLUMNS)


@triton.jit
def _compare(
    logits, teacher, teacher_sums, index, weights, losses, guesses, width, cross, reverse, variation, lk,
    REVERSE: tl.constexpr, ACCEPTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    taught = tl.load(index + row).to(tl.int64)
    z_row = logits + row * width
    t_row = teacher + taught * width
    t_lse = tl.load(teacher_sums + taught)
    column = tl.arange(0, BLOCK)
    # One running maximum for the row; sums and expectations stay a lane's own until the end.
    top = -float("inf")
    total = tl.zeros([BLOCK], tl.float32)
    expected = tl.zeros([BLOCK], tl.float32)
    divergence_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        live = start + column < width
        z = tl.load(z_row + start + column, mask=live, other=-float("inf")).to(tl.float32)
        t = tl.load(t_row + start + column, mask=live, other=-float("inf")).to(tl.float32)
        now = tl.maximum(top, tl.max(z, 0))
        old, weight = tl.exp(top - now), tl.exp(z - now)
        total = total * old + weight
        expected += tl.where(live, tl.exp(t - t_lse) * z, 0.0)
        if REVERSE:
            divergence_sum = divergence_sum * old + tl.where(live, weight * (z - t), 0.0)
        top = now
    mass = tl.sum(total, 0)
    z_lse = top + tl.log(mass)
    loss = cross * (z_lse - tl.sum(expected, 0))
    divergence = 0.0
    if REVERSE:
        divergence = tl.sum(divergence_sum, 0) / mass - z_lse + t_lse
        loss += reverse * divergence
    slope = 0.0
    below = 0.0
    if ACCEPTED:
        accepted_sum = tl.zeros([BLOCK], tl.float32)
        below_sum = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            live = start + column < width
            q = tl.exp(tl.load(z_row + start + column, mask=live, other=-float("inf")).to(tl.float32) - z_lse)
            p = tl.exp(tl.load(t_row + start + column, mask=live, other=-float("inf")).to(tl.float32) - t_lse)
            accepted_sum += tl.minimum(p, q)
            below_sum += tl.where(q < p, q, 0.0)
        accepted = tl.sum(accepted_sum, 0)
        below = tl.sum(below_sum, 0)
        slope = variation + lk / accepted
        loss += variation * (1 - accepted) - lk * tl.log(accepted)
    tl.store(losses + row, loss)
    weight = tl.load(weights + row)
    guess = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, width, BLOCK):
        live = start + column < width
        z = tl.load(z_row + start + column, mask=live, other=-float("inf")).to(tl.float32)
        t = tl.load(t_row + start + column, mask=live, other=-float("inf")).to(tl.float32)
        guess = tl.minimum(guess, tl.where(z == top, start + column, 2147483647))
        q, p = tl.exp(z - z_lse), tl.exp(t - t_lse)
        grad = cross * (q - p)
        if REVERSE:
            grad += reverse * q * (z - z_lse - t + t_lse - divergence)
        if ACCEPTED:
            grad -= slope * (tl.where(q < p, q, 0.0) - q * below)
        tl.store(z_row + start + column, (grad * weight).to(logits.dtype.element_ty), mask=live)
    tl.store(guesses + row, tl.min(guess, 0).to(tl.int64))
