"""Multi-head latent attention of the drafter's layer, as DeepSeek's targets have it (walk: step 6).

Queries, and keys with values, are each expanded from a latent vector that is normed; a part of every key, shared by all
heads, carries the position. Source: DeepSeek-V2, arXiv 2405.04434. Both latents read the pair (embedding, state) of
width 2H, and the parts are named as vLLM's deepseek_eagle3.py reads them:

    q_a_proj            [q_lora_rank, 2H]                           q_a_layernorm   [q_lora_rank]
    q_b_proj            [heads * (nope + rope), q_lora_rank]
    kv_a_proj_with_mqa  [kv_lora_rank + rope, 2H]                   kv_a_layernorm  [kv_lora_rank]
    kv_b_proj           [heads * (nope + v), kv_lora_rank]
    o_proj              [H, heads * v]

For training, keys and values are expanded for all heads; a server keeps the latents instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle3.norm import Norm

if TYPE_CHECKING:
    from eagle3.drafter import DrafterShape
    from eagle3.rotary import Rotary


class LatentAttention(nn.Module):
    """The projections of latent attention; rows in, heads out."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.nope, self.rope, self.value = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
        self.query_factor = softmax_factor(shape)
        width, eps = 2 * shape.hidden_size, shape.rms_norm_eps
        self.q_a_proj = nn.Linear(width, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(shape.q_lora_rank, eps=eps)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, shape.kv_lora_rank + self.rope, bias=False)
        self.kv_a_layernorm = Norm(shape.kv_lora_rank, eps=eps)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, shape.hidden_size, bias=False)

    def queries(self, pair: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
        """[R, 2H] → [R, heads, nope + rope], the last part rotated; the factor on the softmax's scale is in them."""
        heads = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(pair))).unflatten(-1, (self.heads, -1))
        plain, turned = heads.split((self.nope, self.rope), dim=-1)
        return torch.cat((plain, rotary(turned, positions)), dim=-1) * self.query_factor

    def columns(self, pair: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R, 2H] → keys [R, heads, nope + rope], the rotated part alike in all heads, and values [R, heads, v]."""
        latent, turned = self.kv_a_proj_with_mqa(pair).split((self.kv_a_layernorm.weight.shape[0], self.rope), dim=-1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        plain, values = heads.split((self.nope, self.value), dim=-1)
        shared = rotary(turned[:, None], positions).expand(-1, self.heads, -1)
        return torch.cat((plain, shared), dim=-1), values.contiguous()


def softmax_factor(shape: DrafterShape) -> float:
    """What multiplies 1 / sqrt(head width): YaRN's correction for latent attention, as DeepSeek and vLLM have it."""
    scaling = shape.rope_scaling or {}
    mscale, factor = scaling.get("mscale_all_dim"), scaling.get("factor", 1.0)
    if not mscale or factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2
