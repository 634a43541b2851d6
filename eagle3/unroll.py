"""All unroll steps of a packed batch, forward and backward written out (walk: step 6).

The same arithmetic as `Eagle3Drafter.unroll`, with everything left out that need not be done:

* the embedding half of the pair's projections depends on a token, not on the step that reads it: once a token;
* only rows that are supervised at this or a later step are computed, in the order of `row_layout`: no gathers;
* a weight's gradient is one matrix product over the rows of all steps, accumulated in fp32 by the matrix units; these
  come last, one after another, so that ranks exchange one while the next is being made;
* no gradient is made for inputs that have no parameter before them.

With `recompute` the MLP's wide rows are made again in the backward pass instead of being kept: about half the memory of
a row for one more product. So the backward pass is explicit. Reference for every gradient: `Eagle3Drafter.unroll` and
tests/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.compute_weights import product_of_rows_
from eagle3.kernels import kernels_for
from eagle3.row_layout import RowLayout, own_columns
from eagle3.unroll_heads import DenseHeads, LatentHeads

if TYPE_CHECKING:
    from eagle3.drafter import DrafterShape


class LayerWeights:
    """A layer's weights as the products want them, in the compute dtype; norm weights stay as they are.

    `pair` [N, 2 H] joins the projections of the pair: its halves `embed` and `state` read the embedding and the state;
    gate_up [2 I, H]; `expansions` and `latent_norms` are latent attention's own.
    """

    def __init__(self, products: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        self.out, self.gate_up, self.down, pair, *self.expansions = products
        self.embed, self.state = pair.chunk(2, dim=1)
        self.input, self.hidden, self.post, self.final, *self.latent_norms = norms


def unroll(
    features: Tensor,
    embeddings: Tensor,
    layout: RowLayout,
    rotary: tuple[Tensor, Tensor],
    shape: DrafterShape,
    params: Sequence[Tensor],
    products: Sequence[Tensor],
    recompute: bool = False,
) -> Tensor:
    """Normed outputs [M, H] of all steps' rows, stacked as `layout` says.

    `features` [T, H] are fc's outputs, `embeddings` [T, H] the tokens' frozen embeddings, `rotary` = (cos, sin), each
    fp32 [positions, D / 2]. `params`: the weights of o, gate, up, down, the norms input_layernorm, hidden_norm,
    post_attention_layernorm, norm, then attention's own: q, k, v, or latent attention's q_a, kv_a, q_b, kv_b and its
    two norms. Gradients are made for these. `products`: the same matrices in the dtype of `features`, joined: o; gate,
    up; down; the projections of the pair; each of latent attention's expansions.
    """
    makers: _Makers = {}
    if torch.is_grad_enabled():
        late = list(params)
        for name, group in LATE[shape.attention].items():
            for index, param in zip(group, _Late.apply(makers, name, *(params[i] for i in group)), strict=True):
                late[index] = param
        params = late
    return _Unroll.apply(features, embeddings, layout, rotary, shape, products, recompute, makers, *params)


# Weights of `params` whose gradients are made together, by the layer's attention. The engine takes the last first: the
# largest, which ranks exchange for longest.
LATE = {
    "dense": {"norms": (5, 6, 7), "out": (0,), "pair": (8, 9, 10, 4), "down": (3,), "gate_up": (1, 2)},
    "mla": {
        "norms": (5, 6, 7),
        "expansions": (10, 11, 12, 13),
        "out": (0,),
        "pair": (8, 9, 4),
        "down": (3,),
        "gate_up": (1, 2),
    },
}
_Makers = dict[str, Callable[[], Sequence[Tensor]]]


class _Late(torch.autograd.Function):
    """Weights as the unroll reads them. Their gradients are made in this node by what the unroll's backward pass left
    in `makers`, and so reach the parameters one group at a time."""

    @staticmethod
    def forward(ctx: Any, makers: _Makers, name: str, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.makers, ctx.name = makers, name
        ctx.dtypes = [param.dtype for param in params]
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: None) -> tuple[Tensor | None, ...]:
        made = ctx.makers.pop(ctx.name)()
        return None, None, *(grad.to(dtype) for grad, dtype in zip(made, ctx.dtypes, strict=True))


class _Unroll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        embeddings: Tensor,
        layout: RowLayout,
        rotary: tuple[Tensor, Tensor],
        shape: DrafterShape,
        products: Sequence[Tensor],
        recompute: bool,
        makers: _Makers,
        *params: Tensor,
    ) -> Tensor:
        weights = LayerWeights(products, [p for p in params if p.ndim == 1])
        saved = _Forward(features, embeddings, layout, rotary, shape, weights, recompute)
        outputs = saved.run()
        ctx.saved, ctx.makers, ctx.params = saved, makers, len(params)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, ctx.saved = ctx.saved, None
        backward = _Backward(saved, grads[0])
        grad_features = backward.run()
        makers = backward.makers()
        ctx.makers.update({name: makers[name] for name in LATE[saved.shape.attention]})
        return grad_features, *[None] * (7 + ctx.params)


class _Forward:
    """The forward pass and what it keeps. All buffers are stacked over steps: x[first:last] are the rows of one."""

    def __init__(
        self,
        features: Tensor,
        embeddings: Tensor,
        layout: RowLayout,
        rotary: tuple[Tensor, Tensor],
        shape: DrafterShape,
        weights: LayerWeights,
        recompute: bool,
    ) -> None:
        self.features, self.layout, self.shape, self.weights = features, layout, shape, weights
        self.kernels = kernels_for(features.device)
        self.unit_embeddings = F.rms_norm(embeddings, embeddings.shape[-1:], eps=shape.rms_norm_eps)
        stacked, tokens, width = layout.stacked, layout.tokens, features.shape[1]
        new = features.new_empty
        exact = torch.float64 if features.dtype == torch.float64 else torch.float32
        self.exact = exact
        self.entered = new(stacked + tokens, width)  # hidden_norm of each row's state; last, of every token's feature
        self.projected = new(stacked + tokens, len(weights.state))
        context = (shape, self.projected, layout, rotary, self.kernels)
        if shape.attention == "mla":
            self.heads = LatentHeads(*context, expansions=weights.expansions, norms=weights.latent_norms)
        else:
            self.heads = DenseHeads(*context)
        self.attended = new(stacked, weights.out.shape[1])
        self.middle = new(stacked, width)  # the residual stream after attention
        self.normed = new(stacked, width)  # the MLP's input
        self.gate_up = None if recompute else new(stacked, len(weights.gate_up))
        self.left = new(stacked, width)  # g, the layer's output
        self.outputs = new(stacked, width)
        self.lse = [new(shape.num_attention_heads, n, dtype=exact) for n in layout.counts]
        self.middle_rstd, self.left_rstd, self.entered_rstd = (new(stacked, dtype=exact) for _ in range(3))
        self.features_rstd = new(tokens, dtype=exact)

    def run(self) -> Tensor:
        layout, shape, kernels, weights = self.layout, self.shape, self.kernels, self.weights
        first, _ = layout.bounds(layout.steps)
        q, tokens = self.heads.q_width, self.entered[first:]
        kernels.norm(self.features, None, [weights.hidden], [tokens], self.features_rstd, shape.rms_norm_eps)
        embedded = (self.unit_embeddings * weights.input.to(self.features.dtype)) @ weights.embed.T
        self.heads.prepare(0, embedded, columns=True)
        self.projected[first:, q:].addmm_(tokens, weights.state[q:].T, beta=self.heads.beta)
        self.heads.form(0, embedded, columns=True)
        for step, rows in enumerate(layout.counts):
            if rows == 0:
                break
            self.step(step, embedded)
        return self.outputs

    def step(self, step: int, embedded: Tensor) -> None:
        """One unroll step; its entered rows of steps ≥ 1 were written by the step before."""
        shape, kernels, weights, layout = self.shape, self.kernels, self.weights, self.layout
        first, last = layout.bounds(step)
        slots = layout.slots[: last - first]
        entered, projected = self.entered[first:last], self.projected[first:last]
        middle, left = self.middle[first:last], self.left
        if step == 0:
            torch.index_select(self.entered[layout.stacked :], 0, slots, out=entered)
            q = self.heads.q_width
            self.heads.prepare(0, embedded, columns=False)
            projected[:, :q].addmm_(entered, weights.state[:q].T, beta=self.heads.beta)
        else:
            self.heads.prepare(step, embedded, columns=False)
            self.heads.prepare(step, embedded, columns=True)
            projected.addmm_(entered, weights.state.T, beta=self.heads.beta)
            self.heads.form(step, embedded, columns=True)
        self.heads.form(step, embedded, columns=False)
        attended = self.attended[first:last]
        kernels.attend(self.heads.rows, step, layout, attended, self.lse[step])
        torch.mm(attended, weights.out.T, out=middle)
        if shape.norm_before_residual:
            residual = entered
        elif step == 0:
            residual = self.features.index_select(0, slots)
        else:
            before, _ = layout.bounds(step - 1)
            residual = (self.outputs if shape.norm_output else left)[before : before + len(slots)]
        normed = self.normed[first:last]
        kernels.norm(middle, residual, [weights.post], [normed], self.middle_rstd[first:last], shape.rms_norm_eps)
        gate_up = self.widen(first, last)
        product = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.swiglu(gate_up, product)
        left, outputs, rstd = left[first:last], self.outputs[first:last], self.left_rstd[first:last]
        torch.mm(product, weights.down.T, out=left)
        following = self.entered[last : last + layout.counts[step + 1]] if step + 1 < layout.steps else None
        if following is None:
            kernels.norm(left, middle, [weights.final], [outputs], rstd, shape.rms_norm_eps)
        elif shape.norm_output:
            kernels.norm(left, middle, [weights.final], [outputs], rstd, shape.rms_norm_eps)
            rows = len(following)
            again = self.entered_rstd[last : last + rows]
            kernels.norm(outputs[:rows], None, [weights.hidden], [following], again, shape.rms_norm_eps)
        else:
            kernels.norm(left, middle, [weights.final, weights.hidden], [outputs, following], rstd, shape.rms_norm_eps)

    def widen(self, first: int, last: int) -> Tensor:
        """The MLP's gates and ups of the rows [first, last), from its input."""
        normed, weight = self.normed[first:last], self.weights.gate_up
        kept = normed.new_empty(len(normed), len(weight)) if self.gate_up is None else self.gate_up[first:last]
        return torch.mm(normed, weight.T, out=kept)


