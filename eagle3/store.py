"""Reading the states store: a sample's hidden states by id (step 4 of the walk).

store = StatesStore.open(folder)                  # artifacts/states/<id>
store.verify(prepared)                            # never train on states of other token ids
states = store.read(sample_id, [2, 15, 27, store.final_id])      # {layer id: [T, H]}

Rows are read by plain calls, never through a memory map: to touch a page that a shortened file has lost, or that a
failing disk does not give, would kill the process (SIGBUS), where a call comes back with an error. Into memory that is
used again it is faster, too (`tests/benchmarks/training_input.py`).
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eagle3 import layers
from eagle3.errors import RequestError, StoreError
from eagle3.shard_index import INDEX_NAME, ShardIndex
from eagle3.shards import Layout, data_start, fill_rows

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.prepared import Prepared

MAX_OPEN_FILES = 64


class _LayerFile:
    """A layer file that is open for reading, until nobody refers to it any more; `start` is where its rows begin."""

    def __init__(self, path: Path) -> None:
        self.start = data_start(path)
        self.handle = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


class StatesStore:
    """A complete states artifact. Safe to hand to worker processes: open files are not part of its pickle."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.layout = Layout(manifest["hidden_size"], manifest["dtype"], manifest["final_id"])
        self.shards: list[str] = [shard["name"] for shard in manifest["shards"]]
        # Arrays, not a dict: memory should hardly grow with the number of samples.
        indexes = [
            (index.sample_ids, index.starts, index.lengths) for index in map(self.index, range(len(self.shards)))
        ]
        self._ids = np.array([sample_id for ids, _, _ in indexes for sample_id in ids], dtype=np.bytes_)
        self._order = np.argsort(self._ids, kind="stable")
        self._shards = np.repeat(np.arange(len(indexes)), [len(ids) for ids, _, _ in indexes])
        self._starts = np.concatenate([np.empty(0, np.int64), *(starts for _, starts, _ in indexes)])
        self.lengths: np.ndarray = np.concatenate([np.empty(0, np.int64), *(lengths for _, _, lengths in indexes)])
        """int64 [N]: tokens of each stored sample, in the order of `sample_ids`."""
        self._open: OrderedDict[Path, _LayerFile] = OrderedDict()

    @classmethod
    def open(cls, folder: Path) -> StatesStore:
        """Opens a states artifact's folder.

        Raises RequestError for a folder that is no complete states artifact, StoreError for a damaged one.
        """
        path = Path(folder) / "manifest.json"
        if not path.is_file():
            raise RequestError(
                f"{folder}: found no manifest.json, expected a complete states artifact; run `eagle3 stage=extract`"
            )
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            return cls(Path(folder), manifest)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path}: is no manifest of a states store ({type(error).__name__}: {error}); delete {folder} and run "
                "`eagle3 stage=extract`"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, sample_id: str) -> bool:
        return self._place(sample_id) is not None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """All stored layer ids, the final state's among them."""
        return tuple(self.manifest["layer_ids"])

    @property
    def final_id(self) -> int:
        """The id n of the final state: the last layer's output before the final norm."""
        return self.layout.final_id

    @property
    def sample_ids(self) -> list[str]:
        """The stored samples, in the order of the prepared set."""
        return [sample_id.decode() for sample_id in self._ids]

    def index(self, shard: int) -> ShardIndex:
        """One shard's index, read afresh."""
        return ShardIndex.read(self.folder / self.shards[shard] / INDEX_NAME)

    def read(self, sample_id: str, layer_ids: Sequence[int]) -> dict[int, Tensor]:
        """A sample's states [T, H] by layer id, in the store's dtype.

        RequestError for a sample or layer that is not stored, StoreError for a file that lost its rows.
        """
        shape = int(self.lengths[self._known(sample_id)]), self.layout.hidden_size
        states = {layer_id: torch.empty(shape, dtype=self.layout.torch_dtype) for layer_id in layer_ids}
        for layer_id, rows in states.items():
            self.read_into(rows, sample_id, layer_id)
        return states

    def read_into(self, rows: Tensor, sample_id: str, layer_id: int) -> None:
        """Reads a sample's state of one layer into `rows` [T, H], contiguous on the CPU, in the store's dtype.

        Errors as `read`; StoreError, too, when the sample has another number of rows.
        """
        place = self._known(sample_id)
        if layer_id not in self.manifest["layer_ids"]:
            raise RequestError(
                f"{self.folder}: holds layers {list(self.layer_ids)}, asked for {layer_id}; run "
                f"`eagle3 stage=extract {layers.override([layer_id])}` to add it"
            )
        if len(rows) != self.lengths[place]:
            raise StoreError(
                f"{self.folder}: sample {sample_id} has {self.lengths[place]} rows of states, expected its "
                f"{len(rows)} tokens; run `eagle3 stage=verify`"
            )
        path = self.folder / self.shards[self._shards[place]] / self.layout.file_name(layer_id)
        file = self._file(path)
        fill_rows(file.handle, path, file.start + int(self._starts[place]) * self.layout.row_bytes, rows)

    def verify(self, prepared: Prepared) -> None:
        """RequestError unless every prepared sample is stored with the same token ids, or known to be rejected.

        The message names the first sample that differs and the first differing position.
        """
        samples = prepared.samples
        accounted: set[str] = set()
        for number in range(len(self.shards)):
            index = self.index(number)
            accounted.update(index.rejected)
            for i, (sample_id, row) in enumerate(zip(index.sample_ids, index.rows, strict=True)):
                stored = index.input_ids[index.offsets[i] : index.offsets[i] + index.lengths[i]]
                expected = samples[row].input_ids if row < len(samples) else np.empty(0, np.int32)
                if not np.array_equal(stored, expected) or samples[row].id != sample_id:
                    raise RequestError(self._difference(sample_id, int(row), stored, expected))
                accounted.add(sample_id)
        missing = [sample.id for sample in samples if sample.id not in accounted]
        if missing:
            raise RequestError(
                f"{self.folder}: {len(missing)} of {len(samples)} prepared samples have no states here, first "
                f"{missing[0]}; these states were made from another prompt set: run `eagle3 stage=extract`"
            )

    def check_sizes(self, layer_ids: Sequence[int]) -> None:
        """StoreError, naming the first, when files of these layers are absent or have another size. Reads none."""
        faults: list[str] = []
        for shard in self.manifest["shards"]:
            for layer_id in layer_ids:
                path = self.folder / shard["name"] / self.layout.file_name(layer_id)
                expected = self.layout.shard_file_bytes(shard["name"], shard["samples"], shard["tokens"], layer_id)
                found = path.stat().st_size if path.is_file() else None
                if found != expected:
                    faults.append(f"{path}: " + ("is absent" if found is None else f"found {found} bytes"))
                    faults[-1] += f", expected {expected} bytes"
        if faults:
            raise StoreError(
                f"{faults[0]} ({len(faults)} of {len(self.shards) * len(layer_ids)} files are not whole); run "
                "`eagle3 stage=extract` with the same settings, which makes only these again"
            )

    def check_target(self, target: Target) -> None:
        """RequestError unless the states are this target's: same weights, tokenizer, template and quantization."""
        if differing := target.differences(self.manifest["target"]):
            raise RequestError(
                f"{self.folder}: these states were made by another target than model.path={target.model.path}: "
                f"{differing}; run `eagle3 stage=extract` with this model, or give the model they belong to"
            )

    def _place(self, sample_id: str) -> int | None:
        """The sample's number in `sample_ids`."""
        wanted = np.bytes_(sample_id)
        at = int(np.searchsorted(self._ids, wanted, sorter=self._order))
        return int(self._order[at]) if at < len(self._ids) and self._ids[self._order[at]] == wanted else None

    def _known(self, sample_id: str) -> int:
        place = self._place(sample_id)
        if place is None:
            raise RequestError(f"{self.folder}: sample {sample_id} is not in this store of {len(self)} samples")
        return place

    def _difference(self, sample_id: str, row: int, stored: np.ndarray, expected: np.ndarray) -> str:
        shared = min(len(stored), len(expected))
        differing = np.flatnonzero(stored[:shared] != expected[:shared])
        position = int(differing[0]) if len(differing) else shared
        values = [str(ids[position]) if position < len(ids) else "nothing" for ids in (stored, expected)]
        return (
            f"{self.folder}: sample {sample_id} (row {row} of the prepared set) was captured from other token ids: "
            f"first difference at position {position}, {values[0]} stored, {values[1]} prepared ({len(stored)} and "
            f"{len(expected)} tokens); the template, tokenizer or data changed: run `eagle3 stage=extract`"
        )

    def _file(self, path: Path) -> _LayerFile:
        """A layer file, open; few are kept so. Several threads may ask at once."""
        file = self._open.pop(path, None) or _LayerFile(path)
        self._open[path] = file
        if len(self._open) > MAX_OPEN_FILES:
            self._open.popitem(last=False)
        return file
