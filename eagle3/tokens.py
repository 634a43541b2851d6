"""Step 2 of the walk: Conversation → input_ids, loss_mask. One render, once; nothing downstream ever renders again.

`prepared` keeps what this module makes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.encoding import Straddled, decode, encode, encode_with_edges, same_text
from eagle3.errors import RequestError
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
