"""The drafter's RMSNorm (walk: step 6)."""

from __future__ import annotations

from torch import Tensor, nn


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight, whatever autocast made of its input; returns the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
