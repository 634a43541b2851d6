"""Step 2 of the walk, its end: samples are split, counted and written, and read back by all that comes after.

Arrays grow on disk while they are made and are mapped when they are read, so that a data set need not fit into memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np

from eagle3.errors import RequestError, StoreError
from eagle3.prompts import Conversation, Message
from eagle3.tokens import Sample, Tokens, sample_id

SPLITS = ("train", "validation")


def prompt_group(conversation: Conversation) -> bytes:
    """What stands for a conversation's first prompt, so that the same question never stands on two sides of a split."""
    first = next(message.content for message in conversation.messages if message.role == "user")
    return hashlib.sha256(" ".join(first.split()).casefold().encode()).digest()[:16]


class PreparedWriter:
    """Writes the files of a prepared artifact into a folder; samples of equal ids are written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids: dict[bytes, None] = {}
        self.lengths: list[int] = []
        self.keys: list[str] = []
        self.groups: list[bytes] = []
        self.supervised = 0
        self.validation_samples = 0
        self._input_ids = (folder / "input_ids.bin").open("wb")
        self._loss_mask = (folder / "loss_mask.bin").open("wb")

    def __enter__(self) -> PreparedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._input_ids.close()
        self._loss_mask.close()

    def add(self, tokens: Tokens, key: str, group: bytes) -> bool:
        """Writes one sample; False when one of the same ids is there already."""
        name = sample_id(tokens.input_ids).encode()
        if name in self.ids:
            return False
        self.ids[name] = None
        self.lengths.append(len(tokens.input_ids))
        self.keys.append(key)
        self.groups.append(group)
        self.supervised += int(tokens.loss_mask.sum())
        self._input_ids.write(tokens.input_ids.astype("<i4").tobytes())
        self._loss_mask.write(tokens.loss_mask.astype(bool).tobytes())
        return True

    def finish(self, validation_samples: int, seed: int, vocab_size: int, heldout: Sequence[Conversation]) -> None:
        """Splits the samples and writes the rest, with counts of the supervised tokens over V ids."""
        self._input_ids.flush()
        self._loss_mask.flush()
        offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64)
        validation = self._choose_validation(validation_samples, seed)
        self.validation_samples = int(validation.sum())
        counts = self._count(offsets, ~validation, vocab_size)
        np.save(self.folder / "offsets.npy", offsets)
        np.save(self.folder / "sample_ids.npy", np.array(list(self.ids), dtype="S16"))
        np.save(self.folder / "validation.npy", validation)
        np.save(self.folder / "token_counts.npy", counts)
        _write_lines(self.folder / "keys.txt", self.keys)
        rows = [dataclasses.asdict(conversation) for conversation in heldout]
        _write_lines(self.folder / "heldout.jsonl", [json.dumps(row, ensure_ascii=False) for row in rows])

    def _choose_validation(self, wanted: int, seed: int) -> np.ndarray:
        """bool [N]: whole groups, in the order of a hash, until `wanted` samples are chosen.

        The order does not depend on that of the samples, so that added data moves as few samples as possible.
        """
        salt = str(seed).encode()
        order = sorted(set(self.groups), key=lambda group: hashlib.sha256(salt + group).digest())
        sizes: dict[bytes, int] = {}
        for group in self.groups:
            sizes[group] = sizes.get(group, 0) + 1
        chosen: set[bytes] = set()
        count = 0
        for group in order:
            if count >= wanted:
                break
            chosen.add(group)
            count += sizes[group]
        return np.array([group in chosen for group in self.groups], dtype=bool)

    def _count(self, offsets: np.ndarray, train: np.ndarray, vocab_size: int) -> np.ndarray:
        counts = np.zeros(vocab_size, dtype=np.int64)
        total = int(offsets[-1])
        if not total:
            return counts
        input_ids = np.memmap(self.folder / "input_ids.bin", dtype="<i4", mode="r", shape=(total,))
        loss_mask = np.memmap(self.folder / "loss_mask.bin", dtype=bool, mode="r", shape=(total,))
        step = 4096
        for first in range(0, len(train), step):
            last = min(first + step, len(train))
            part = slice(offsets[first], offsets[last])
            kept = loss_mask[part] & np.repeat(train[first:last], np.diff(offsets[first : last + 1]))
            counts += np.bincount(input_ids[part][kept], minlength=vocab_size)
        return counts


class Prepared:
    """A prepared artifact: samples in their order, memory-mapped.

    `lengths` int64 [N]; `samples[i]` has views of the mapped arrays.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._offsets: np.ndarray = np.load(folder / "offsets.npy")
        self.lengths: np.ndarray = np.diff(self._offsets)
        if not len(self._offsets) or self._offsets[0] != 0 or (self.lengths <= 0).any():
            raise ValueError("offsets.npy does not ascend from 0")
        self._ids: np.ndarray = np.load(folder / "sample_ids.npy")
        self._validation: np.ndarray = np.load(folder / "validation.npy")
        self._keys = _lines(folder / "keys.txt")
        self._input_ids = _mapped(folder / "input_ids.bin", "<i4", int(self._offsets[-1]))
        self._loss_mask = _mapped(folder / "loss_mask.bin", "bool", int(self._offsets[-1]))
        self.samples: Sequence[Sample] = _Samples(self)

    @classmethod
    def open(cls, folder: Path) -> Prepared:
        """Opens a complete artifact. Raises StoreError, naming the file, for one that is not what it should be."""
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            prepared = cls(Path(folder), manifest)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            raise StoreError(
                f"{folder}: is no whole prepared artifact ({error}); delete the folder and run `eagle3 stage=prepare`"
            ) from error
        sizes = {len(prepared.lengths), len(prepared._ids), len(prepared._validation), len(prepared._keys)}
        if sizes != {manifest["metrics"]["samples"]}:
            raise StoreError(
                f"{folder}: its files hold {sorted(sizes)} samples, its manifest {manifest['metrics']['samples']}; "
                "delete the folder and run `eagle3 stage=prepare`"
            )
        return prepared

    @property
    def special_ids(self) -> list[int]:
        """Ids that every draft vocabulary holds."""
        return list(self.manifest["special_ids"])

    @property
    def vocab_size(self) -> int:
        """The target's V."""
        return int(self.manifest["vocab_size"])

    @property
    def tokenizer_hash(self) -> str:
        """Of the tokenizer that made the ids."""
        return str(self.manifest["tokenizer_hash"])

    def split_indices(self, split: str) -> np.ndarray:
        """int64: the rows of `samples` in "train" or "validation"."""
        if split not in SPLITS:
            raise RequestError(f"split: found {split!r}, expected {' or '.join(SPLITS)}")
        return np.flatnonzero(self._validation == (split == "validation"))

    def token_counts(self, split: str = "train") -> np.ndarray:
        """int64 [V]: how often each token is supervised in a split; those of "validation" are counted here."""
        if split == "train":
            return np.load(self.folder / "token_counts.npy")
        samples = [self.samples[row] for row in self.split_indices(split).tolist()]
        ids = [np.asarray(sample.input_ids)[np.asarray(sample.loss_mask)] for sample in samples]
        return np.bincount(np.concatenate([np.empty(0, dtype=np.int64), *ids]), minlength=self.vocab_size)

    def heldout(self) -> list[Conversation]:
        """The conversations whose prompts were never trained on."""
        rows = [json.loads(line) for line in _lines(self.folder / "heldout.jsonl")]
        return [
            Conversation(row["key"], tuple(Message(**m) for m in row["messages"]), row["source"], "heldout")
            for row in rows
        ]


class _Samples(Sequence[Sample]):
    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared

    def __len__(self) -> int:
        return len(self.prepared.lengths)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        data = self.prepared
        part = slice(data._offsets[row], data._offsets[row + 1])
        split = SPLITS[int(data._validation[row])]
        return Sample(data._ids[row].decode(), data._input_ids[part], data._loss_mask[part], split, data._keys[row])


def _lines(path: Path) -> list[str]:
    """Lines end with a line feed and nothing else: texts may hold Unicode's other line ends."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _mapped(path: Path, dtype: str, count: int) -> np.ndarray:
    expected = count * np.dtype(dtype).itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {expected}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
