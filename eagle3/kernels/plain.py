"""Plain torch versions of the kernels: for the CPU, and the reference that the fused ones are tested against.

Every function writes where it is told (`out`, or in place where its name says `_`), because the unroll keeps the rows
of all steps in one buffer so that each weight's gradient is one matrix product. Arithmetic is fp32 (or the buffer's
own type where that is wider), whatever the storage type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3.head_rows import HeadRows
from eagle3.row_layout import RowLayout, own_columns


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


def add_embedded_(rows: Tensor, embedded: Tensor, slots: Tensor, step: int, backward: bool = False) -> None:
    """Adds to rows [n, N], in place, what their tokens' embeddings give them.

    Rows belong to the packed positions `slots` [n]; of embedded [T, N] slot t takes that of token t + 1 + step, and
    nothing past the end. `backward`: adds gradients of the result, `rows`, to those of `embedded` (fp32).
    """
    tokens = slots + 1 + step
    inside = tokens < embedded.shape[0]
    if backward:
        embedded[tokens[inside]] += rows[inside]
    else:
        rows.masked_scatter_(inside[:, None], (rows[inside] + embedded[tokens[inside]]).to(rows.dtype))


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
    """Applies rotary embedding to the first `rotated` heads of rows [n, heads, D], in place.

    Slot t is rotated at positions[t] + step by `rotary` = (cos, sin), each fp32 [positions, D / 2]. Pairs are two
    halves (Llama's convention) or `neighbours` (DeepSeek's). Before, all heads get their part of `embedded`
    [T, heads, D] if it is given, as in `add_embedded_`. `backward`: turns gradients of the result into those of the
    rows and adds them to those of `embedded` (fp32).
    """
    cos, sin = rotary
    total = _wide(rows).clone()
    if embedded is not None and not backward:
        add_embedded_(total.flatten(1), embedded.flatten(1), slots, step)
    turned = _turn(total, positions[slots] + step, cos, -sin if backward else sin, rotated, neighbours)
    rows.copy_(turned)
    if embedded is not None and backward:
        tokens = slots + 1 + step
        inside = tokens < embedded.shape[0]
        embedded[tokens[inside]] += turned[inside]


def _turn(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, rotated: int, neighbours: bool) -> Tensor:
    c, s = cos[positions][:, None], sin[positions][:, None]
    some = heads[:, :rotated]
    first, second = (some[..., 0::2], some[..., 1::2]) if neighbours else some.chunk(2, dim=-1)
    turned = (first * c - second * s, second * c + first * s)
    joined = torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)
    return torch.cat((joined, heads[:, rotated:]), dim=1)


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


def attend(rows: HeadRows, step: int, layout: RowLayout, out: Tensor, lse: Tensor) -> None:
    """Attention of one unroll step into out [n, q_heads * E]; `lse` [q_heads, n] fp32 receives the log-sum-exps.

    Under one softmax a query of `rows` sees the step-0 columns of its document up to its own, and its row's columns of
    steps 1 … step.
    """
    query, key, value, own_key, own_value = _parts(rows, step, layout)
    q_heads, kv_heads = rows.heads
    for head in range(q_heads):
        group = head // (q_heads // kv_heads)
        scores = _scores(query[:, head], key[:, group], own_key[:, :, group], rows.scale, layout.visible(step))
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - total[:, None])
        mixed = weights[:, : key.shape[0]] @ value[:, group]
        mixed += torch.einsum("nj,jnd->nd", weights[:, key.shape[0] :], own_value[:, :, group])
        out.view(len(out), q_heads, -1)[:, head] = mixed.to(out.dtype)
        lse[head] = total


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
    """The gradient of `attend` with respect to queries (into `grads`) and step-0 columns (added to `column_grads`).

    `grad_out` [n, q_heads * E]; `column_grads` [T, kv_heads, D + E + R] fp32. What own columns need is left in
    own_weights and own_scores [step, q_heads, n_0]: `own_backward` collects it from all steps at once.
    """
    query, key, value, own_key, own_value = _parts(rows, step, layout)
    (q_heads, kv_heads), (width, value_width, _) = rows.heads, rows.widths
    grad_query = grads.query[slice(*layout.bounds(step))]
    by_head = (len(out), q_heads, value_width)
    for head in range(q_heads):
        group = head // (q_heads // kv_heads)
        scores = _scores(query[:, head], key[:, group], own_key[:, :, group], rows.scale, layout.visible(step))
        weights = torch.exp(scores - lse[head][:, None])
        grad = _wide(grad_out).view(by_head)[:, head]
        delta = (grad * _wide(out).view(by_head)[:, head]).sum(-1, keepdim=True)
        shared, own = weights[:, : key.shape[0]], weights[:, key.shape[0] :]
        grad_shared = shared * (grad @ value[:, group].mT - delta)
        grad_own = own * (torch.einsum("nd,jnd->nj", grad, own_value[:, :, group]) - delta)
        grad_key = grad_shared.mT @ query[:, head] * rows.scale
        joined = (grad_key[:, :width], shared.mT @ grad, grad_key[:, width:])
        column_grads[:, group] += torch.cat(joined, dim=-1)
        mixed = grad_shared @ key[:, group] + torch.einsum("nj,jnd->nd", grad_own, own_key[:, :, group])
        grad_query[:, head] = (mixed * rows.scale).to(grad_query.dtype)
        own_weights[:, head, : len(out)] = own.mT
        own_scores[:, head, : len(out)] = grad_own.mT


def own_backward(
    rows: HeadRows,
    step: int,
    layout: RowLayout,
    grad_out: Tensor,
    grads: HeadRows,
    own_weights: Tensor,
    own_scores: Tensor,
) -> None:
    """The gradient of the columns that `step` added, from the queries of this and all later steps, into `grads`.

    `grad_out` [M, q_heads * E] holds all steps' gradients; own_weights and own_scores [pairs, q_heads, n_0] hold what
    `attend_backward` left, as `row_layout.own_columns` says.
    """
    kv_heads, (width, value_width, shared_width) = rows.heads[1], rows.widths
    first, last = layout.bounds(step)
    total = _wide(grad_out[:0]).new_zeros(last - first, kv_heads, width + value_width + shared_width)
    for later in range(step, layout.steps):
        begin, end = layout.bounds(later)
        n = end - begin
        query = _wide(rows.query[begin:end]).reshape(n, kv_heads, -1, width + shared_width)
        grad = _wide(grad_out[begin:end]).view(n, kv_heads, -1, value_width)
        pair = own_columns(later).start + step - 1
        weight, score = (x[pair, :, :n].mT.reshape(n, kv_heads, -1, 1) for x in (own_weights, own_scores))
        grad_key = (score * query).sum(2) * rows.scale
        total[:n] += torch.cat((grad_key[..., :width], (weight * grad).sum(2), grad_key[..., width:]), dim=-1)
    grads.set_columns(first, last, total)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _parts(rows: HeadRows, step: int, layout: RowLayout) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries [n, q_heads, D + R], step-0 keys [T, kv_heads, D + R] and values, own ones [step, n, …], all wide."""
    first, last = layout.bounds(step)
    n, start = last - first, layout.stacked
    keys = torch.cat((rows.key, rows.shared[:, None].expand(-1, rows.heads[1], -1)), dim=-1)
    own = [slice(layout.bounds(j)[0], layout.bounds(j)[0] + n) for j in range(1, step + 1)]
    own_keys, own_values = (
        _wide(torch.stack([x[at] for at in own])) if own else _wide(x.new_zeros(0, n, *x.shape[1:]))
        for x in (keys, rows.value)
    )
    return _wide(rows.query[first:last]), _wide(keys[start:]), _wide(rows.value[start:]), own_keys, own_values


def _scores(query: Tensor, key: Tensor, own_key: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Scaled scores [n, T + step] of one head, the invisible ones at minus infinity."""
    shared = (query @ key.mT).masked_fill(~visible, float("-inf"))
    own = torch.einsum("nd,jnd->nj", query, own_key)
    return torch.cat((shared, own), dim=-1) * scale


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
