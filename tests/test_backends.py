"""Backends are read from live objects, the log is evidence, and differences are told in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch import nn

from eagle3.adapter import Adapter
from eagle3.adapters.deepseek_v3 import DeepseekV3Adapter
from eagle3.adapters.kimi_k25 import KimiK25Adapter
from eagle3.adapters.llama import LlamaAdapter
from eagle3.engines.backends import expected_backends, log_backends, mismatches, model_backends


class Named:
    def __init__(self, name: str, mla: bool = False) -> None:
        self.name, self.mla = name, mla

    def get_name(self) -> str:
        return self.name

    def is_mla(self) -> bool:
        return self.mla


class Attention(nn.Module):
    def __init__(self, prefill: str) -> None:
        super().__init__()
        self.attn_backend, self.impl = Named("FLASH_ATTN_MLA", mla=True), object()
        self.prefill_backend = Named(prefill)


class Experts(nn.Module):
    def __init__(self, bits: int) -> None:
        super().__init__()
        method = {"wna16_backend": SimpleNamespace(value="MARLIN"), "num_bits": bits, "group_size": 32}
        self.quant_method: Any = SimpleNamespace(**method)


LOG = """
(EngineCore pid=2897) INFO 11-30 01:08:14 [cuda.py:482] Using FLASH_ATTN_MLA attention backend out of potential backends
(EngineCore pid=2897) INFO 11-30 01:08:14 [selector.py:174] Using FLASH_ATTN MLA prefill backend.
(EngineCore pid=2897) INFO 11-30 01:08:14 [int_wna16.py:206] Using 'MARLIN' WNA16 MoE backend.
"""


def test_kimis_backends_are_the_expected_ones() -> None:
    model = nn.ModuleList([Attention("FLASH_ATTN"), Experts(4), Attention("FLASH_ATTN"), Experts(4)])
    expected = expected_backends(KimiK25Adapter().expected_backends(), {})
    assert mismatches(expected, model_backends(model, "compressed-tensors")) == []


def test_a_layer_that_differs_shows() -> None:
    model = nn.ModuleList([Attention("FLASH_ATTN"), Experts(4), Attention("TRTLLM"), Experts(8)])
    found = model_backends(model, "compressed-tensors")
    problems = mismatches(expected_backends(KimiK25Adapter().expected_backends(), {}), found)
    assert problems == [
        "prefill: expected FLASH_ATTN, found ['FLASH_ATTN', 'TRTLLM']",
        "moe_bits: expected 4, found [4, 8]",
    ]


def test_hardware_can_expect_otherwise_or_nothing() -> None:
    adapter = KimiK25Adapter().expected_backends()
    assert expected_backends(adapter, {"prefill": "TRTLLM"})["prefill"] == "TRTLLM"
    assert "moe" not in expected_backends(adapter, {"moe": None})


@pytest.mark.parametrize(
    ("adapter", "model", "quantization"),
    [
        (KimiK25Adapter(), nn.ModuleList([Attention("FLASH_ATTN"), Experts(4)]), "compressed-tensors"),
        (DeepseekV3Adapter(), nn.ModuleList([Attention("FLASH_ATTN")]), "fp8"),
        (LlamaAdapter(), nn.ModuleList([nn.Linear(2, 2)]), None),
    ],
    ids=["kimi", "deepseek in fp8", "dense"],
)
def test_shipped_hardware_takes_what_each_target_ends_up_with(
    adapter: Adapter, model: nn.Module, quantization: str | None
) -> None:
    """An override in conf/hardware that no load could meet would stop each one after its eighteen minutes."""
    for path in sorted((Path(__file__).parents[1] / "conf" / "hardware").glob("*.yaml")):
        override: Any = OmegaConf.to_container(OmegaConf.load(path))
        expected = expected_backends(adapter.expected_backends(), override.get("expected_backends") or {})
        assert mismatches(expected, model_backends(model, quantization)) == [], path.name


def test_a_wrapped_method_still_tells_and_case_does_not_matter() -> None:
    experts = Experts(4)
    experts.quant_method = SimpleNamespace(old_quant_method=experts.quant_method)
    found = model_backends(nn.ModuleList([experts]), None)
    assert found["moe"] == "MARLIN_WNA16"
    assert mismatches({"moe": "marlin_wna16", "moe_bits": 4}, found) == []


def test_the_log_speaks_of_the_same_names() -> None:
    """The lines are those of vLLM 0.26 on an H200."""
    found = log_backends(LOG)
    assert found == {"prefill": "FLASH_ATTN", "moe": "MARLIN_WNA16", "attention_backend": "FLASH_ATTN_MLA"}
    expected = KimiK25Adapter().expected_backends()
    assert mismatches(expected, found, partial=True) == []
    assert mismatches(expected, {"moe": "TRITON_WNA16"}, partial=True) == [
        "moe: expected MARLIN_WNA16, found TRITON_WNA16"
    ]
