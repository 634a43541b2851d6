"""AdamW's update of one tensor in a single pass over memory, with clipping and the copy for matrix products in it."""

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def adamw_(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    clip: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Updates weight and moments (fp32, contiguous, of one size) in place, and `copy` to the new weight in its dtype.

    `clip` is a scalar tensor that multiplies the gradient; where it is NaN nothing changes. The
    arithmetic is torch.optim.AdamW's.
    """
    count = weight.numel()
    correction = 1 - betas[0] ** step, 1 - betas[1] ** step
    _adamw[(triton.cdiv(count, BLOCK),)](
        weight,
        grad.contiguous(),
        first,
        second,
        weight if copy is None else copy,
        clip,
        count,
        1 - lr * weight_decay,
        lr / correction[0],
        betas[0],
        betas[1],
        correction[1] ** 0.5,
        eps,
        COPY=copy is not None,
        SIZE=BLOCK,
        num_warps=8,
    )


@triton.jit
def _adamw(
    weight, grad, first, second, copy, clip, count, keep, rate, beta1, beta2, correction, eps,
    COPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    factor = tl.load(clip)
    live = (at < count) & (factor == factor)  # NaN: the gradient is not finite
    g = tl.load(grad + at, mask=live, other=0.0) * factor
    m = tl.load(first + at, mask=live, other=0.0)
    v = tl.load(second + at, mask=live, other=0.0)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    w = tl.load(weight + at, mask=live, other=0.0) * keep
    w -= rate * m / (tl.sqrt(v) / correction + eps)
    tl.store(first + at, m, mask=live)
    tl.store(second + at, v, mask=live)
    tl.store(weight + at, w, mask=live)
    if COPY:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask=live)
