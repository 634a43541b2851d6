"""Step 1 of the walk, its second half: the target answers every prompt itself, and its ids become the samples.

A drafter serves one model, so it learns that model's own words. The user's turns are replayed one by one: first the
first turn of all conversations, then the second behind the answer to the first, and so on.

Nothing that the target wrote is ever tokenized again: a sample is the prompt's ids plus the generated ids, as a
server has them, and the mask marks the generated ones. The next turn's prompt is rendered from the answer's text, as
a client sends it. Where that render begins with the ids so far, the turns form one sample; where it does not (the
template drops reasoning, or the text tokenizes otherwise), the turn starts a sample of its own. An answer that the
length limit cut off has no end-of-turn token to learn: the one in the next turn's prompt was never generated.

Each batch of answers is appended to a journal. A batch's members follow from the prompts alone, so a run that was
killed asks the rest in the same batches and ends with the same bits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.encoding import decode
from eagle3.engines import Engine, Generation, Prompt
from eagle3.errors import EngineError
from eagle3.evaluation import loops
from eagle3.prompts import Conversation, Message
from eagle3.rendering import Template, Unrenderable
from eagle3.tokens import Tokens, prompt_ids

# Slots refill within a batch and drain at its end, so a batch is several times the slots; a kill costs one batch.
BATCH_PER_SLOT = 3


@dataclass(frozen=True)
class AnswerSettings:
    """How prompts are answered; lengths in tokens, `batch` in prompts, of which `engines` are asked at once."""

    max_length: int
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: Sequence[int]
    batch: int
    skip_long: bool = False
    engines: int = 1


@dataclass
class AnswerCount:
    """`shortened`: conversations that lost later turns, by reason; `cut`: answers that met their length limit.

    `tokens` were generated in `seconds` by this run, the journal's excluded.
    """

    shortened: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Dialogue:
    """One conversation while it is answered: the messages so far and the samples that they make."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.users = [message for message in conversation.messages if message.role == "user"]
        self.messages = [message for message in conversation.messages if message.role == "system"]
        self.turn = 0
        self.finished: list[Tokens] = []
        self.current: Tokens | None = None
        self.prompt_ids = np.empty(0, dtype=np.int32)
        self.problem: str | None = None

    @property
    def key(self) -> str:
        """Names the conversation and the turn that is asked; it also seeds the answer."""
        return f"{self.conversation.key}#{self.turn}"

    @property
    def open(self) -> bool:
        """Whether another turn is to be asked."""
        return self.problem is None and self.turn < len(self.users)

    @property
    def samples(self) -> list[Tokens]:
        """What the answered turns make."""
        return self.finished + ([self.current] if self.current else [])

    def ask(self, template: Template, settings: AnswerSettings) -> Prompt | None:
        """The prompt of the next turn; None, with `problem` set, when it cannot be asked."""
        self.messages.append(self.users[self.turn])
        try:
            ids = prompt_ids(template, self.messages)
        except Unrenderable as problem:
            self.problem = str(problem)
            return None
        room = settings.max_length - len(ids)
        if room < 1:
            self.problem = "a prompt longer than dataset.max_length"
            return None
        self.prompt_ids = np.asarray(ids, dtype=np.int32)
        return Prompt(self.key, ids, min(settings.max_new_tokens, room))

    def take(self, answer: Generation, template: Template) -> None:
        """Adds the answer to the samples, or sets `problem` when it teaches nothing."""
        words = answer.token_ids[:-1] if answer.finish == "stop" else answer.token_ids
        text = decode(template.tokenizer, words, skip_special_tokens=True)
        if not text.strip():
            self.problem = "an empty answer"
            return
        if answer.finish != "stop" and loops(answer.token_ids):
            self.problem = "a looping answer"
            return
        before = self.current
        known = 0 if before is None else len(before.input_ids)
        if before is not None and not np.array_equal(self.prompt_ids[:known], before.input_ids):
            self.finished.append(before)
            before, known = None, 0
        generated = np.asarray(answer.token_ids, dtype=np.int32)
        mask = [
            np.empty(0, dtype=bool) if before is None else before.loss_mask,
            np.zeros(len(self.prompt_ids) - known, dtype=bool),
            np.ones(len(generated), dtype=bool),
        ]
        self.current = Tokens(np.concatenate([self.prompt_ids, generated]), np.concatenate(mask))
        self.messages.append(Message("assistant", text))
        self.turn += 1


