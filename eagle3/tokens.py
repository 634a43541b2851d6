"""Step 2 of the walk: Conversation → input_ids, loss_mask. One render, once; nothing downstream ever renders again.

`prepare` writes what this module makes; `Prepared` reads it back for extraction, training and evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from eagle3.encoding import Straddled, decode, encode, encode_with_edges, same_text
from eagle3.errors import RequestError, StoreError
from eagle3.prompts import Conversation, Message
from eagle3.rendering import HistoryRewritten, Template, Unrenderable

if TYPE_CHECKING:
    from eagle3.adapter import Adapter

SPLITS = ("train", "validation")
# A chat that shows a template's manners: lower and upper case, two turns, punctuation.
_PROBE = (
    Message("user", "Which of the oceans is the largest?"),
    Message("assistant", "The Pacific is the largest ocean."),
    Message("user", "And which one is the smallest?"),
    Message("assistant", "It is the Arctic Ocean, by far."),
)


@dataclass(frozen=True)
class Sample:
    """One prepared conversation: `input_ids` int32 [T], `loss_mask` bool [T] (true = the assistant generated it).

    `id` is a hash of the input_ids, `split` is "train" or "validation", `key` names the conversation it came from.
    """

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    split: str
    key: str


@dataclass(frozen=True)
class Tokens:
    """`input_ids` int32 [T] and `loss_mask` bool [T] of one render, or of a conversation cut to one turn."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


def sample_id(input_ids: np.ndarray) -> str:
    """16 hexadecimal digits that stand for these token ids."""
    return hashlib.sha256(np.asarray(input_ids, dtype="<i4").tobytes()).hexdigest()[:16]


def tokenize(template: Template, messages: Sequence[Message]) -> list[Tokens]:
    """Token ids and mask of a conversation with its answers: one item, or one a turn where history is rewritten.

    Raises Unrenderable, with a reason to count the conversation under, when the mask cannot be exact.
    """
    try:
        return [_tokens(template, messages, last_only=False)]
    except HistoryRewritten:
        turns = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
        return [_tokens(template, messages[: turn + 1], last_only=True) for turn in turns]


def _tokens(template: Template, messages: Sequence[Message], last_only: bool) -> Tokens:
    render = template.render(messages, last_only)
    edges = sorted({edge for span in render.spans for edge in span})
    try:
        input_ids, counts = encode_with_edges(
            template.tokenizer, render.text, edges, set(template.special_tokens.values())
        )
    except Straddled:
        raise Unrenderable("a token crosses the edge of an answer") from None
    loss_mask = np.zeros(len(input_ids), dtype=bool)
    for start, end in render.spans:
        first, last = counts[start], counts[end]
        loss_mask[first:last] = True
        if not same_text(decode(template.tokenizer, input_ids[first:last]), render.text[start:end]):
            raise Unrenderable("an answer's tokens do not decode to the answer")
    if not loss_mask.any():
        raise Unrenderable("no token that the assistant generated")
    if loss_mask.all():
        raise Unrenderable("the mask covers the whole conversation")
    return Tokens(np.asarray(input_ids, dtype=np.int32), loss_mask)


def prompt_ids(template: Template, messages: Sequence[Message]) -> list[int]:
    """The ids that a server continues for these messages: their render with the generation prompt."""
    return encode(template.tokenizer, template.text(messages, generation_prompt=True))


def stop_ids(tokenizer: Any, adapter: Adapter, eos_token_ids: Sequence[int] = ()) -> list[int]:
    """Ids that end an assistant turn: EOS, the family's turn ends, and the token that the template puts there.

    `eos_token_ids` are those that the checkpoint's configs name (`Target.shape`).
    """
    template = Template(tokenizer, adapter)
    found = {tokenizer.eos_token_id, *eos_token_ids} - {None}
    vocabulary = tokenizer.get_vocab()
    found |= {vocabulary[token] for token in adapter.turn_ends if token in vocabulary}
    last = next(token for token in reversed(_probe(template)) if token.loss_mask.any())
    ending = int(last.input_ids[last.loss_mask.nonzero()[0][-1]])
    if ending in template.special_tokens.values():
        found.add(ending)
    return sorted(found)


def special_ids(tokenizer: Any, adapter: Adapter) -> list[int]:
    """Ids that every draft vocabulary holds: stop ids, BOS, and the added tokens that the chat template writes."""
    template = Template(tokenizer, adapter)
    rendered = {int(i) for tokens in _probe(template) for i in tokens.input_ids}
    added = {
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if str(token.content).strip() and (str(token.content) in template.source or i in rendered)
    }
    return sorted({*stop_ids(tokenizer, adapter), *added, tokenizer.bos_token_id} - {None})


def check_template(template: Template, where: str) -> None:
    """Raises RequestError unless masks made with this template are exact, tried on a probe; `where` names it."""
    try:
        probe = _probe(template)
    except Unrenderable as problem:
        marked = (
            "has generation markers that miss the answers"
            if template.has_markers
            else ("has no {% generation %} markers, and the rule for templates without them cannot be verified")
        )
        raise RequestError(
            f"{where}: the chat template {marked}: {problem}; set model.chat_template=FILE to a template that encloses "
            "answers in {% generation %} and {% endgeneration %}, or give the model's adapter a method `answer_spans`"
        ) from problem
    first = probe[0].input_ids[:2].tolist()
    if len(first) == 2 and first[0] == first[1] == template.tokenizer.bos_token_id:
        raise RequestError(f"{where}: the chat template renders two BOS tokens, expected one; mend the template")


def _probe(template: Template) -> list[Tokens]:
    return tokenize(template, _PROBE)


class Prepared:
    """A prepared artifact: samples in their order, memory-mapped; written by eagle3.prepared.

    `lengths` int64 [N]; `samples[i]` has views of the mapped arrays.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._offsets: np.ndarray = np.load(folder / "offsets.npy")
        self.lengths: np.ndarray = np.diff(self._offsets)
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
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{folder}: is no complete prepared artifact ({error}); run `eagle3 stage=prepare`"
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

    def token_counts(self) -> np.ndarray:
        """int64 [V]: how often each token is supervised in the train split."""
        return np.load(self.folder / "token_counts.npy")

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
