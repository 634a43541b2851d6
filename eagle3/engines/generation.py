"""Continuous decoding for the transformers engine: a fixed number of slots, refilled as sequences end.

Prompts go longest first, so that the slots hold sequences of similar length and the tail is short. What all prompts
share at their start (a template's header) is computed once. The rows in use stay dense, so that no step computes a row
that nobody reads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.engines import Generation, Prompt, attention_window
from eagle3.engines.cache import RowCache
from eagle3.engines.padding import length_batches, pad
from eagle3.errors import RequestError

if TYPE_CHECKING:
    from eagle3.engines.transformers import TransformersEngine

# Tokens for which each slot has memory on average; the longest sequences share the slots of several.
TOKENS_PER_SLOT = 512


@dataclass
class Continuation:
    """A prompt in a slot, its new tokens so far and its own stream of random numbers."""

    prompt: Prompt
    chance: random.Random
    token_ids: list[int] = field(default_factory=list)


class Generator:
    """Greedy or sampled continuations with one stop set.

    At a temperature each key has its own seeded stream, so that a continuation does not depend on what else is in the
    batch, but for the last bits of the arithmetic.
    """

    def __init__(self, engine: TransformersEngine, *, temperature: float, seed: int, stop_ids: Sequence[int]) -> None:
        self.engine, self.temperature, self.seed = engine, temperature, seed
        self.stop_ids = frozenset(stop_ids)

    @torch.no_grad()
    def run(self, prompts: Sequence[Prompt]) -> Iterator[Generation]:
        """Yields each prompt's continuation when it ends. RequestError for prompts that the model cannot continue."""
        self._check(prompts)
        yield from (Generation(prompt.key, [], "length") for prompt in prompts if prompt.max_new_tokens <= 0)
        waiting = deque(sorted((p for p in prompts if p.max_new_tokens > 0), key=_most_tokens, reverse=True))
        if not waiting:
            return
        slots = min(self.engine.hardware.generate_slots, len(waiting))
        capacity = max(_most_tokens(prompt) for prompt in waiting)
        # The row behind the last slot keeps the shared prefix.
        self.cache = RowCache(self.engine.target.shape.num_layers, slots + 1, capacity)
        self.prefix = 0
        self.prefix = self._fill_prefix(waiting, slots)
        live: list[Continuation] = []
        while waiting or live:
            # A few at a time: a prefill of one short prompt would use the machine badly.
            group = self._admit(waiting, live, slots) if slots - len(live) >= max(slots // 8, 1) else []
            if group:
                logits = self._prefill(group, len(live))
                first, live = len(live), live + group
            else:
                logits, first = self._step(live), 0
            for row, token in enumerate(self._choose(logits, live[first:]), first):
                live[row].token_ids.append(token)
            # From the back, so that the row which moves into a hole is one that goes on.
            for row in reversed(range(first, len(live))):
                if finish := self._finish(live[row]):
                    done, last = live[row], live.pop()
                    if row < len(live):
                        live[row] = last
                        self.cache.copy_columns(len(live), torch.tensor([row]), self._stored(last))
                    yield Generation(done.prompt.key, done.token_ids, finish)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        limit = attention_window(self.engine.target)
        for prompt in prompts:
            if not len(prompt.input_ids):
                raise RequestError(f"prompt {prompt.key}: found no token, expected at least one to continue")
            if _most_tokens(prompt) > limit:
                raise RequestError(
                    f"prompt {prompt.key}: {len(prompt.input_ids)} tokens and {prompt.max_new_tokens} new ones exceed "
                    f"the {limit} that the model attends to; lower dataset.max_length or dataset.max_new_tokens"
                )

    def _admit(self, waiting: deque[Prompt], live: Sequence[Continuation], slots: int) -> list[Continuation]:
        """Takes the next prompts for the free slots; fewer while sequences are long, so that memory stays bounded."""
        group: list[Continuation] = []
        tokens = sum(_most_tokens(continuation.prompt) for continuation in live)
        while waiting and len(live) + len(group) < slots:
            tokens += _most_tokens(waiting[0])
            if tokens > slots * TOKENS_PER_SLOT and (live or group):
                break
            prompt = waiting.popleft()
            group.append(Continuation(prompt, random.Random(f"{self.seed}:{prompt.key}")))
        return group

    def _fill_prefix(self, prompts: Sequence[Prompt], row: int) -> int:
        """Computes what all prompts share, each keeping at least one token of its own; returns its length."""
        if len(prompts) < 2:
            return 0
        first, *others = [list(prompt.input_ids[:-1]) for prompt in prompts]
        length = len(first)
        for ids in others:
            differing = (i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b)
            length = min(length, len(ids), next(differing, length))
        if length:
            self._forward(torch.as_tensor(first[:length])[None], torch.tensor([row]))
        return length

    def _prefill(self, group: Sequence[Continuation], first: int) -> Tensor:
        """Feeds new prompts into rows first, first+1, ...; returns the logits [len(group), V] behind each."""
        logits: list[Tensor] = []
        own = [continuation.prompt.input_ids[self.prefix :] for continuation in group]
        # Prompts come longest first, so batches of similar length are runs of the group.
        for batch in length_batches([len(ids) for ids in own], self.engine.hardware.batch_tokens):
            rows = first + torch.tensor(batch)
            if self.prefix:
                self.cache.copy_columns(self.cache.slots - 1, rows, self.prefix)
            hidden = self._forward(pad([own[i] for i in batch]), rows)
            ends = torch.tensor([len(own[i]) - 1 for i in batch])
            logits.append(self.engine.head(hidden[torch.arange(len(batch)), ends]))
        return torch.cat(logits)

    def _forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """Hidden states of new tokens [B, T] behind the prefix, causal among themselves."""
        width = self.prefix + input_ids.shape[1]
        columns = torch.arange(self.prefix, width)
        self.cache.point(rows, columns.expand_as(input_ids), width, dense=False)
        mask = additive(torch.arange(width) <= columns[:, None], self.engine.dtype)
        return self.engine.forward_cached(input_ids, mask[None, None], self.cache.cursor.positions, self.cache)

    def _step(self, live: Sequence[Continuation]) -> Tensor:
        """Feeds each live sequence its newest token; returns the next logits [live, V]."""
        newest = torch.tensor([[continuation.token_ids[-1]] for continuation in live])
        positions = torch.tensor([[self._stored(continuation)] for continuation in live])
        width = int(positions.max()) + 1
        self.cache.point(torch.arange(len(live)), positions, width, dense=True)
        mask = additive(torch.arange(width) <= positions, self.engine.dtype)
        return self.engine.head(self.engine.forward_cached(newest, mask[:, None, None], positions, self.cache)[:, 0])

    def _stored(self, continuation: Continuation) -> int:
        """Columns of a row in use: all tokens but the newest, which the next step feeds."""
        return len(continuation.prompt.input_ids) + len(continuation.token_ids) - 1

    def _choose(self, logits: Tensor, continuations: Sequence[Continuation]) -> list[int]:
        """The next token of each row: the most probable, or the one at a random point of the distribution."""
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        points = torch.tensor([[c.chance.random()] for c in continuations], dtype=torch.float64)
        heights = (logits.double() / self.temperature).softmax(-1).cumsum(-1).cpu()
        chosen = torch.searchsorted(heights, points * heights[:, -1:], right=True)
        return chosen.clamp_(max=logits.shape[-1] - 1)[:, 0].tolist()

    def _finish(self, continuation: Continuation) -> str | None:
        """Why a sequence has ended; None when it goes on."""
        if continuation.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(continuation.token_ids) >= continuation.prompt.max_new_tokens else None


def _most_tokens(prompt: Prompt) -> int:
    return len(prompt.input_ids) + prompt.max_new_tokens


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to attention scores: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