class Journal:
    """An append-only file of answered batches, one JSON line each; a torn last line is as if never written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        self._places: dict[str, int] = {}
        end = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    batch, _ = _parse(line)
                except (ValueError, KeyError, TypeError):
                    break
                self._places[batch] = end
                end += len(line)
        os.truncate(path, end)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, batch: str) -> bool:
        return batch in self._places

    def answers(self, batch: str) -> list[Generation]:
        """The answers of a batch that is there."""
        with self.path.open("rb") as file:
            file.seek(self._places[batch])
            return _parse(file.readline())[1]

    def append(self, batch: str, answers: Sequence[Generation]) -> None:
        """Writes a batch durably."""
        entry = {"batch": batch, "answers": [[a.key, a.token_ids, a.finish] for a in answers]}
        with self.path.open("ab") as file:
            self._places[batch] = file.tell()
            file.write(json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _parse(line: bytes) -> tuple[str, list[Generation]]:
    if not line.endswith(b"\n"):
        raise ValueError("a torn line")
    entry = json.loads(line)
    return entry["batch"], [Generation(*answer) for answer in entry["answers"]]


def regenerate(
    conversations: Sequence[Conversation],
    template: Template,
    engine: Callable[[], Engine],
    journal: Journal,
    settings: AnswerSettings,
    count: AnswerCount,
    advance: Callable[[float], None] = lambda _: None,
) -> Iterator[tuple[Conversation, list[Tokens] | str]]:
    """Answers each conversation's user turns; yields its samples, or the reason why there are none, in their order.

    `engine` is called at the first answer that the journal lacks; `advance` hears of every turn that is done with.
    """
    dialogues = [Dialogue(conversation) for conversation in conversations]
    while asked := [dialogue for dialogue in dialogues if dialogue.open]:
        prompts: dict[str, tuple[Dialogue, Prompt]] = {}
        for dialogue in asked:
            if prompt := dialogue.ask(template, settings):
                prompts[prompt.key] = (dialogue, prompt)
        # Of similar length, so that a batch ends at once; the order depends on nothing but the prompts.
        order = sorted(prompts, key=lambda key: (-len(prompts[key][1].input_ids), key))
        # Equal batches: a small last one would drain as long as a full one. They stay the same for more engines.
        number = math.ceil(len(order) / settings.batch)
        cuts = [i * len(order) // number for i in range(number + 1)] if order else []
        batches = [[prompts[key][1] for key in order[first:last]] for first, last in itertools.pairwise(cuts)]
        for i in range(0, len(batches), settings.engines):
            for answer in _answers(batches[i : i + settings.engines], engine, journal, settings, count, advance):
                count.cut += answer.finish != "stop"
                prompts[answer.key][0].take(answer, template)
        for dialogue in asked:
            if dialogue.problem:
                advance(len(dialogue.users) - dialogue.turn - (dialogue.key in prompts))
    for dialogue in dialogues:
        yield dialogue.conversation, _outcome(dialogue, settings, count)


def _outcome(dialogue: Dialogue, settings: AnswerSettings, count: AnswerCount) -> list[Tokens] | str:
    samples = dialogue.samples
    if not samples or (dialogue.problem and "max_length" in dialogue.problem and settings.skip_long):
        return dialogue.problem or "no user turn"
    if dialogue.problem:
        count.shortened[dialogue.problem] += 1
    return samples


def _answers(
    batches: Sequence[Sequence[Prompt]],
    engine: Callable[[], Engine],
    journal: Journal,
    settings: AnswerSettings,
    count: AnswerCount,
    advance: Callable[[float], None],
) -> Iterator[Generation]:
    """The answers of batches, in their order, out of the journal or asked now, all at once.

    EngineError unless all are there.
    """
    named = {_name(batch): batch for batch in batches}
    asked = {name: batch for name, batch in named.items() if name not in journal}
    advance(sum(map(len, batches)) - sum(map(len, asked.values())))
    if asked:
        target = engine()
        started = time.monotonic()
        prompts = [prompt for batch in asked.values() for prompt in batch]
        found: dict[str, Generation] = {}
        for answer in target.generate(
            prompts, temperature=settings.temperature, seed=settings.seed, stop_ids=settings.stop_ids
        ):
            found[answer.key] = Generation(answer.key, [int(i) for i in answer.token_ids], answer.finish)
            advance(1)
        if found.keys() != {prompt.key for prompt in prompts}:
            raise EngineError(
                f"engine: answered {len(found)} of {len(prompts)} prompts of a batch, first {prompts[0].key}, expected "
                "each once; run again: answered batches are kept"
            )
        count.seconds += time.monotonic() - started
        count.tokens += sum(len(answer.token_ids) for answer in found.values())
        for name, batch in asked.items():
            journal.append(name, [found[prompt.key] for prompt in batch])
    for name in named:
        yield from journal.answers(name)


def _name(batch: Sequence[Prompt]) -> str:
    """What stands for a batch: its keys, ids and limits."""
    content: list[Any] = [[prompt.key, list(prompt.input_ids), prompt.max_new_tokens] for prompt in batch]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
