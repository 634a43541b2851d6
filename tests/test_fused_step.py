"""Which drafters take the fused step; what it computes is tested by test_unroll and, on a GPU, tests/gpu."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from eagle3.fused_step import heads_fit, obstacle
from tests.drafters import make_drafter, make_shape


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


@pytest.mark.parametrize(
    ("sizes", "dtype", "precision", "reason"),
    [
        ({}, torch.float32, "16-mixed", "the precision is 16-mixed, the kernels compute in 32-true or bf16-mixed"),
        ({}, torch.float64, "32-true", "weights are a Tensor of torch.float64, the kernels take"),
        ({"head_dim": 192}, torch.float32, "32-true", "heads are 192 wide (drafter.head_dim), the kernels take"),
        (latent(128, 64, 256), torch.float32, "bf16-mixed", "heads are (128, 64, 256) wide (drafter.qk_nope_head"),
        ({"hidden_act": "gelu"}, torch.float32, "bf16-mixed", "the activation is the target's gelu, the kernels have"),
        ({}, torch.float32, "bf16-mixed", None if find_spec("triton") else "Triton is not installed"),
    ],
)
def test_what_keeps_a_drafter_from_the_kernels_is_named(
    sizes: dict[str, object], dtype: torch.dtype, precision: str, reason: str | None
) -> None:
    found = obstacle(make_drafter(make_shape(**sizes), dtype=dtype), precision)
    assert found == reason or (found is not None and reason is not None and found.startswith(reason))
