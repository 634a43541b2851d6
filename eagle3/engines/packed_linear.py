"""Linear layers of the target with weights packed once for the CPU's matrix kernels (steps 1, 3 and 7 of the walk).

oneDNN reads weights in blocks. Handed a plain weight it reorders at each call, or torch takes another library's kernel;
packed once, 128 rows through SmolLM2's layers take 0.64 of the time, 4 rows 0.4 and one row 0.65 (two cores, float32).
These are the operators that torch's own compiler emits for frozen weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")


class PackedLinear(nn.Module):
    """Stands for an nn.Linear in inference: [..., in_features] → [..., out_features]. It has no parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def packable(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU can pack weights of a dtype."""
    known = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
    if dtype == torch.bfloat16:
        return known and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return known and dtype == torch.float32


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of a frozen CPU model in place; returns how many. Subclasses of nn.Linear stay.

    A weight that is tied to an embedding is packed as a copy.
    """
    replaced = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and packable(child.weight.dtype):
                setattr(module, name, PackedLinear(child))
                replaced += 1
    return replaced
