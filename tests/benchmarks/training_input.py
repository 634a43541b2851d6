"""What reading costs a training run: packed batches out of a store, beside the same through memory maps.

    python -m tests.benchmarks.training_input --folder /tmp/states

One process, files in the system's cache, no training: tokens/s of `PackedDataModule.train_batch` over an epoch, and of
a reader that copies from maps (which a file that is cut short kills), in turn; medians of the rounds, by CPU time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.batches import PackedDataModule
from eagle3.prepared import Prepared
from eagle3.shards import Layout, ShardWriter, data_start, shards_at
from eagle3.store import StatesStore
from eagle3.tokens import Sample
from tests.conftest import random_samples, write_prepared

LAYERS, FINAL = (2, 16, 29), 32


class Mapped(PackedDataModule):
    """The same batches, their states copied from memory maps of the layer files."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.maps: dict[Path, tuple[mmap.mmap, int]] = {}

    def _read(self, samples: Sequence[Sample], pinned: bool) -> tuple[Tensor, Tensor]:
        width, lengths = self.store.layout.hidden_size, [len(sample.input_ids) for sample in samples]
        hidden_states = torch.empty(sum(lengths), len(self.layer_ids), width, dtype=self.store.layout.torch_dtype)
        final_states = torch.empty(sum(lengths), width, dtype=self.store.layout.torch_dtype)
        start = 0
        for sample, length in zip(samples, lengths, strict=True):
            stop = start + length
            final_states[start:stop] = self._rows(sample.id, self.store.final_id, length)
            for number, layer_id in enumerate(self.layer_ids):
                hidden_states[start:stop, number].copy_(self._rows(sample.id, layer_id, length))
            start = stop
        return hidden_states, final_states

    def _rows(self, sample_id: str, layer_id: int, length: int) -> Tensor:
        place, layout = self.store._known(sample_id), self.store.layout
        path = self.store.folder / self.store.shards[self.store._shards[place]] / layout.file_name(layer_id)
        if path not in self.maps:
            with path.open("rb") as file:
                self.maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), data_start(path)
        source, first = self.maps[path]
        offset = first + int(self.store._starts[place]) * layout.row_bytes
        count = length * layout.hidden_size
        return torch.frombuffer(source, dtype=layout.torch_dtype, count=count, offset=offset).view(length, -1)


def write_states(folder: Path, samples: Sequence[Sample], hidden_size: int) -> StatesStore:
    """A store of random states, one shard."""
    plan = shards_at([0], [len(sample.input_ids) for sample in samples], [sample.id for sample in samples])[0]
    layers, generator = [*LAYERS, FINAL], torch.Generator().manual_seed(0)
    with ShardWriter(folder, Layout(hidden_size, "bfloat16", FINAL), plan, layers) as shard:
        for sample in samples:
            shape = (len(layers), len(sample.input_ids), hidden_size)
            states = torch.randint(-9, 9, shape, generator=generator, dtype=torch.int8).bfloat16()
            shard.write(sample.id, dict(zip(layers, states, strict=True)))
        shard.close(samples, {"name": "none", "version": "0"})
    manifest = {"hidden_size": hidden_size, "dtype": "bfloat16", "final_id": FINAL, "layer_ids": layers}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "shards": [{"name": plan.name}]}))
    return StatesStore.open(folder)


def epoch_seconds(data: PackedDataModule) -> float:
    """CPU time of all batches: with the files in the cache and one thread it is the wall time of an idle machine."""
    started = time.process_time()
    for number in range(data.plan.batches):
        data.train_batch(number)
    return time.process_time() - started


def main() -> None:
    """Prints tokens/s of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--length", type=int, default=700)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        samples = random_samples([chosen.length + 5 * number for number in range(chosen.documents)])
        prepared = Prepared.open(write_prepared(Path(name) / "prepared", samples))
        store = write_states(Path(name) / "states", samples, chosen.hidden)
        readers = {
            kind.__name__: kind(prepared, store, LAYERS, None, 7, "exact", chosen.batch_tokens, 1)
            for kind in (PackedDataModule, Mapped)
        }
        times: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(chosen.rounds + 1):
            for name, data in readers.items():
                times[name].append(epoch_seconds(data))
        tokens = int(prepared.lengths.sum())
        for name, found in times.items():
            print(f"{name:16s} {tokens / statistics.median(found[1:]):10,.0f} tokens/s")


if __name__ == "__main__":
    main()
