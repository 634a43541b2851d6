"""The weights as matrix products want them: in the compute dtype, what shares an input joined (walk: step 6).

Masters stay fp32 parameters; copies follow them. A copy is renewed when its master's version shows a change, or by
the optimizer in the pass that changes the master.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ComputeWeights:
    """Copies of some parameters in `dtype`; those of one group [n_i, in] lie behind one another in one tensor."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
        self.joined: list[Tensor] = []
        self._copies: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        for group in groups:
            lengths = [len(p) for p in group]
            joined = group[0].new_empty((sum(lengths), *group[0].shape[1:]), dtype=dtype)
            self.joined.append(joined)
            self._copies.update(zip(group, joined.split(lengths), strict=True))

    def fresh(self) -> list[Tensor]:
        """The joined copies, each renewed if its master changed."""
        for master, copy in self._copies.items():
            if self._versions.get(master) != master._version:
                copy.copy_(master.detach())
                self.mark(master)
        return self.joined

    def copy_of(self, master: Tensor) -> Tensor | None:
        """The copy of a parameter, if there is one."""
        return self._copies.get(master)

    def mark(self, master: Tensor) -> None:
        """Says that a parameter's copy is as new as the parameter."""
        self._versions[master] = master._version


def product_of_rows_(into: Tensor, grads: Tensor, inputs: Tensor, accumulate: bool = False) -> None:
    """A weight's gradient, Σ over rows of outer products: [n, out], [n, in] → into [out, in], or added to it.

    On a GPU operands of 16 bits are summed and kept in fp32.
    """
    mixed = into.dtype != grads.dtype
    if accumulate and mixed:
        torch.addmm(into, grads.T, inputs, out_dtype=into.dtype, out=into)
    elif mixed:
        torch.mm(grads.T, inputs, out_dtype=into.dtype, out=into)
    elif accumulate:
        into.addmm_(grads.T, inputs)
    else:
        torch.mm(grads.T, inputs, out=into)
