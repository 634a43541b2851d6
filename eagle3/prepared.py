"""Step 2 of the walk, its end: samples are split, counted and written; `tokens.Prepared` reads them.

Arrays grow on disk while they are made, so that a data set need not fit into memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from eagle3.prompts import Conversation
from eagle3.tokens import Tokens, sample_id


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


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
