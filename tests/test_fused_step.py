"""Which drafters take the fused step; what it computes is tested by test_unroll and, on a GPU, tests/gpu."""

from __future__ import annotations

import pytest

from eagle3.fused_step import heads_fit
from tests.drafters import make_shape


def latent(nope: int, rope: int, value: int) -> dict[str, object]:
    """A latent drafter's widths."""
    widths = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "head_dim": nope + rope}
    return {"attention": "mla", "q_lora_rank": 7, "kv_lora_rank": 9, **widths}


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [
        ({"head_dim": 64}, True),
        ({"head_dim": 128}, True),
        ({"head_dim": 192}, False),
        ({"head_dim": 256}, False),
        (latent(128, 64, 128), True),
        (latent(32, 16, 32), True),
        (latent(192, 64, 256), False),
    ],
)
def test_heads_whose_kernels_a_gpu_can_run_take_them(sizes: dict[str, object], fit: bool) -> None:
    assert heads_fit(make_shape(**sizes)) is fit
