"""Step 2 of the walk, its first half: messages → text by the chat template, and which characters of it were generated.

A template with `{% generation %}` markers says itself what the assistant generated. For any other template this rule
holds, whatever its markers look like: a server sends the render of the messages so far plus the generation prompt, so
what stands behind that prefix in the whole render was generated, up to the end-of-turn token behind the answer. The
rule is used only where it can be verified (the prefix is one, the answer is found whole, a special token or the turn's
end stands behind it); everything else is refused with a reason. No span is ever guessed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from eagle3.errors import RequestError
from eagle3.prompts import Message

if TYPE_CHECKING:
    from eagle3.adapter import Adapter

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A tag and its end with nothing between them, as `<think>\n\n</think>\n\n`, and a tag that a prompt leaves open.
_EMPTY_TAG = re.compile(r"<(\w+)>\s*</\1>|◁(\w+)▷\s*◁/\2▷")
_OPEN_TAG = re.compile(r"(?:<\w+>|◁\w+▷)\s*$")
_LONGEST_TAG = 64
_SPACE = re.compile(r"\s*")
# A character for private use, which no text brings along.
_MARK = "\ue000"


class Unrenderable(Exception):
    """A conversation that the template cannot express faithfully; the message is the reason to count it under."""


class HistoryRewritten(Unrenderable):
    """The template renders earlier turns differently once more follow (it drops their reasoning): split per turn."""


@dataclass(frozen=True)
class Render:
    """`text` of a whole conversation; `spans` are the character ranges that the assistant generated, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


