"""Packed batches out of the store: whole documents, one behind the other, no padding (step 5 of the walk).

Only the layers that the drafter reads are read, one contiguous slice a document and layer, straight to its place in the
batch. What a batch holds is its own and goes with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from eagle3.attention import Block, attention_blocks
from eagle3.errors import RequestError, StoreError
from eagle3.plan import Plan, plan_once
from eagle3.row_layout import RowLayout, lay_out
from eagle3.slots import BoolArray, SlotRows, pack_rows, supervised_slots

if TYPE_CHECKING:
    from eagle3.prepared import Prepared
    from eagle3.store import StatesStore
    from eagle3.tokens import Sample

log = logging.getLogger("eagle3")


@dataclass(frozen=True)
class PackedBatch:
    """Documents of T tokens together, one behind the other.

    input_ids, position_ids int64 [T]; loss_mask bool [T]; cu_seqlens int64 [B+1], the documents' bounds;
    hidden_states [T, K, H_target], in memory layer by layer where they were read, and final_states [T, H_target] in the
    store's dtype; `slots` and `blocks` say which rows each unroll step computes, supervises and attends from;
    `row_counts` int64 [steps] are the supervised rows of the whole optimizer step (all ranks, all accumulated batches),
    by which its losses are divided.
    """

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    hidden_states: Tensor
    final_states: Tensor
    slots: SlotRows
    row_counts: Tensor
    blocks: tuple[tuple[Block, ...], ...]
    sample_ids: tuple[str, ...]
    layout: RowLayout | None = None

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


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return tuple(_map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def assemble(
    texts: Sequence[tuple[str, np.ndarray, np.ndarray]],
    hidden_states: Tensor,
    final_states: Tensor,
    steps: int,
    in_draft_vocab: BoolArray | None,
    alignment: str,
    row_counts: Sequence[int] | np.ndarray | None,
    with_layout: bool,
) -> PackedBatch:
    """The batch of documents whose states are packed already; each text is (sample id, input_ids, loss_mask)."""
    ids = [np.asarray(input_ids) for _, input_ids, _ in texts]
    masks = [np.asarray(loss_mask, dtype=np.bool_) for _, _, loss_mask in texts]
    flags = [supervised_slots(i, mask, steps, in_draft_vocab, alignment) for i, mask in zip(ids, masks, strict=True)]
    slots = pack_rows(ids, flags, steps)
    lengths = torch.tensor([len(i) for i in ids], dtype=torch.int64)
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    counts = [len(rows) for rows in slots.supervised_rows] if row_counts is None else np.asarray(row_counts)
    input_ids = torch.from_numpy(np.concatenate([*ids, np.empty(0)]).astype(np.int64))
    return PackedBatch(
        input_ids=input_ids,
        loss_mask=torch.from_numpy(np.concatenate([*masks, np.empty(0, dtype=np.bool_)])),
        position_ids=torch.cat([torch.arange(int(n)) for n in lengths] + [torch.empty(0, dtype=torch.int64)]),
        cu_seqlens=cu_seqlens,
        hidden_states=hidden_states,
        final_states=final_states,
        slots=slots,
        row_counts=torch.as_tensor(counts, dtype=torch.int64),
        blocks=tuple(attention_blocks(rows, cu_seqlens) for rows in slots.rows),
        sample_ids=tuple(sample_id for sample_id, _, _ in texts),
        layout=lay_out(slots, input_ids, cu_seqlens) if with_layout else None,
    )


class BatchLoader:
    """A training run's batches in their order, from batch `start` on; its length counts those before it too.

    That is how Lightning counts batches of a resumed run. Has the state-dict interface of resumable loaders. On a GPU
    (`device`) batches are read and copied ahead.
    """

    def __init__(
        self,
        loader: Callable[[int], DataLoader[PackedBatch]],
        total: int,
        start: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._loader, self._total, self.start, self._device = loader, total, start, device

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[PackedBatch]:
        batches = _with_known_deaths(iter(self._loader(self.start)))
        if self._device is None:
            return batches
        from eagle3.prefetch import prefetched

        return prefetched(batches, self._device)

    def state_dict(self) -> dict[str, int]:
        """Where this loader began; the data module's own state says how far training came."""
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to do: the data module makes a loader that begins at the right batch."""


def _with_known_deaths(batches: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
    """The same batches; StoreError when a reading process dies, with what it may have died of.

    torch names the shared memory only.
    """
    try:
        yield from batches
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise StoreError(
            f"trainer.num_workers: a process that reads batches died ({str(error).splitlines()[0]}): of SIGBUS when "
            "/dev/shm is full, of SIGKILL when memory runs out; make room, or try trainer.num_workers=0"
        ) from error


class _Batches(Dataset[PackedBatch]):
    def __init__(self, batch: Callable[[int], PackedBatch]) -> None:
        self._batch = batch

    def __getitem__(self, index: int) -> PackedBatch:
        return self._batch(index)


class PackedDataModule(LightningDataModule):
    """The training and validation batches of one rank.

    `plan` is known as soon as this exists, so that the schedule and the log can count steps before training starts.
    Samples that have no states (rejected by extraction) or no supervised slot are left out and counted in `skipped`.

    Raises RequestError when no sample of the train split has a supervised slot.
    """

    def __init__(
        self,
        prepared: Prepared,
        store: StatesStore,
        layer_ids: Sequence[int],
        in_draft_vocab: BoolArray | None,
        unroll_steps: int,
        mask_alignment: str,
        batch_tokens: int,
        epochs: int,
        max_steps: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.prepared, self.store = prepared, store
        self.layer_ids = tuple(layer_ids)
        self.in_draft_vocab, self.unroll_steps, self.mask_alignment = in_draft_vocab, unroll_steps, mask_alignment
        self.batch_tokens, self.accumulate = batch_tokens, accumulate
        self.rank, self.ranks = rank, ranks
        self.num_workers, self.pinned = num_workers, pin_memory
        self.skipped: dict[str, int] = {"no states": 0, "no supervised slot": 0}
        self.train_rows, self.supervised = self._usable(prepared.split_indices("train"))
        if not len(self.train_rows):
            raise RequestError(
                f"{prepared.folder}: found no supervised slot in {sum(self.skipped.values())} training samples "
                f"({self.skipped}), expected answers of at least two tokens; look at them with `eagle3 stage=inspect`"
            )
        self.validation_rows, _ = self._usable(prepared.split_indices("validation"))
        self.plan = Plan(
            prepared.lengths[self.train_rows], batch_tokens, ranks, seed, epochs, accumulate, max_steps=max_steps
        )
        own_batch = int((prepared.lengths[self.train_rows] > batch_tokens).sum())
        if own_batch:
            log.warning(
                "trainer.batch_tokens=%d: %d samples are longer (up to %d tokens) and get a batch of their own",
                *(batch_tokens, own_batch, int(prepared.lengths[self.train_rows].max())),
            )
        self.start = 0

    def _usable(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows that can be trained on, and their supervised slots at each step [N, steps]."""
        usable, supervised = [], []
        for row in rows.tolist():
            sample = self.prepared.samples[row]
            slots = supervised_slots(
                sample.input_ids, sample.loss_mask, self.unroll_steps, self.in_draft_vocab, self.mask_alignment
            )
            if sample.id not in self.store:
                self.skipped["no states"] += 1
            elif not slots.any():
                self.skipped["no supervised slot"] += 1
            else:
                usable.append(row)
                supervised.append(slots.sum(axis=1))
        return np.array(usable, dtype=np.int64), np.array(supervised, dtype=np.int64).reshape(-1, self.unroll_steps)

    def train_batch(self, index: int) -> PackedBatch:
        """Batch `index` of the whole run, on this rank."""
        rows = self.train_rows[self.plan.documents(index)[self.rank]]
        counts = self.supervised[self.plan.step_documents(index)].sum(axis=0)
        return self._pack(rows, counts)

    def validation_batches(self) -> list[np.ndarray]:
        """The rows of each fixed validation batch of this rank."""
        lengths = self.prepared.lengths[self.validation_rows]
        return [self.validation_rows[batch] for batch in plan_once(lengths, self.batch_tokens, self.ranks)[self.rank]]

    def _pack(self, rows: np.ndarray, counts: np.ndarray | None) -> PackedBatch:
        samples = [self.prepared.samples[row] for row in rows.tolist()]
        # A worker process has no GPU; what it sends is page-locked by the loader.
        pinned = self.pinned and torch.cuda.is_available() and get_worker_info() is None
        return assemble(
            [(sample.id, sample.input_ids, sample.loss_mask) for sample in samples],
            *self._read(samples, pinned),
            self.unroll_steps,
            self.in_draft_vocab,
            self.mask_alignment,
            counts,
            with_layout=self.pinned,
        )

    def _read(self, samples: Sequence[Sample], pinned: bool) -> tuple[Tensor, Tensor]:
        """The captured states [T, K, H] and the final states [T, H] of samples, one behind the other.

        A layer's rows lie together as in its file: nothing is copied but by the kernel, for each layer in a thread.
        """
        bounds = [0, *itertools.accumulate(len(sample.input_ids) for sample in samples)]
        layers, layout = [*self.layer_ids, self.store.final_id], self.store.layout
        shape = len(layers), bounds[-1], layout.hidden_size
        states = torch.empty(shape, dtype=layout.torch_dtype, pin_memory=pinned)

        def read(number: int) -> None:
            for sample, (start, stop) in zip(samples, itertools.pairwise(bounds), strict=True):
                self.store.read_into(states[number, start:stop], sample.id, layers[number])

        with ThreadPoolExecutor(len(layers), thread_name_prefix="eagle3-read") as pool:
            list(pool.map(read, range(len(layers))))
        return states[:-1].transpose(0, 1), states[-1]

    def setup(self, stage: str) -> None:
        """Training without a validation sample is said, and Lightning told not to look for any."""
        if not len(self.validation_rows) and self.trainer is not None:
            log.info("train: no validation samples: the drafter is that of the last step, not of the best")
            self.trainer.limit_val_batches = 0

    def train_dataloader(self) -> BatchLoader:
        """All batches from `start` on."""
        if self.start:
            place = self.plan.position(self.start)
            log.info(
                "train: going on at batch %d of %d (epoch %d, batch %d of %d)",
                *(self.start, self.plan.batches, place.epoch + 1, place.batch, place.batches),
            )

        def loader(start: int) -> DataLoader[PackedBatch]:
            return self._loader(_Batches(self.train_batch), range(start, self.plan.batches))

        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        return BatchLoader(loader, self.plan.batches, self.start, device if device.type == "cuda" else None)

    def val_dataloader(self) -> DataLoader[PackedBatch] | list[Any]:
        """The fixed validation batches; none when there is no validation sample."""
        batches = self.validation_batches()
        if not batches:
            return []
        return self._loader(_Batches(lambda index: self._pack(batches[index], None)), range(len(batches)), workers=0)

    def _loader(self, batches: _Batches, order: range, workers: int | None = None) -> DataLoader[PackedBatch]:
        return DataLoader(
            batches,
            batch_size=None,
            sampler=order,
            num_workers=self.num_workers if workers is None else workers,
            pin_memory=self.pinned,
            # Its own, or each new loader would draw from the global generator and a resumed run would differ.
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, int]:
        """How many batches of the plan training has used; checkpoints lie between optimizer steps."""
        assert self.trainer is not None
        return {"batches": min(self.trainer.global_step * self.accumulate, self.plan.batches)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on behind the batches that were used."""
        self.start = state_dict["batches"]
