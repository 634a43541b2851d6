"""Key/value memory for continuous decoding: one preallocated row per sequence, handed to transformers as its cache.

Growing a cache by concatenation, as the library's own does, copies all keys and values at each token. Here each
sequence owns a row, a step writes one column per row, and attention reads rows 0 ... live-1 up to the longest of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Cursor:
    """Where the next forward writes: columns `positions` [B, T] of rows `rows` [B]; it reads `width` columns back."""

    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    positions: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    width: int = 0
    dense: bool = False
    """Whether rows are exactly 0 ... B-1, so that attention can read them in place."""


class RowLayer(CacheLayerMixin):
    """One decoder layer's keys and values [slots, heads, capacity, head_dim], allocated at the first forward."""

    is_sliding = False

    def __init__(self, cursor: Cursor, slots: int, capacity: int) -> None:
        super().__init__()
        self.cursor, self.slots, self.capacity = cursor, slots, capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            zeros((self.slots, states.shape[1], self.capacity, states.shape[3]), states)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores [B, heads, T, head_dim] at the cursor; returns the rows' columns 0 ... width-1."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        cursor = self.cursor
        rows = cursor.rows[:, None].expand_as(cursor.positions)
        live = slice(len(cursor.rows)) if cursor.dense else cursor.rows
        self.keys[rows, :, cursor.positions] = key_states.transpose(1, 2)
        self.values[rows, :, cursor.positions] = value_states.transpose(1, 2)
        return self.keys[live, :, : cursor.width], self.values[live, :, : cursor.width]

    def copy_columns(self, source: int, targets: Tensor, width: int) -> None:
        """Copies the first `width` columns of one row into others."""
        for memory in (self.keys, self.values):
            assert memory is not None
            memory[targets, :, :width] = memory[source, :, :width]

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.width, 0


class RowCache(Cache):
    """The rows of all layers, moved by one cursor. Masks and positions are the caller's: pass a 4D mask."""

    def __init__(self, num_layers: int, slots: int, capacity: int) -> None:
        self.cursor, self.slots = Cursor(), slots
        self.row_layers = [RowLayer(self.cursor, slots, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))

    def point(self, rows: Tensor, positions: Tensor, width: int, dense: bool) -> None:
        """Sets where the next forward writes and how far it reads."""
        self.cursor.rows, self.cursor.positions = rows, positions
        self.cursor.width, self.cursor.dense = width, dense

    def copy_columns(self, source: int, targets: Tensor, width: int) -> None:
        """Copies the first `width` columns of one row into others, in every layer."""
        for layer in self.row_layers:
            layer.copy_columns(source, targets, width)


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of a tensor's dtype and device; on a CPU the memory is taken only as it is touched.

    Zeros, since what lies behind a mask is multiplied by 0, and 0 times an old NaN is NaN. torch.zeros writes them all
    at once, which for slots of the longest length costs seconds, and memory that most rows never use.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.zeros(math.prod(shape) * like.element_size(), np.uint8)).view(like.dtype).view(shape)
