"""The row-wise parts of the unroll's forward and backward pass (walk: step 6), in two versions with one interface.

`plain` is torch on any device and the reference of the other; `fused` and its neighbours are Triton kernels for a GPU.
Matrix products stay with the vendor's library and are called from `unroll` and `linear_loss`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """Returns the module whose functions run best on this device."""
    return import_module("eagle3.kernels.fused" if device.type == "cuda" else "eagle3.kernels.plain")