class Template:
    """A tokenizer's chat template. `preserve_thinking` and `supervise_empty_thinking` as in the dataset's config."""

    def __init__(
        self,
        tokenizer: Any,
        adapter: Adapter,
        *,
        preserve_thinking: bool = False,
        supervise_empty_thinking: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.preserve_thinking = preserve_thinking
        self.supervise_empty_thinking = supervise_empty_thinking
        # Templates that can keep earlier reasoning read this variable; the others ignore it.
        self.variables = {"preserve_thinking": True} if preserve_thinking else {}
        try:
            self.source: str = tokenizer.get_chat_template()
        except ValueError:
            raise RequestError(
                f"model.chat_template: the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat "
                "template; set model.chat_template=FILE to a Jinja template"
            ) from None
        self.has_markers = _GENERATION.search(self.source) is not None

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text → id of the tokenizer's special tokens."""
        tokens = {str(t.content): i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        for token in self.tokenizer.all_special_tokens:
            tokens.setdefault(str(token), self.tokenizer.convert_tokens_to_ids(str(token)))
        return tokens

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def text(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """The render of the messages. Raises Unrenderable with the template's own words when it refuses them."""
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                _plain(messages), tokenize=False, add_generation_prompt=generation_prompt, **self.variables
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            words = " ".join(str(error).split())[:80] or type(error).__name__
            raise Unrenderable(f"the chat template refuses it: {words}") from error

    def render(self, messages: Sequence[Message], last_only: bool = False) -> Render:
        """One render of the whole conversation with the spans that the assistant generated, end-of-turn included.

        With `last_only` the spans are those of the last turn alone. Raises Unrenderable when they cannot be verified,
        HistoryRewritten when only renders that end with each turn can show what was generated.
        """
        text = self.text(messages)
        if self.preserve_thinking and not last_only and self._hides_thought(messages, range(len(messages) - 1)):
            raise HistoryRewritten("the chat template drops earlier reasoning")
        pieces = self.adapter.answer_spans(self, messages, text)
        if pieces is None:
            pieces = (
                self._marked(messages, text) if self.has_markers else self._behind_prompts(messages, text, last_only)
            )
        if last_only:
            history = _shared(text, self.text(messages[:-1]))
            pieces = [piece for piece in pieces if piece[0] >= history]
            messages = [message for message in messages[:-1] if message.role != "assistant"] + [messages[-1]]
        spans = tuple(self._trimmed(text, *piece) for piece in pieces)
        _verify(text, spans, messages)
        return Render(text, spans)

    def drops_reasoning(self, messages: Sequence[Message]) -> bool:
        """Whether the last answer comes with reasoning that the template leaves out of the render."""
        return messages[-1].reasoning is not None and self._hides_thought(messages, [len(messages) - 1])

    def spells_special_token(self, messages: Sequence[Message]) -> bool:
        """Whether a message's text holds a special token, which the tokenizer takes for one, as in a server."""
        return any(self._special_pattern.search(message.content) for message in messages)

    def _hides_thought(self, messages: Sequence[Message], turns: Iterable[int]) -> bool:
        """Whether the render lacks the reasoning of one of these turns. Told by a mark in each, since the words of one
        may stand elsewhere in the text, in another turn's reasoning or in an answer."""
        marked, marks = list(messages), []
        for turn in turns:
            if thought := _thought(messages[turn]):
                marks.append(f"{_MARK}{turn}{_MARK}")
                marked[turn] = _marked_thought(messages[turn], thought, marks[-1])
        text = self.text(marked) if marks else ""
        return not all(mark in text for mark in marks)

    def _marked(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """What the template's generation markers enclose."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, marked = cast(
            "tuple[list[str], list[list[tuple[int, int]]]]",
            render_jinja_template(
                conversations=[_plain(messages)],
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.variables},
            ),
        )
        if rendered[0] != text:
            raise Unrenderable("the tokenizer renders otherwise than its template, so the generation markers are moot")
        return [(start, end) for start, end in marked[0] if text[start:end].strip()]

    def _behind_prompts(self, messages: Sequence[Message], text: str, last_only: bool) -> list[tuple[int, int]]:
        """What stands behind the prompt that a server would have sent, for each assistant turn (or the last)."""
        turns = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
        return [self._behind_prompt(messages, turn, text) for turn in (turns[-1:] if last_only else turns)]

    def _behind_prompt(self, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
        prompt = self.text(messages[:turn], generation_prompt=True)
        opens_turn = not self.text(messages[:turn]).startswith(prompt)
        if not text.startswith(prompt):
            # A thinking model's prompt may open the reasoning that the render of this turn does not have.
            prompt = _OPEN_TAG.sub("", prompt)
        if not text.startswith(prompt):
            raise HistoryRewritten("the chat template rewrites earlier turns")
        start = len(prompt)
        found = self._answer_end(messages, turn, text, start)
        if found is None:
            alone = self.text(messages[: turn + 1])[start:]
            if any(spelling in alone for spelling in _spellings(messages[turn])):
                raise HistoryRewritten("the chat template rewrites earlier turns")
            raise Unrenderable("the chat template rewrites an answer")
        answer, end = found
        if not opens_turn and text[start:answer].strip():
            # Without a generation prompt, text before the answer may as well be the template's header.
            raise Unrenderable("the chat template has neither generation markers nor a generation prompt")
        return start, self._after_end_token(text, end)

    def _answer_end(self, messages: Sequence[Message], turn: int, text: str, start: int) -> tuple[int, int] | None:
        """Where a turn's answer begins and ends in `text` behind `start`; None when it is not there whole."""
        spellings = _spellings(messages[turn])
        # The turn reaches as far as a render that ends with it agrees, be it with or without its reasoning.
        for last in (messages[turn], Message("assistant", spellings[-1])):
            render = self.text([*messages[:turn], last])
            shared = _shared(text, render)
            turn_end = shared if shared == len(render) else -1
            for spelling in spellings:
                # The last whole occurrence: reasoning may quote the answer.
                found = text.rfind(spelling, start, shared)
                while found >= 0 and not self._ends(text, found + len(spelling), turn_end):
                    found = text.rfind(spelling, start, found + len(spelling) - 1)
                if found >= 0:
                    return found, found + len(spelling)
        for spelling in spellings:
            if text.startswith(spelling, start) and self._ends(text, start + len(spelling), -1):
                return start, start + len(spelling)
        return None

    def _ends(self, text: str, position: int, turn_end: int) -> bool:
        """Whether an answer can end here: a special token follows, or nothing more of the turn or of the text."""
        behind = _after_space(text, position)
        if behind >= len(text) or position <= turn_end <= behind:
            return True
        return self._special_pattern.match(text, behind) is not None

    def _after_end_token(self, text: str, position: int) -> int:
        """The end of the special token that follows (whitespace between allowed), else the position itself."""
        follower = self._special_pattern.match(text, _after_space(text, position))
        return follower.end() if follower else position

    def _trimmed(self, text: str, start: int, end: int) -> tuple[int, int]:
        """The piece from its first to its last generated character.

        The end-of-turn token belongs to it, also where the template puts it behind its markers; whitespace behind that
        token does not, nor does an empty think block at the start, which the template inserted.
        """
        specials = [special.end() for special in self._special_pattern.finditer(text, start, end)]
        ended = bool(specials) and not text[specials[-1] : end].strip()
        end = specials[-1] if ended else self._after_end_token(text, end)
        if not self.supervise_empty_thinking:
            start = self._after_inserted(text, start, end)
        return start, end

    def _after_inserted(self, text: str, start: int, end: int) -> int:
        for inserted in self.adapter.inserted_texts:
            if text.startswith(inserted, start):
                return start + len(inserted)
        # The prompt may have opened the tag, so the block can begin before the piece.
        for block in _EMPTY_TAG.finditer(text, max(0, start - _LONGEST_TAG), end):
            if block.start() <= _after_space(text, start) and block.end() > start:
                return _after_space(text, block.end())
        return start


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them; reasoning under each of the names in use."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            entry |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
        plain.append(entry)
    return plain


def _shared(text: str, other: str) -> int:
    """The length of what two texts begin with in common."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.startswith(other[low:middle], low) else (low, middle - 1)
    return low


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _thought(message: Message) -> str:
    """The reasoning of an assistant turn, given apart or inline before `</think>`."""
    if message.reasoning:
        return message.reasoning.strip()
    if message.role == "assistant" and "</think>" in message.content:
        # The prompt may have opened the tag.
        return message.content.rpartition("</think>")[0].rpartition("<think>")[2].strip()
    return ""


def _marked_thought(message: Message, thought: str, mark: str) -> Message:
    """The message with a mark at the end of its reasoning."""
    if message.reasoning:
        return dataclasses.replace(message, reasoning=thought + mark)
    before, tag, answer = message.content.rpartition("</think>")
    return dataclasses.replace(message, content=before.rstrip() + mark + tag + answer)


def _spellings(message: Message) -> list[str]:
    """How a template may write a content without changing it: as it is, stripped, or without inline reasoning."""
    content = message.content
    written = [content, content.strip()]
    if message.role == "assistant" and "</think>" in content:
        written.append(content.rpartition("</think>")[2].strip())
    return [text for text in dict.fromkeys(written) if text]


def _verify(text: str, spans: Sequence[tuple[int, int]], messages: Sequence[Message]) -> None:
    """Raises Unrenderable unless each answer lies inside a span, each other text outside, all in the given order."""
    cursor, next_span = 0, 0
    for message in messages:
        if message.role == "assistant":
            while True:
                if next_span == len(spans):
                    raise Unrenderable("the chat template rewrites an answer")
                start, end = spans[next_span]
                next_span += 1
                if any(text.find(answer, start, end) >= 0 for answer in _spellings(message)):
                    break
            cursor = end
            continue
        limit = spans[next_span][0] if next_span < len(spans) else len(text)
        begin = 0 if message.role == "system" else cursor
        places = [(text.find(content, begin, limit), len(content)) for content in _spellings(message)]
        found = next(((place, length) for place, length in places if place >= 0), None)
        if found is None and message.content.strip():
            raise Unrenderable(f"the chat template rewrites or drops a {message.role} turn")
        if found is not None and message.role == "user":
            cursor = sum(found)
