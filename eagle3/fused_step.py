"""One training step's forward pass by the written-out unroll and the stacked loss (walk: step 6).

Does what `Eagle3Drafter.unroll` and `loss.unroll_loss` do, on the drafter's own parameters, at the speed of the
device's matrix products. Parameters stay fp32 masters: products run in `dtype`, gradients arrive as fp32 sums.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from eagle3.batches import PackedBatch
from eagle3.compute_weights import ComputeWeights, product_of_rows_
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.latent_attention import LatentAttention
from eagle3.linear_loss import CHUNK_BYTES, DraftTeacher, Mix, stacked_loss
from eagle3.loss import UnrollLoss
from eagle3.row_layout import RowLayout
from eagle3.unroll import unroll


class FusedStep:
    """The loss of a packed batch: drafter and teacher on one device, `dtype` for the products.

    `mix` weighs soft cross-entropy, reverse KL, total variation, LK; `mask_oov` takes rows out of the loss whose
    teacher's argmax lies outside the draft vocabulary; `recompute` makes the MLP's rows again instead of keeping them.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        teacher: DraftTeacher,
        dtype: torch.dtype,
        mix: Mix = (1.0, 0.0, 0.0, 0.0),
        mask_oov: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
        recompute: bool = False,
    ) -> None:
        self.chunk_bytes, self.recompute = chunk_bytes, recompute
        self.drafter, self.teacher, self.dtype, self.mix, self.mask_oov = drafter, teacher, dtype, mix, mask_oov
        # None where weights come and go: FSDP2 gathers them for each step, so their copies are made anew each time.
        self.copies = None
        if not isinstance(drafter.fc.weight, DTensor):
            self.copies = ComputeWeights([*self._groups(), [drafter.lm_head.weight]], dtype)
        self._rotary: tuple[Tensor, Tensor] | None = None

    @property
    def params(self) -> list[Tensor]:
        """The layer's weights in the order of `unroll`."""
        layer = self.drafter.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        common = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, self.drafter.norm)
        if isinstance(attention, LatentAttention):
            own = (attention.q_a_proj, attention.kv_a_proj_with_mqa, attention.q_b_proj, attention.kv_b_proj)
            own = (*own, attention.q_a_layernorm, attention.kv_a_layernorm)
        else:
            own = (attention.q_proj, attention.k_proj, attention.v_proj)
        return [part.weight for part in (*common, *norms, *own)]

    def _groups(self) -> list[list[Tensor]]:
        """The matrices but for the head's, those together that share an input."""
        out, gate, up, down, *own = (weight for weight in self.params if weight.ndim > 1)
        latent = self.drafter.shape.attention == "mla"
        joined = [own[:2], own[2:3], own[3:]] if latent else [own]
        return [[out], [gate, up], [down], *joined, [self.drafter.fc.weight]]

    def __call__(self, batch: PackedBatch, layout: RowLayout, step_weights: Tensor) -> UnrollLoss:
        """`step_weights` [steps] = decay^k over the rows supervised at k in the whole optimizer step."""
        with torch.autocast(batch.input_ids.device.type, enabled=False):  # the types are chosen here
            return self._loss(batch, layout, step_weights)

    def _loss(self, batch: PackedBatch, layout: RowLayout, step_weights: Tensor) -> UnrollLoss:
        drafter = self.drafter
        embeddings = F.embedding(batch.input_ids, drafter.embedding).to(self.dtype)
        if self.copies is None:
            *products, fc = ComputeWeights(self._groups(), self.dtype).fresh()
        else:
            *products, fc, _ = self.copies.fresh()
        features = self.fuse(batch.hidden_states, fc)
        rotary = self.rotary(layout)
        outputs = unroll(features, embeddings, layout, rotary, drafter.shape, self.params, products, self.recompute)
        return drafter.lm_head(outputs, self._compare, batch.final_states, layout, step_weights)

    def _compare(self, outputs: Tensor, final_states: Tensor, layout: RowLayout, step_weights: Tensor) -> UnrollLoss:
        """The head and the loss of the unroll's outputs."""
        weight = self.drafter.lm_head.weight
        copy = weight.detach().to(self.dtype) if self.copies is None else self.copies.copy_of(weight)
        assert copy is not None
        return stacked_loss(
            outputs,
            weight,
            copy,
            final_states,
            self.teacher,
            layout,
            step_weights,
            self.mix,
            self.mask_oov,
            self.chunk_bytes,
        )

    def fuse(self, hidden_states: Tensor, fc: Tensor) -> Tensor:
        """Captured states [T, K, H_target] → features [T, H] in the products' dtype."""
        drafter, states = self.drafter, hidden_states.flatten(1).to(self.dtype)
        if drafter.input_norm is not None:
            states = _normed(states, drafter.input_norm)
        if drafter.fc_norm is not None:
            chunks = states.chunk(len(drafter.fc_norm), dim=-1)
            states = torch.cat([_normed(c, n) for n, c in zip(drafter.fc_norm, chunks, strict=True)], dim=-1)
        return _Linear.apply(states, drafter.fc.weight, fc)

    def rotary(self, layout: RowLayout) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, D / 2], long enough for this batch."""
        needed = layout.tokens + layout.steps
        if self._rotary is None or len(self._rotary[0]) < needed:
            rotary = self.drafter.rotary
            real = torch.float64 if self.dtype == torch.float64 else torch.float32
            positions = torch.arange(-(-needed // 4096) * 4096, device=rotary.frequencies.device, dtype=real)
            angles = positions[:, None] * rotary.frequencies.to(real)
            factor = rotary.attention_scaling
            self._rotary = (angles.cos() * factor, angles.sin() * factor)
        return self._rotary


PRECISIONS = ("32-true", "bf16-mixed")  # in which it computes, as Lightning names them
# Of a head, at most: the backward kernel's tiles of wider ones pass Hopper's 227 KB of shared memory.
DENSE_WIDTH = 128
LATENT_WIDTHS = (128, 64, 128)  # the same without position, with it, and of values: DeepSeek's and Kimi's


def obstacle(drafter: Eagle3Drafter, precision: str) -> str | None:
    """Why `FusedStep` cannot train this drafter on its GPU in this precision, in words; None when it can.

    It then goes the plain path.
    """
    weight, shape = drafter.fc.weight, drafter.shape
    if precision not in PRECISIONS:
        return f"the precision is {precision}, the kernels compute in {' or '.join(PRECISIONS)}"
    if type(weight.data) not in (Tensor, DTensor) or weight.dtype != torch.float32:
        return f"weights are a {type(weight.data).__name__} of {weight.dtype}, the kernels take torch.float32"
    if not heads_fit(shape):
        if shape.attention == "dense":
            return f"heads are {shape.head_dim} wide (drafter.head_dim), the kernels take up to {DENSE_WIDTH}"
        names = "drafter.qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
        return f"heads are {_latent_widths(shape)} wide ({names}), the kernels take up to {LATENT_WIDTHS}"
    if shape.hidden_act != "silu":
        return f"the activation is the target's {shape.hidden_act}, the kernels have silu"
    return None if find_spec("triton") is not None else "Triton is not installed (`pip install triton`)"


def heads_fit(shape: DrafterShape) -> bool:
    """Whether attention's kernels take heads of these widths: dense ones up to `DENSE_WIDTH`, latent ones up to
    `LATENT_WIDTHS`."""
    if shape.attention == "dense":
        return shape.head_dim <= DENSE_WIDTH
    return all(width <= most for width, most in zip(_latent_widths(shape), LATENT_WIDTHS, strict=True))


def _latent_widths(shape: DrafterShape) -> tuple[int, int, int]:
    return shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim


def _normed(states: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(states, norm.normalized_shape, norm.weight.to(states.dtype), norm.eps)


class _Linear(torch.autograd.Function):
    """rows [n, in] times weight [out, in] transposed; `product` is the weight in the rows' dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, product: Tensor) -> Tensor:
        ctx.rows, ctx.weight, ctx.product = rows, weight, product
        return rows @ product.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        grad_rows = grads[0] @ ctx.product if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(ctx.weight)
        product_of_rows_(grad_weight, grads[0], ctx.rows)
        return grad_rows, grad_weight, None
