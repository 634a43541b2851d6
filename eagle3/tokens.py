"""Step 2 of the walk: Conversation → input_ids, loss_mask. One render, once; nothing downstream ever renders again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One prepared conversation: `input_ids` int32 [T], `loss_mask` bool [T] (true = the assistant generated it)."""

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    split: str
    key: str
