"""The draft vocabulary: which target tokens a drafter can propose. Built once, stored with the drafter, never rebuilt.

`d2t[i] = target_id - i` with target ids ascending and `t2d` a mask over the target vocabulary, as EAGLE-3, vLLM and
SGLang read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import RequestError


@dataclass(frozen=True)
class VocabMap:
    """d2t int64 [D], t2d bool [V]; `tokenizer_hash` names the tokenizer whose ids these are.

    `padded` counts the ids that never occurred in the training text and only fill the map up to its size.
    """

    d2t: Tensor
    t2d: Tensor
    tokenizer_hash: str
    padded: int = 0

    @property
    def draft_vocab_size(self) -> int:
        """D."""
        return self.d2t.numel()

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.t2d.numel()

    @property
    def is_full(self) -> bool:
        """Whether the drafter knows every target token; then the map is the identity and is not exported."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def target_ids(self) -> Tensor:
        """int64 [D]: the target id of each draft id, ascending."""
        return self.d2t + torch.arange(self.draft_vocab_size)

    def coverage(self, counts: np.ndarray | Tensor) -> float:
        """The share of tokens inside the map, for counts [V] of tokens; 1.0 when nothing is counted.

        The text that the map was built from flatters it: what it covers of other text is what drafts will find.
        """
        counted = np.asarray(counts, dtype=np.int64)
        total = int(counted.sum())
        return float(counted[self.t2d.numpy()].sum()) / total if total else 1.0


def coverage_words(training: float, validation: float | None) -> str:
    """What a draft vocabulary covers of the answers that it was built from, and of those kept for validation."""
    words = f"{training:.2%} of the training answers' tokens"
    return words if validation is None else f"{words}, {validation:.2%} of the validation answers'"


def check_size(size: int | None, vocab_size: int, special_ids: Sequence[int] = ()) -> None:
    """Raises RequestError for a draft vocabulary that is empty, above the target's, or too small for special tokens."""
    if size is None:
        return
    least = max(1, len(set(special_ids)))
    if not least <= size <= vocab_size:
        why = f" ({least} of them special)" if special_ids else ""
        raise RequestError(
            f"drafter.draft_vocab_size: found {size}, expected {least} to {vocab_size} tokens{why}, or null for the "
            "target's whole vocabulary; see `eagle3 stage=vocab` for what each size covers"
        )


def build_vocab(
    counts: np.ndarray | Tensor, size: int | None, vocab_size: int, special_ids: Sequence[int], tokenizer_hash: str
) -> VocabMap:
    """The map of exactly `size` target ids: the special ones, then the most frequent of `counts` [V] (ties: lower id).

    When fewer tokens ever occurred, the lowest unused ids fill it up (low ids are a tokenizer's most common merges).
    A null or full size gives the identity. Raises RequestError for an impossible size.
    """
    check_size(size, vocab_size, special_ids)
    counted = np.asarray(counts, dtype=np.int64)
    if counted.shape != (vocab_size,):
        raise ValueError(f"counts: found shape {counted.shape}, expected ({vocab_size},)")
    if size is None or size == vocab_size:
        return VocabMap(
            torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool), tokenizer_hash
        )
    ranked = counted.copy()
    ranked[list(special_ids)] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-ranked, kind="stable")[:size])
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[chosen] = True
    return VocabMap(
        torch.from_numpy(chosen - np.arange(size)),
        torch.from_numpy(t2d),
        tokenizer_hash,
        int((ranked[chosen] == 0).sum()),
    )


def check_vocabulary_map(d2t: Tensor, t2d: Tensor, vocab_size: int, where: str) -> None:
    """Raises RequestError, naming `where`, unless `d2t` (int64 offsets [D]) and `t2d` (bool [V]) are one valid map."""
    draft_size = len(d2t)
    faults: list[str] = []
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        faults.append(f"types {d2t.dtype} and {t2d.dtype} instead of int64 and bool")
    if len(t2d) != vocab_size:
        faults.append(f"t2d of {len(t2d)} entries instead of the target's {vocab_size}")
    target_ids = torch.arange(draft_size) + d2t.cpu().long()
    outside = target_ids[(target_ids < 0) | (target_ids >= vocab_size)]
    if len(outside):
        faults.append(f"{len(outside)} target ids out of range, such as {int(outside[0])}")
    elif len(target_ids.unique()) != draft_size:
        faults.append(f"{draft_size - len(target_ids.unique())} repeated target ids")
    elif not faults and (int(t2d.sum()) != draft_size or not bool(t2d.cpu()[target_ids].all())):
        faults.append(f"a t2d that marks {int(t2d.sum())} ids, not the {draft_size} that d2t leads to")
    if not faults and draft_size < vocab_size and not d2t.any():
        faults.append(f"an all-zero d2t, which would map the drafts to the target's first {draft_size} ids")
    if faults:
        raise RequestError(
            f"{where}: the vocabulary map has {'; '.join(faults)}; expected every i + d2t[i] distinct, below "
            f"{vocab_size} and set in t2d; train the drafter again or choose another with inputs.drafter="
        )
