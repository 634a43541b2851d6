"""Step 2 of the walk: Conversation → input_ids, loss_mask. One render, once; nothing downstream ever renders again.

The ids are those that a server has for the same messages: the rendered text is tokenized whole, and the template alone
decides about a BOS. A special token spelled out in somebody's text therefore becomes that token, as it does in a
server; `prepare` counts such rows, and the mask does not change for it.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.errors import Eagle3Error, RequestError
from eagle3.prompts import Message
from eagle3.rendering import HistoryRewritten, Template, Unrenderable

if TYPE_CHECKING:
    from eagle3.adapter import Adapter

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
    input_ids, counts = _encode_with_edges(template, render.text, edges)
    loss_mask = np.zeros(len(input_ids), dtype=bool)
    for start, end in render.spans:
        first, last = counts[start], counts[end]
        loss_mask[first:last] = True
        if not _same(decode(template.tokenizer, input_ids[first:last]), render.text[start:end]):
            raise Unrenderable("an answer's tokens do not decode to the answer")
    if not loss_mask.any():
        raise Unrenderable("no token that the assistant generated")
    if loss_mask.all():
        raise Unrenderable("the mask covers the whole conversation")
    return Tokens(np.asarray(input_ids, dtype=np.int32), loss_mask)


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a rendered text, which brings its own special tokens."""
    return _flat(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer)


def decode(tokenizer: Any, input_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """The text of token ids, with nothing prettified."""
    options: dict[str, Any] = {} if tokenizer.is_fast else {"spaces_between_special_tokens": False}
    return tokenizer.decode(
        list(input_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False, **options
    )


def _encode_with_edges(template: Template, text: str, edges: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Token ids of a text and, for character positions in it, the number of tokens before each.

    Raises Unrenderable when a token crosses a position: a model that was given the text before it never writes that
    token.
    """
    tokenizer = template.tokenizer
    counts: dict[int, int] = {}
    if not tokenizer.is_fast:  # no offsets: the ids of the text up to an edge must begin the ids of the whole
        input_ids = encode(tokenizer, text)
        for edge in edges:
            prefix = encode(tokenizer, text[:edge]) if edge else []
            if input_ids[: len(prefix)] != prefix:
                raise Unrenderable("a token crosses the edge of an answer")
            counts[edge] = len(prefix)
        return input_ids, counts
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids = _flat(encoded["input_ids"], tokenizer)
    # A token begins where those before it ended: some tokenizers leave a leading space out of a token's offsets, and
    # the several tokens of one character all end with it.
    ends = np.maximum.accumulate([end for _, end in encoded["offset_mapping"]])
    special_ids = set(template.special_tokens.values())
    for edge in edges:
        count = int(np.searchsorted(ends, edge, side="right"))
        if edge and (count == 0 or ends[count - 1] != edge):
            # A special token may swallow the whitespace behind it; then it ends where its own text does.
            crossing = min(count, len(ends) - 1)
            if input_ids[crossing] not in special_ids or text[edge : ends[crossing]].strip():
                raise Unrenderable("a token crosses the edge of an answer")
            count += 1
        counts[edge] = count
    return input_ids, counts


def _flat(input_ids: Any, tokenizer: Any) -> list[int]:
    """A list of ints. Raises Eagle3Error for anything else: libraries have returned mappings and nested lists."""
    if not isinstance(input_ids, list) or not all(type(i) is int for i in input_ids):
        raise Eagle3Error(
            f"{type(tokenizer).__name__}: returned {type(input_ids).__name__} for one text, expected a flat list of "
            "ints; is this version of transformers supported? try the newest"
        )
    return input_ids


def _same(decoded: str, text: str) -> bool:
    """Equal but for Unicode composition and outer whitespace, which some tokenizers normalise."""
    return unicodedata.normalize("NFC", decoded).strip() == unicodedata.normalize("NFC", text).strip()


def prompt_ids(tokenizer: Any, adapter: Adapter, messages: Sequence[Message]) -> list[int]:
    """The ids that a server continues for these messages: their render with the generation prompt."""
    return template_prompt_ids(Template(tokenizer, adapter), messages)


def template_prompt_ids(template: Template, messages: Sequence[Message]) -> list[int]:
    """`prompt_ids` for a template at hand."""
    return encode(template.tokenizer, template.text(messages, generation_prompt=True))


def stop_ids(tokenizer: Any, adapter: Adapter) -> list[int]:
    """Ids that end an assistant turn: EOS, the family's turn ends, and the token that the template puts there."""
    template = Template(tokenizer, adapter)
    found = {tokenizer.eos_token_id} - {None}
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
