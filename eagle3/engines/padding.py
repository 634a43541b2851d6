"""How samples of different length share one rectangle of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices grouped by similar length, longest first, each group's rectangle at most `batch_tokens` tokens.

    A longer sample gets a batch of its own. The grouping depends on nothing but the arguments.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def pad(rows: Sequence[Any]) -> Tensor:
    """int64 [B, T] of id rows, padded on the right with zeros that nothing reads."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.from_numpy(np.array(row, dtype=np.int64))
    return padded
