"""Prompt sets to measure a drafter on: MT-bench, HumanEval, GSM8K, the dataset's held-out prompts, a file of yours.

Only the first user turn of each is asked, so that every prompt stands alone. Which prompts are taken depends on nothing
but their number: evenly spaced over the set, since benchmarks are sorted by category.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.adapter import Adapter
from eagle3.assets import PREFIX, cache_folder
from eagle3.config import Config, SourceConfig
from eagle3.engines import Prompt
from eagle3.errors import RequestError
from eagle3.prompts import Conversation, Message, read_source
from eagle3.rendering import Template
from eagle3.tokens import prompt_ids

log = logging.getLogger("eagle3")

HELDOUT = "heldout"
PACKAGED = ("mt_bench", "human_eval", "gsm8k")


@dataclass(frozen=True)
class PromptSet:
    """Prompts to decode."""

    name: str
    prompts: tuple[Conversation, ...]

    @property
    def digest(self) -> str:
        """Stands for their texts."""
        texts = [[(message.role, message.content) for message in prompt.messages] for prompt in self.prompts]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def prompt_sets(
    names: Sequence[str], count: int | None, cache: Path, heldout: Callable[[], Sequence[Conversation]]
) -> list[PromptSet]:
    """The sets of `evaluate.sets`, `count` prompts of each (None: all); `heldout` is called if its set is wanted.

    A dataset that holds nothing out has no such set, which is said; the others remain. Raises RequestError for an
    unknown name, a file without prompts, or a set that would be there twice.
    """
    sets = []
    for name in names:
        label, conversations = _read(name, cache, heldout)
        if name == HELDOUT and not conversations and {*names} != {HELDOUT}:
            log.warning(
                "evaluate.sets: no source of the dataset has role=%s, so that set is left out; give it prompts of your "
                "own to see what the drafter is worth there",
                HELDOUT,
            )
            continue
        if not conversations:
            raise RequestError(
                f"evaluate.sets: found no prompt in '{name}', expected some; correct the file, or for {HELDOUT} give "
                "the dataset a source with role=heldout"
            )
        if label in (known.name for known in sets):
            raise RequestError(f"evaluate.sets: found '{label}' twice in {list(names)}, expected distinct sets")
        taken = len(conversations) if count is None else min(count, len(conversations))
        chosen = [conversations[i * len(conversations) // taken] for i in range(taken)]
        sets.append(PromptSet(label, tuple(chosen)))
    return sets


def check_sets(cfg: Config) -> None:
    """RequestError when a prompt set that will be asked in the end cannot be had, for use before hours of work.

    Packaged sets are fetched here; held-out prompts are not there before stage prepare.
    """
    others = [name for name in cfg.evaluate.sets if name != HELDOUT]
    known = cfg.inputs.prepared is None
    held_out = [name for name, source in cfg.dataset.sources.items() if source.role == HELDOUT]
    if known and not held_out and not others:
        raise RequestError(
            f"evaluate.sets: found {cfg.evaluate.sets}, but no source of the dataset has role={HELDOUT}; add one "
            f"(+dataset.sources.asked.path=FILE +dataset.sources.asked.role={HELDOUT}) or try evaluate.sets=[mt_bench]"
        )
    prompt_sets(others, cfg.evaluate.prompts_per_set, cache_folder(cfg.cache_dir), lambda: ())


def token_prompts(
    prompts: PromptSet, tokenizer: Any, adapter: Adapter, max_new_tokens: int, longest: int
) -> list[Prompt]:
    """The set's prompts as token ids; those of more than `longest` tokens are left out with a warning."""
    template, found = Template(tokenizer, adapter), []
    for prompt in prompts.prompts:
        ids = prompt_ids(template, prompt.messages)
        if len(ids) <= longest:
            found.append(Prompt(prompt.key, ids, max_new_tokens))
        else:
            log.warning(
                "%s: prompt of %d tokens, more than the %d that leave room for evaluate.max_new_tokens=%d; skipped",
                *(prompt.key, len(ids), longest, max_new_tokens),
            )
    return found


def _read(name: str, cache: Path, heldout: Callable[[], Sequence[Conversation]]) -> tuple[str, list[Conversation]]:
    if name == HELDOUT:
        return name, [_first_turn(conversation) for conversation in heldout()]
    if name in PACKAGED:
        label, source = name, SourceConfig(path=f"{PREFIX}{name}", turns=1, role=HELDOUT)
    elif Path(name).expanduser().is_file():
        label, source = Path(name).stem, SourceConfig(path=name, turns=1, role=HELDOUT)
    else:
        raise RequestError(
            f"evaluate.sets: found '{name}', expected {HELDOUT}, one of {list(PACKAGED)}, or a file of prompts; "
            "try evaluate.sets=[heldout,mt_bench]"
        )
    return label, [_first_turn(conversation) for conversation in read_source(label, source, cache)]


def _first_turn(conversation: Conversation) -> Conversation:
    """Without the answer that the data may have."""
    asked: list[Message] = []
    for message in conversation.messages:
        if message.role == "assistant":
            break
        asked.append(message)
    return Conversation(conversation.key, tuple(asked), conversation.source, conversation.role)
