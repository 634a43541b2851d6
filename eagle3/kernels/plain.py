"""Plain torch versions of the kernels: for the CPU, and the reference that the fused ones are tested against.

Every function writes where it is told (`out`, or in place where its name says `_`), because the unroll keeps the rows
of all steps in one buffer so that each weight's gradient is one matrix product. Arithmetic is fp32 (or the buffer's
own type where that is wider), whatever the storage type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3.row_layout import RowLayout


def norm(
    x: Tensor, added: Tensor | None, weights: Sequence[Tensor], outs: Sequence[Tensor], rstd: Tensor, eps: float
) -> None:
    """RMSNorm of x [n, H] under one or two weights [H] into `outs`; with `added`, x becomes x + added first.

    `rstd` [n] fp32 receives the reciprocal root mean squares. An out may be shorter than x: it takes the first rows.
    """
    if added is not None:
        x.add_(added)
    wide = _wide(x)
    torch.rsqrt(wide.square().mean(-1) + eps, out=rstd)
    unit = wide * rstd[:, None]
    for weight, out in zip(weights, outs, strict=True):
        out.copy_(unit[: out.shape[0]] * weight)


def norm_backward(
    x: Tensor,
    rstd: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    added: Tensor | None,
    out: Tensor,
) -> list[Tensor]:
    """The gradient of `norm` with respect to x into `out` [n, H]; returns that of each weight, fp32 [H].

    `grads` and `added` (a gradient that reaches x past the norm) may have fewer rows than x: the missing ones are zero.
    """
    wide = _wide(x)
    unit = wide * rstd[:, None]
    grad_unit = torch.zeros_like(unit)
    weight_grads = []
    for weight, grad in zip(weights, grads, strict=True):
        rows = grad.shape[0]
        grad_unit[:rows] += grad * weight
        weight_grads.append((grad * unit[:rows]).sum(0))
    grad_x = (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True)) * rstd[:, None]
    if added is not None:
        grad_x[: added.shape[0]] += added
    out.copy_(grad_x)
    return weight_grads


def rotate_(
    rows: Tensor, embedded: Tensor, slots: Tensor, positions: Tensor, step: int, cos: Tensor, sin: Tensor, rotated: int
) -> None:
    """Adds each row's embedding part and applies rotary embedding, in place.

    rows [n, heads * D] are projections of the drafter's states at the packed positions `slots` [n]; embedded
    [T, heads * D] are those of the token embeddings, of which slot t takes that of token t + 1 + step (none past the
    end). Slot t is rotated at positions[t] + step; cos, sin [positions, D / 2] are fp32. The first `rotated` heads are
    rotated by halves (Llama's convention), the others (values) only get their sum.
    """
    tokens = slots + 1 + step
    inside = tokens < embedded.shape[0]
    total = _wide(rows).clone()
    total[inside] += embedded[tokens[inside]]
    rows.copy_(_turn(total, positions[slots] + step, cos, sin, rotated))


def rotate_backward_(
    grads: Tensor,
    embedded_grads: Tensor,
    slots: Tensor,
    positions: Tensor,
    step: int,
    cos: Tensor,
    sin: Tensor,
    rotated: int,
) -> None:
    """Turns gradients of `rotate_`'s result into those of its rows, in place; adds them to `embedded_grads` (fp32)."""
    turned = _turn(_wide(grads), positions[slots] + step, cos, -sin, rotated)
    grads.copy_(turned)
    tokens = slots + 1 + step
    inside = tokens < embedded_grads.shape[0]
    embedded_grads[tokens[inside]] += turned[inside]


def _turn(rows: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    half = cos.shape[1]
    heads = rows.view(rows.shape[0], rows.shape[1] // (2 * half), 2 * half)
    first, second = heads[:, :rotated, :half], heads[:, :rotated, half:]
    c, s = cos[positions][:, None], sin[positions][:, None]
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    return torch.cat((turned, heads[:, rotated:]), dim=1).view(rows.shape)


def scale_columns_(grads: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiplies each column of grads [n, H] by scale [H], in place; returns Σ over rows of grads * weight before, [H].

    A product's weight and its input's norm weight meet as their product: so one gradient makes both.
    """
    sums = (grads * weight).sum(0)
    grads.mul_(scale)
    return sums


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """silu(gate) * up of gate_up [n, 2 I] into out [n, I]."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def swiglu_backward_(gate_up: Tensor, grad: Tensor) -> None:
    """Replaces gate_up [n, 2 I] by its gradient, and the product's gradient `grad` [n, I] by the product itself.

    The product is an operand of the down projection's weight gradient; so the forward pass need not keep it.
    """
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    wide = _wide(grad)
    sigmoid = torch.sigmoid(gate)
    product = gate * sigmoid * up
    grad_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = wide * gate * sigmoid
    gate_up.copy_(torch.cat((grad_gate, grad_up), dim=-1))
    grad.copy_(product)


def attend(qkv: Tensor, step: int, heads: tuple[int, int, int], layout: RowLayout, out: Tensor, lse: Tensor) -> None:
    """Attention of one unroll step into out [n, q_heads * D]; `lse` [q_heads, n] fp32 receives the log-sum-exps.

    `qkv` [M + T, (q_heads + 2 kv_heads) * D] holds rotated queries, keys and values of all steps and, in its last T
    rows, the keys and values of step 0; `heads` = (q_heads, kv_heads, D). Under one softmax a query sees the step-0
    columns of its document up to its own, and its row's columns of steps 1 … step.
    """
    query, key, value, own_key, own_value = _parts(qkv, step, heads, layout)
    for head in range(heads[0]):
        scores = _scores(query, key, own_key, head, heads, layout.visible(step))
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - total[:, None])
        group = head // (heads[0] // heads[1])
        mixed = weights[:, : key.shape[0]] @ value[:, group]
        mixed += torch.einsum("nj,jnd->nd", weights[:, key.shape[0] :], own_value[:, :, group])
        out.view(-1, heads[0], heads[2])[:, head] = mixed.to(out.dtype)
        lse[head] = total


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
    """The gradient of `attend` with respect to queries (into `grads`) and step-0 columns (added to `column_grads`).

    `grad_out` [n, q_heads * D]; `grads` [M + T, …] is laid out as qkv; `column_grads` [T, 2 kv_heads * D] fp32. What
    own columns need is left in own_weights and own_scores [steps, q_heads, n]: `own_backward` collects it from all
    steps at once.
    """
    query, key, value, own_key, own_value = _parts(qkv, step, heads, layout)
    q_heads, kv_heads, width = heads
    scale = 1 / math.sqrt(width)
    first, last = layout.bounds(step)
    columns = column_grads.view(-1, 2, kv_heads, width)
    grad_query = grads[first:last].view(-1, q_heads + 2 * kv_heads, width)
    for head in range(q_heads):
        group = head // (q_heads // kv_heads)
        scores = _scores(query, key, own_key, head, heads, layout.visible(step))
        weights = torch.exp(scores - lse[head][:, None])
        grad = _wide(grad_out).view(-1, q_heads, width)[:, head]
        delta = (grad * _wide(out).view(-1, q_heads, width)[:, head]).sum(-1, keepdim=True)
        shared, own = weights[:, : key.shape[0]], weights[:, key.shape[0] :]
        grad_shared = shared * (grad @ value[:, group].mT - delta)
        grad_own = own * (torch.einsum("nd,jnd->nj", grad, own_value[:, :, group]) - delta)
        columns[:, 0, group] += grad_shared.mT @ query[:, head] * scale
        columns[:, 1, group] += shared.mT @ grad
        mixed = grad_shared @ key[:, group] + torch.einsum("nj,jnd->nd", grad_own, own_key[:, :, group])
        grad_query[:, head] = (mixed * scale).to(grads.dtype)
        own_weights[:step, head] = own.mT
        own_scores[:step, head] = grad_own.mT


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
    """The gradient of the columns that `step` added, from the queries of this and all later steps, into `grads`.

    `grad_out` [M, q_heads * D] holds all steps' gradients; `own_weights` and `own_scores` those that `attend_backward`
    left for each step.
    """
    q_heads, kv_heads, width = heads
    scale = 1 / math.sqrt(width)
    first, last = layout.bounds(step)
    grad_key = torch.zeros(last - first, kv_heads, width, dtype=_wide(qkv[:0]).dtype, device=qkv.device)
    grad_value = torch.zeros_like(grad_key)
    for later in range(step, layout.steps):
        begin, end = layout.bounds(later)
        rows = end - begin
        query = _wide(qkv[begin:end, : q_heads * width]).view(rows, kv_heads, -1, width)
        grad = _wide(grad_out[begin:end]).view(rows, kv_heads, -1, width)
        weight = own_weights[later][step - 1].mT.reshape(rows, kv_heads, -1, 1)
        score = own_scores[later][step - 1].mT.reshape(rows, kv_heads, -1, 1)
        grad_key[:rows] += (score * query).sum(2) * scale
        grad_value[:rows] += (weight * grad).sum(2)
    into = grads[first:last, q_heads * width :].view(last - first, 2, kv_heads, width)
    into[:, 0] = grad_key.to(grads.dtype)
    into[:, 1] = grad_value.to(grads.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _parts(
    qkv: Tensor, step: int, heads: tuple[int, int, int], layout: RowLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries [n, q_heads, D], step-0 keys and values [T, kv_heads, D], own ones [step, n, kv_heads, D], all wide."""
    q_heads, kv_heads, width = heads
    first, last = layout.bounds(step)
    rows = last - first
    query = _wide(qkv[first:last, : q_heads * width]).view(rows, q_heads, width)
    start = layout.bounds(layout.steps)[0]
    shared = _wide(qkv[start:, q_heads * width :]).view(-1, 2, kv_heads, width)
    own = [qkv[layout.bounds(j)[0] :][:rows, q_heads * width :] for j in range(1, step + 1)]
    mine = _wide(torch.stack(own)) if own else shared.new_zeros(0, rows, 2 * kv_heads * width)
    mine = mine.view(step, rows, 2, kv_heads, width)
    return query, shared[:, 0], shared[:, 1], mine[:, :, 0], mine[:, :, 1]


def _scores(
    query: Tensor, key: Tensor, own_key: Tensor, head: int, heads: tuple[int, int, int], visible: Tensor
) -> Tensor:
    """Scaled scores [n, T + step] of one head, the invisible ones at minus infinity."""
    group = head // (heads[0] // heads[1])
    shared = (query[:, head] @ key[:, group].mT).masked_fill(~visible, float("-inf"))
    own = torch.einsum("nd,jnd->nj", query[:, head], own_key[:, :, group])
    return torch.cat((shared, own), dim=-1) / math.sqrt(heads[2])


def row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp [n] and the maximum [n] of each row of logits [n, D]."""
    wide = _wide(logits)
    return torch.logsumexp(wide, -1), wide.amax(-1)


def compare_(
    logits: Tensor,
    teacher: Tensor,
    teacher_sums: Tensor,
    index: Tensor,
    weights: Tensor,
    mix: tuple[float, float, float, float],
) -> tuple[Tensor, Tensor]:
    """Row losses [n] and argmaxes [n] of draft logits [n, D]; the logits are replaced by the loss's gradient.

    Row i is compared with row index[i] of the teacher's logits [U, D] over the same draft vocabulary, whose
    log-sum-exps are `teacher_sums` [U]; its gradient is scaled by weights[i] (the losses are not). `mix` weighs soft
    cross-entropy, reverse KL, total variation and LK, as `eagle3.loss` defines them.
    """
    cross, reverse, variation, lk = mix
    log_q, log_p = torch.log_softmax(_wide(logits), -1), (_wide(teacher) - teacher_sums[:, None])[index]
    guess = logits.argmax(-1)
    q, p = log_q.exp(), log_p.exp()
    losses = -cross * (p * log_q).sum(-1)
    grads = cross * (q - p)
    if reverse:
        ratio = log_q - log_p
        divergence = (q * ratio).sum(-1)
        losses += reverse * divergence
        grads += reverse * q * (ratio - divergence[:, None])
    if variation or lk:
        accepted = torch.minimum(p, q).sum(-1)
        losses += variation * (1 - accepted) - lk * accepted.log()
        below = q * (q < p)
        slope = (variation + lk / accepted)[:, None]
        grads -= slope * (below - q * below.sum(-1, keepdim=True))
    logits.copy_(grads * weights[:, None])
    return losses, guess
