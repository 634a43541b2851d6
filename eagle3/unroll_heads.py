"""From the pair's projections to attention's heads and back, dense or latent, for the unroll's passes (walk: step 6).

`projected` [M + T, N] holds what one product with the joined weight makes of each stacked row's state: first what
queries are made of, then what columns are made of. Step 0 makes queries of its rows only and columns of every token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3.compute_weights import product_of_rows_
from eagle3.head_rows import HeadRows
from eagle3.latent_attention import softmax_factor
from eagle3.row_layout import RowLayout

if TYPE_CHECKING:
    from eagle3.drafter import DrafterShape


class Heads:
    """What both kinds share: which rows a step's queries and columns are, and what the passes ask of them.

    The states' products are added to what `prepare` leaves in a step's rows of `projected`, `beta` times; `form` makes
    queries or columns of the sum with the embeddings' part [T, N], in `rows`. The backward pass begins with `receive`;
    `form_backward` turns the gradients that attention wrote to `grads` into those of `projected` and adds them to the
    embeddings' (fp32 [T, N]). `q_width` columns of `projected` make queries; `parts` are how many each of the pair's
    projections makes.
    """

    beta = 0
    rows: HeadRows
    grads: HeadRows
    q_width: int
    parts: list[int]

    def __init__(
        self, projected: Tensor, layout: RowLayout, rotary: tuple[Tensor, Tensor], kernels: ModuleType
    ) -> None:
        self.projected, self.layout, self.rotary, self.kernels = projected, layout, rotary, kernels

    def prepare(self, step: int, embedded: Tensor, columns: bool) -> None:
        """Nothing, where `form` adds the embeddings' part."""

    def weight_grads(self) -> list[Tensor]:
        """Those of weights behind the pair's projections."""
        return []

    def place(self, step: int, columns: bool) -> tuple[int, int, Tensor]:
        """The rows [first, last) of a step's queries or columns, and their slots."""
        if columns and step == 0:
            return *self.layout.bounds(self.layout.steps), self.layout.every_slot
        first, last = self.layout.bounds(step)
        return first, last, self.layout.slots[: last - first]