class _Backward:
    """The backward pass. Gradients that a weight's gradient reads are stacked like the forward pass's buffers."""

    def __init__(self, forward: _Forward, grad_outputs: Tensor) -> None:
        self.forward, self.grad_outputs = forward, grad_outputs
        layout, features = forward.layout, forward.features
        stacked, width = layout.stacked, features.shape[1]
        new = features.new_empty
        self.grad_left = new(stacked, width)
        self.grad_middle = new(stacked, width)
        inner = len(forward.weights.gate_up) // 2
        self.product = None if forward.gate_up is None else new(stacked, inner)
        # Gradients of the MLP's weights, added up step by step where its rows are not kept.
        self.grad_gate_up = new((2 * inner, width), dtype=forward.exact)
        self.grad_down = new((width, inner), dtype=forward.exact)
        self.begun = False
        self.grad_attended = torch.empty_like(forward.attended)
        self.grad_projected = torch.empty_like(forward.projected)
        forward.heads.receive(self.grad_projected)
        (q_heads, kv_heads), widths = forward.heads.rows.heads, forward.heads.rows.widths
        self.grad_columns = features.new_zeros((layout.tokens, kv_heads, sum(widths)), dtype=forward.exact)
        self.grad_embedded = features.new_zeros((layout.tokens, forward.projected.shape[1]), dtype=forward.exact)
        self.own = new(2, own_columns(layout.steps).start, q_heads, layout.counts[0], dtype=forward.exact)
        self.grad_norms = {name: features.new_zeros(width, dtype=forward.exact) for name in ("hidden", "post", "final")}

    def run(self) -> Tensor:
        """Returns the gradient of the features [T, H]."""
        layout = self.forward.layout
        grad_entered = None
        for step in reversed(range(layout.steps)):
            if layout.counts[step] > 0:
                grad_entered = self.step(step, grad_entered)
        return self.columns(grad_entered)

    def step(self, step: int, grad_following: Tensor | None) -> Tensor:
        """Backward through one step; takes the gradient of the next step's entered rows and returns that of its own."""
        f, layout = self.forward, self.forward.layout
        shape, kernels, weights = f.shape, f.kernels, f.weights
        first, last = layout.bounds(step)
        grad_left = self.grad_left[first:last]
        self.leave(step, grad_following, grad_left)
        gate_up = f.widen(first, last) if f.gate_up is None else f.gate_up[first:last]
        kept = self.product
        product = gate_up.new_empty(len(gate_up), len(weights.gate_up) // 2) if kept is None else kept[first:last]
        torch.mm(grad_left, weights.down, out=product)
        kernels.swiglu_backward_(gate_up, product)
        if kept is None:
            self.mlp_grads(gate_up, f.normed[first:last], grad_left, product)
        grad_normed = gate_up @ weights.gate_up
        middle, rstd, grad_middle = f.middle[first:last], f.middle_rstd[first:last], self.grad_middle[first:last]
        (grad_post,) = kernels.norm_backward(middle, rstd, [weights.post], [grad_normed], grad_left, grad_middle)
        self.grad_norms["post"] += grad_post
        grad_attended = self.grad_attended[first:last]
        torch.mm(grad_middle, weights.out, out=grad_attended)
        heads = f.heads
        kernels.attend_backward(
            heads.rows, step, layout, f.attended[first:last], f.lse[step], grad_attended,
            heads.grads, self.grad_columns, *self.own[:, own_columns(step)],
        )  # fmt: skip
        heads.form_backward(step, self.grad_embedded, columns=False)
        grad_projected = self.grad_projected[first:last]
        if step == 0:
            grad_entered = grad_projected[:, : heads.q_width] @ weights.state[: heads.q_width]
        else:
            kernels.own_backward(heads.rows, step, layout, self.grad_attended, heads.grads, *self.own)
            heads.form_backward(step, self.grad_embedded, columns=True)
            grad_entered = grad_projected @ weights.state
        if shape.norm_before_residual:
            grad_entered += grad_middle
        return grad_entered

    def mlp_grads(self, gate_up: Tensor, normed: Tensor, grad_left: Tensor, product: Tensor) -> None:
        """Adds the part of some rows to the gradients of the MLP's weights."""
        product_of_rows_(self.grad_gate_up, gate_up, normed, accumulate=self.begun)
        product_of_rows_(self.grad_down, grad_left, product, accumulate=self.begun)
        self.begun = True

    def leave(self, step: int, grad_following: Tensor | None, grad_left: Tensor) -> None:
        """The gradient of the layer's output g from those of its normed output and of the next step, which reads g."""
        f, shape, weights = self.forward, self.forward.shape, self.forward.weights
        first, last = f.layout.bounds(step)
        grad_output, left, rstd = self.grad_outputs[first:last], f.left[first:last], f.left_rstd[first:last]
        added = None
        if grad_following is not None and not shape.norm_before_residual:
            added = self.grad_middle[last : last + len(grad_following)]
        if grad_following is not None and shape.norm_output:
            again = f.entered_rstd[last : last + len(grad_following)]
            outputs, total = f.outputs[first : first + len(grad_following)], torch.empty_like(grad_following)
            (grad,) = f.kernels.norm_backward(outputs, again, [weights.hidden], [grad_following], added, total)
            self.grad_norms["hidden"] += grad
            grad_output = grad_output.clone()
            grad_output[: len(total)] += total
            grad_following, added = None, None
        if grad_following is None:
            (grad_final,) = f.kernels.norm_backward(left, rstd, [weights.final], [grad_output], added, grad_left)
        else:
            grad_final, grad_hidden = f.kernels.norm_backward(
                left, rstd, [weights.final, weights.hidden], [grad_output, grad_following], added, grad_left
            )
            self.grad_norms["hidden"] += grad_hidden
        self.grad_norms["final"] += grad_final

    def columns(self, grad_entered: Tensor | None) -> Tensor:
        """Backward through the keys and values of step 0 and the norm before them, for all tokens."""
        f, layout, shape, heads = self.forward, self.forward.layout, self.forward.shape, self.forward.heads
        slots = layout.slots
        heads.grads.set_columns(*layout.bounds(layout.steps), self.grad_columns)
        heads.form_backward(0, self.grad_embedded, columns=True)
        grad_tokens = self.grad_projected[layout.stacked :, heads.q_width :] @ f.weights.state[heads.q_width :]
        if grad_entered is not None:
            grad_tokens.index_add_(0, slots, grad_entered)
        grad_features = torch.empty_like(f.features)
        (grad_hidden,) = f.kernels.norm_backward(
            f.features, f.features_rstd, [f.weights.hidden], [grad_tokens], None, grad_features
        )
        self.grad_norms["hidden"] += grad_hidden
        if grad_entered is not None and not shape.norm_before_residual:
            grad_features.index_add_(0, slots, self.grad_middle[: len(slots)])
        return grad_features

    def makers(self) -> _Makers:
        """What makes the gradients of the weights in each group of `LATE`: a product over the rows of all steps."""
        return {
            "norms": self.norms_grads,
            "expansions": self.forward.heads.weight_grads,
            "out": self.out_grad,
            "pair": self.pair_grads,
            "down": self.down_grad,
            "gate_up": self.gate_up_grads,
        }

    def norms_grads(self) -> list[Tensor]:
        return [self.grad_norms[name] for name in ("hidden", "post", "final")]

    def out_grad(self) -> list[Tensor]:
        f = self.forward
        out = f.features.new_empty(f.weights.out.shape, dtype=f.exact)
        product_of_rows_(out, self.grad_middle, f.attended)
        return [out]

    def pair_grads(self) -> list[Tensor]:
        """Of the pair's projections, and of the norm of the embeddings, which scales one half of their columns."""
        f, weights, q = self.forward, self.forward.weights, self.forward.heads.q_width
        stacked, rows, width = f.layout.stacked, f.layout.counts[0], f.features.shape[1]
        joined = f.features.new_empty((len(weights.state), 2 * width), dtype=f.exact)
        product_of_rows_(joined[:q, width:], self.grad_projected[:stacked, :q], f.entered[:stacked])
        product_of_rows_(joined[q:, width:], self.grad_projected[rows:, q:], f.entered[rows:])
        unscaled = joined[:, :width]
        product_of_rows_(unscaled, self.grad_embedded.to(f.features.dtype), f.unit_embeddings)
        grad_input = f.kernels.scale_columns_(unscaled, weights.embed, weights.input)
        return [*joined.split(f.heads.parts), grad_input]

    def down_grad(self) -> list[Tensor]:
        if self.product is not None:
            product_of_rows_(self.grad_down, self.grad_left, self.product)
        elif not self.begun:  # no row at all
            self.grad_down.zero_()
        return [self.grad_down]

    def gate_up_grads(self) -> list[Tensor]:
        f = self.forward
        if f.gate_up is not None:
            product_of_rows_(self.grad_gate_up, f.gate_up, f.normed)
        elif not self.begun:
            self.grad_gate_up.zero_()
        return list(self.grad_gate_up.chunk(2))
