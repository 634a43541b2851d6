"""Rotary position embedding, with transformers' own arithmetic for its scaling (walk: step 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eagle3.errors import RequestError

if TYPE_CHECKING:
    from eagle3.drafter import DrafterShape


class Rotary(nn.Module):
    """Rotary position embedding with the target's theta and scaling.

    Pairs of dimensions are the two halves, as Llama and vLLM have them; for latent attention neighbours, as DeepSeek.
    """

    frequencies: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        frequencies, self.attention_scaling = rope_frequencies(shape)
        self.interleaved = shape.attention == "mla"
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotates heads [R, n, D] at positions [R]."""
        real = torch.float64 if heads.dtype == torch.float64 else torch.float32
        angles = positions[:, None].to(real) * self.frequencies.to(real)
        cos = (angles.cos() * self.attention_scaling)[:, None]
        sin = (angles.sin() * self.attention_scaling)[:, None]
        wide = heads.to(real)
        if self.interleaved:
            left, right = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2)
        else:
            left, right = wide.chunk(2, dim=-1)
            turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return turned.to(heads.dtype)


def rope_frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    """The angular frequency of each rotated pair of dimensions and the factor on cos and sin.

    Scaling (linear, llama3, yarn, ...) is transformers' own arithmetic. RequestError for a kind that it does not know.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = dict(shape.rope_scaling or {})
    kind = scaling.pop("type", None)
    parameters = {"rope_type": kind or "default", **scaling, "rope_theta": shape.rope_theta}
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.qk_rope_head_dim or shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
    )
    config.rope_parameters = parameters
    try:
        rotary = LlamaRotaryEmbedding(config)
    except KeyError as error:
        raise RequestError(
            f"the target's rope_scaling {shape.rope_scaling}: transformers misses {error} there; expected a kind and "
            "fields that it knows, such as linear, llama3 or yarn"
        ) from error
    return rotary.inv_freq.clone(), float(rotary.attention_scaling)
