"""Queries, keys and values of all unroll steps' rows, wherever a projection wrote them (walk: step 6).

Attention's kernels read them, and write gradients, through these views; so they need not know how heads are made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadRows:
    """Stacked rows as in `row_layout`: M of all steps; behind them, for keys and values, step 0's T columns.

    query   [M, q_heads, D + R]
    key     [M + T, kv_heads, D]
    value   [M + T, kv_heads, E], of the key's strides
    shared  [M + T, R], the rest of a row's keys, alike in all heads; R = 0 where there is none
    scale   what scores are multiplied by

    Elements of a head lie side by side. Heads of one group lie side by side (grouped-query attention).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    shared: Tensor
    scale: float

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads queries and keys have."""
        return self.query.shape[1], self.key.shape[1]

    @property
    def widths(self) -> tuple[int, int, int]:
        """(D, E, R)."""
        return self.key.shape[2], self.value.shape[2], self.shared.shape[1]

    def set_columns(self, first: int, last: int, joined: Tensor) -> None:
        """Takes gradients of the columns in rows [first, last) from joined [n, kv_heads, D + E + R], of any dtype.

        The shared part's is the sum of those that the heads have for it.
        """
        key, value, shared = joined.split(self.widths, dim=-1)
        self.key[first:last].copy_(key)
        self.value[first:last].copy_(value)
        if shared.shape[-1]:
            self.shared[first:last].copy_(shared.sum(1))
