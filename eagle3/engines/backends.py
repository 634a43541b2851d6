"""Which kernels a loaded vLLM model really runs, read from its live objects, and whether they are the expected ones.

Names are vLLM's own (attention backends, MLA prefill backends, mixture-of-experts backends). What the engine's log says
about them comes earlier, while weights load, but is only evidence: `log_backends` reads it for an early stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

LOG_LINES = {
    "prefill": re.compile(r"Using (\w+) MLA prefill backend"),
    "moe": re.compile(r"Using '?(\w+)'? WNA16 MoE backend"),
    "attention_backend": re.compile(r"Using (\w+) attention backend"),
}


def model_backends(model: nn.Module, quantization: str | None) -> dict[str, Any]:
    """The backends of a loaded model: a value each, or a sorted list where layers differ."""
    found: dict[str, set[Any]] = {}

    def add(name: str, value: Any) -> None:
        found.setdefault(name, set()).add(value)

    for module in model.modules():
        backend = getattr(module, "attn_backend", None)
        if backend is not None and hasattr(module, "impl"):
            add("attention", "MLA" if backend.is_mla() else "DENSE")
            add("attention_backend", backend.get_name())
            add("attention_impl", type(module.impl).__name__)
        prefill = getattr(module, "prefill_backend", None)
        if prefill is not None:
            add("prefill", prefill.get_name())
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        # Some parallel settings wrap it, which hides what it has chosen.
        method = getattr(method, "old_quant_method", method)
        experts = getattr(method, "wna16_backend", None)
        if experts is not None:
            add("moe", f"{experts.value}_WNA16")
            add("moe_bits", method.num_bits)
            add("moe_group_size", method.group_size)
        elif hasattr(method, "moe"):
            add("moe", getattr(getattr(method, "experts_cls", None), "__name__", None) or type(method).__name__)
    return {
        "quantization": quantization,
        **{name: next(iter(values)) if len(values) == 1 else sorted(values) for name, values in found.items()},
    }


def log_backends(text: str) -> dict[str, str]:
    """The backends that lines of the engine's log speak of, under the names of `model_backends`."""
    found: dict[str, str] = {}
    for name, pattern in LOG_LINES.items():
        for value in pattern.findall(text):
            found[name] = f"{value}_WNA16" if name == "moe" else value
    return found


def expected_backends(adapter: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """What is expected: the adapter's answer, with `hardware.expected_backends` over it; null expects nothing."""
    merged = {**adapter, **override}
    return {name: value for name, value in merged.items() if value is not None}


def mismatches(expected: Mapping[str, Any], found: Mapping[str, Any], *, partial: bool = False) -> list[str]:
    """What differs, in words. `partial`: names that `found` does not speak of are not missed."""
    return [
        f"{name}: expected {value}, found {found.get(name)}"
        for name, value in expected.items()
        # Names are the same in any case; numbers stand for themselves.
        if not (partial and name not in found) and str(found.get(name)).upper() != str(value).upper()
    ]
