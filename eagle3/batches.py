"""Packed batches out of the store: whole documents, one behind the other, no padding (step 5 of the walk)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.attention import Block, attention_blocks
from eagle3.slots import BoolArray, SlotRows, pack_rows, supervised_slots


@dataclass(frozen=True)
class Document:
    """One sample with its states.

    input_ids int [N], loss_mask bool [N], captured states [N, H_target] for each layer in the drafter's order, final
    (pre-norm) states [N, H_target].
    """

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    hidden_states: Sequence[Tensor]
    final_states: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Documents of T tokens together, one behind the other.

    input_ids, position_ids, document_ids int64 [T]; loss_mask bool [T]; cu_seqlens int64 [B+1], the documents' bounds;
    hidden_states [T, K * H_target] and final_states [T, H_target] in the store's dtype; `slots` and `blocks` say which
    rows each unroll step computes, supervises and attends from; `row_counts` int64 [steps] are the supervised rows of
    the whole optimizer step (all ranks, all accumulated batches), by which its losses are divided.
    """

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    cu_seqlens: Tensor
    hidden_states: Tensor
    final_states: Tensor
    slots: SlotRows
    row_counts: Tensor
    blocks: tuple[tuple[Block, ...], ...]
    sample_ids: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on a device."""
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory, from which copies to a GPU overlap with its work."""
        return _map_tensors(self, lambda tensor: tensor.pin_memory())


def _map_tensors(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return tuple(_map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def pack(
    documents: Sequence[Document],
    steps: int,
    in_draft_vocab: BoolArray | None = None,
    alignment: str = "exact",
    row_counts: Sequence[int] | None = None,
) -> PackedBatch:
    """Packs documents; without `row_counts` the batch is a whole optimizer step of its own."""
    ids = [np.asarray(document.input_ids) for document in documents]
    masks = [np.asarray(document.loss_mask, dtype=np.bool_) for document in documents]
    flags = [supervised_slots(i, mask, steps, in_draft_vocab, alignment) for i, mask in zip(ids, masks, strict=True)]
    slots = pack_rows(ids, flags, steps)
    lengths = [len(i) for i in ids]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    counts = [len(rows) for rows in slots.supervised_rows] if row_counts is None else list(row_counts)
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate(masks)),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        document_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        cu_seqlens=cu_seqlens,
        hidden_states=torch.cat([torch.cat(list(document.hidden_states), dim=-1) for document in documents]),
        final_states=torch.cat([document.final_states for document in documents]),
        slots=slots,
        row_counts=torch.tensor(counts, dtype=torch.int64),
        blocks=tuple(attention_blocks(rows, cu_seqlens) for rows in slots.rows),
        sample_ids=tuple(document.sample_id for document in documents),
    )