class DenseHeads(Heads):
    """The projections are queries, keys and values side by side: they only get rotated, in place."""

    def __init__(self, shape: DrafterShape, projected: Tensor, *context: Any) -> None:
        super().__init__(projected, *context)
        self.counts = shape.num_attention_heads, shape.num_key_value_heads
        self.width = shape.head_dim
        self.q_width, kv_width = (count * self.width for count in self.counts)
        self.parts = [self.q_width, kv_width, kv_width]
        self.rows = self._views(projected)

    def _views(self, buffer: Tensor) -> HeadRows:
        query, both = self._halves(buffer)
        key, value = both.chunk(2, dim=1)
        return HeadRows(query, key, value, buffer[:, :0], 1 / math.sqrt(self.width))

    def _halves(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [n, q_heads, D], keys and values [n, 2 kv_heads, D]."""
        heads = buffer.unflatten(1, (-1, self.width))
        return heads[:, : self.counts[0]], heads[:, self.counts[0] :]

    def _rotate(self, buffer: Tensor, embedded: Tensor, step: int, columns: bool, backward: bool) -> None:
        first, last, slots = self.place(step, columns)
        rows, embedded_rows = self._halves(buffer[first:last])[columns], self._halves(embedded)[columns]
        self.kernels.rotate_(
            rows,
            embedded_rows,
            slots,
            self.layout.positions,
            step,
            self.rotary,
            self.counts[columns],
            backward=backward,
        )

    def form(self, step: int, embedded: Tensor, columns: bool) -> None:
        self._rotate(self.projected, embedded, step, columns, backward=False)

    def receive(self, grad_projected: Tensor) -> None:
        self.grad_projected = grad_projected
        self.grads = self._views(grad_projected)

    def form_backward(self, step: int, grad_embedded: Tensor, columns: bool) -> None:
        self._rotate(self.grad_projected, grad_embedded, step, columns, backward=True)


class LatentHeads(Heads):
    """The projections are latents, normed and expanded for all heads, and the part that all keys share.

    As `latent_attention`; `expansions` are q_b [heads * (nope + rope), q_lora] and kv_b [heads * (nope + v), kv_lora],
    `norms` the weights of both latents' norms.
    """

    beta = 1

    def __init__(
        self,
        shape: DrafterShape,
        projected: Tensor,
        *context: Any,
        expansions: Sequence[Tensor],
        norms: Sequence[Tensor],
    ) -> None:
        super().__init__(projected, *context)
        self.expansions, self.norms, self.eps = expansions, norms, shape.rms_norm_eps
        self.nope, self.rope = shape.qk_nope_head_dim, shape.qk_rope_head_dim
        self.heads = shape.num_attention_heads
        self.scale = softmax_factor(shape) / math.sqrt(self.nope + self.rope)
        self.q_width = shape.q_lora_rank
        self.parts = [self.q_width, shape.kv_lora_rank + self.rope]
        self.exact = torch.float64 if projected.dtype == torch.float64 else torch.float32
        # Of queries (M rows) and of columns: the normed latents, their reciprocal sizes, the expanded heads.
        counts = (self.layout.stacked, len(projected))
        new = projected.new_empty
        self.normed = [new(n, weight.shape[1]) for n, weight in zip(counts, expansions, strict=True)]
        self.rstd = [new(n, dtype=self.exact) for n in counts]
        self.expanded = [new(n, len(weight)) for n, weight in zip(counts, expansions, strict=True)]
        self.rows = self._views(self.expanded, projected)

    def _views(self, expanded: Sequence[Tensor], projected: Tensor) -> HeadRows:
        query, columns = (x.unflatten(1, (self.heads, -1)) for x in expanded)
        key, value = columns.split((self.nope, columns.shape[2] - self.nope), dim=2)
        return HeadRows(query, key, value, projected[:, -self.rope :], self.scale)

    def _part(self, buffer: Tensor, columns: bool) -> Tensor:
        return buffer[:, self.q_width :] if columns else buffer[:, : self.q_width]

    def _rotate(self, heads: HeadRows, step: int, columns: bool, backward: bool) -> None:
        """Turns the ends of all heads' queries, or the one part that keys share."""
        first, last, slots = self.place(step, columns)
        turned = heads.shared[first:last, None] if columns else heads.query[first:last, :, self.nope :]
        context = (self.layout.positions, step, self.rotary, turned.shape[1])
        self.kernels.rotate_(turned, None, slots, *context, neighbours=True, backward=backward)

    def prepare(self, step: int, embedded: Tensor, columns: bool) -> None:
        """The embeddings' part, so that the sum is rounded once, before the latents' norms."""
        first, last, slots = self.place(step, columns)
        part = self._part(self.projected[first:last], columns).zero_()
        self.kernels.add_embedded_(part, self._part(embedded, columns), slots, step)

    def form(self, step: int, embedded: Tensor, columns: bool) -> None:
        first, last, _ = self.place(step, columns)
        part = self._part(self.projected[first:last], columns)
        weight, normed = self.expansions[columns], self.normed[columns][first:last]
        latent, rstd = part[:, : weight.shape[1]], self.rstd[columns][first:last]
        self.kernels.norm(latent, None, [self.norms[columns]], [normed], rstd, self.eps)
        torch.mm(normed, weight.T, out=self.expanded[columns][first:last])
        self._rotate(self.rows, step, columns, backward=False)

    def receive(self, grad_projected: Tensor) -> None:
        self.grad_projected = grad_projected
        self.grad_expanded = [torch.empty_like(x) for x in self.expanded]
        self.grad_norms = [torch.zeros_like(weight, dtype=self.exact) for weight in self.norms]
        self.grads = self._views(self.grad_expanded, grad_projected)

    def form_backward(self, step: int, grad_embedded: Tensor, columns: bool) -> None:
        first, last, slots = self.place(step, columns)
        self._rotate(self.grads, step, columns, backward=True)
        weight = self.expansions[columns]
        grad_normed = self.grad_expanded[columns][first:last] @ weight
        latent = self._part(self.projected[first:last], columns)[:, : weight.shape[1]]
        part = self._part(self.grad_projected[first:last], columns)
        rstd, into = self.rstd[columns][first:last], part[:, : weight.shape[1]]
        (grad,) = self.kernels.norm_backward(latent, rstd, [self.norms[columns]], [grad_normed], None, into)
        self.grad_norms[columns] += grad
        self.kernels.add_embedded_(part, self._part(grad_embedded, columns), slots, step, backward=True)

    def weight_grads(self) -> list[Tensor]:
        """Of both expansions and both norms, over the rows of all steps."""
        grads = []
        # Step 0's own rows are no columns.
        for weight, begin, grad, normed in zip(
            self.expansions, (0, self.layout.counts[0]), self.grad_expanded, self.normed, strict=True
        ):
            grads.append(torch.empty_like(weight, dtype=self.exact))
            product_of_rows_(grads[-1], grad[begin:], normed[begin:])
        return [*grads, *self.grad_norms]
