"""Speculative decoding with a chain of drafts: the last step of the walk, where a drafter meets its target.

One sequence at a time, greedy. A round: the drafter proposes k tokens, the target reads them in one forward over its
key/value cache, the longest prefix that it would have written itself is kept, and its own next token is added. So the
text is the target's own, whoever drafts; only the number of rounds changes.

What a drafter sees is what serving shows it (vLLM's EAGLE proposer): slot t reads the embedding of token t+1 and the
target's states of token t at position t; the columns that it drafted are thrown away after each round and those of the
kept tokens are computed anew from the target's true states.

How rounds are counted is vLLM's way too (its scheduler counts before it looks for the end of the text): every round
counts in full, also the last one, whose drafts may reach past a stop token or past `max_new_tokens`; the tokens beyond
the end are cut from the text afterwards. The prefill's own token belongs to no round.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import DynamicCache

from eagle3.engines.packed_linear import pack_linears
from eagle3.engines.taps import StateTaps

if TYPE_CHECKING:
    from torch import Tensor, nn

    from eagle3.adapter import Adapter
    from eagle3.drafter import DraftCache, Eagle3Drafter


class Proposer(Protocol):
    """Whoever proposes drafts: the EAGLE-3 drafter, or a baseline."""

    def start(self) -> None:
        """Forgets the previous text."""
        ...

    def propose(self, text: Sequence[int], states: Tensor, k: int) -> list[int]:
        """k token ids to follow `text`; `states` [m, K*H] belong to the m tokens before its last one that are new."""
        ...


class Verifier(Protocol):
    """Whoever decides: the live target, or a recording of it."""

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, Tensor]:
        """Reads a prompt; returns the next token and the prompt's states [P, K*H]."""
        ...

    def verify(self, token_ids: Sequence[int]) -> tuple[list[int], Tensor]:
        """Reads further tokens; returns the next token after each of them and their states."""
        ...

    def keep(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        ...


@dataclass(frozen=True)
class Acceptance:
    """Counts of accepted drafts: `reached[i]`, i = 0..k, is the number of rounds that accepted at least i drafts."""

    reached: tuple[int, ...]

    @classmethod
    def of(cls, accepted: Iterable[int], k: int) -> Acceptance:
        """From the number of accepted drafts of each round."""
        counts = [0] * (k + 1)
        for number in accepted:
            counts[number] += 1
        return cls(tuple(sum(counts[i:]) for i in range(k + 1)))

    @property
    def rounds(self) -> int:
        """All rounds."""
        return self.reached[0]

    @property
    def accepted_drafts(self) -> float | None:
        """Mean accepted drafts per round; None when there was no round."""
        return sum(self.reached[1:]) / self.rounds if self.rounds else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per round: the accepted drafts and the target's own token."""
        return None if self.accepted_drafts is None else 1 + self.accepted_drafts

    @property
    def conditional(self) -> list[float | None]:
        """Position i's acceptance among the rounds in which all drafts before it were accepted."""
        pairs = zip(self.reached[1:], self.reached[:-1], strict=True)
        return [accepted / tried if tried else None for accepted, tried in pairs]

    @property
    def unconditional(self) -> list[float | None]:
        """Position i's acceptance among all rounds; their sum is `accepted_drafts`."""
        return [accepted / self.rounds if self.rounds else None for accepted in self.reached[1:]]


@dataclass(frozen=True)
class Decoded:
    """One decoded text.

    `token_ids` are the new tokens, the stop token included when `finish` is "stop" (else "length"). `accepted` holds
    each round's accepted drafts, of `k` proposed. `seconds` is wall time, prefill included.
    """

    token_ids: list[int]
    finish: str
    k: int
    accepted: tuple[int, ...]
    seconds: float

    @property
    def acceptance(self) -> Acceptance:
        """Its counts."""
        return Acceptance.of(self.accepted, self.k)


@torch.inference_mode()
def decode(
    target: Verifier,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    proposer: Proposer | None = None,
    k: int = 0,
) -> Decoded:
    """Continues a prompt greedily, with k drafts a round by `proposer`, or plainly (one token a round) without it.

    Stops after the first token of `stop_ids` or after `max_new_tokens`. Source: the verification of Leviathan et al.
    (arXiv 2211.17192) at temperature 0, as a chain.
    """
    started = time.perf_counter()
    text = list(prompt_ids)
    token, states = target.start(text)
    text.append(token)
    accepted: list[int] = []
    if proposer is not None:
        proposer.start()
    end = _end(text, len(prompt_ids), len(prompt_ids), stop_ids, max_new_tokens)
    while end is None:
        drafts = proposer.propose(text, states, k) if proposer is not None else []
        known = len(text)
        answers, states = target.verify([text[-1], *drafts])
        hits = 0
        while hits < len(drafts) and drafts[hits] == answers[hits]:
            hits += 1
        text.extend(answers[: hits + 1])
        if hits < len(drafts):
            target.keep(known + hits)
            states = states[: hits + 1]
        if proposer is not None:
            accepted.append(hits)
        end = _end(text, known, len(prompt_ids), stop_ids, max_new_tokens)
    seconds = time.perf_counter() - started
    finish = "stop" if text[end - 1] in stop_ids else "length"
    return Decoded(text[len(prompt_ids) : end], finish, k if proposer is not None else 0, tuple(accepted), seconds)


def _end(text: list[int], first_new: int, prompt: int, stop_ids: Collection[int], max_new_tokens: int) -> int | None:
    """The length at which the text ends, or None when it goes on; only the tokens from `first_new` on are new."""
    limit = prompt + max_new_tokens
    for i in range(first_new, min(len(text), limit)):
        if text[i] in stop_ids:
            return i + 1
    return limit if len(text) >= limit else None


class LiveTarget:
    """The target model itself, with its key/value cache and hooks that hand out the drafter's states."""

    def __init__(self, model: nn.Module, adapter: Adapter, layer_ids: Sequence[int]) -> None:
        """`model` is a Hugging Face causal language model in eval mode; `layer_ids` as in eagle3.layers."""
        self._model: Any = model
        self._taps = StateTaps(adapter.layers(model), adapter, layer_ids)
        self._layer_ids = tuple(layer_ids)
        self._cache = DynamicCache()
        self._device = next(model.parameters()).device
        # transformers 5.2x renamed the argument.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, Tensor]:
        # Without a config every layer of the cache is a plain growing one, which can be cropped; a sliding window is
        # then applied by the mask.
        self._cache = DynamicCache()
        answers, states = self._forward(prompt_ids, logits_to_keep=1)
        return answers[0], states

    def verify(self, token_ids: Sequence[int]) -> tuple[list[int], Tensor]:
        return self._forward(token_ids, logits_to_keep=0)

    def keep(self, length: int) -> None:
        # A negative number means "remove that many" in every version of transformers; a positive one changed meaning.
        self._cache.crop(length - self._cache.get_seq_length())

    def _forward(self, token_ids: Sequence[int], logits_to_keep: int) -> tuple[list[int], Tensor]:
        ids = torch.tensor([list(token_ids)], device=self._device)
        with self._taps as taps:
            cache = {self._cache_argument: self._cache, "use_cache": True}
            output = self._model(ids, **cache, logits_to_keep=logits_to_keep)
        states = torch.cat([taps[i][0] for i in self._layer_ids], dim=-1)
        return output.logits[0].argmax(-1).tolist(), states

    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [V] of the token after `token_ids`, in the model's dtype, from one forward without any cache."""
        ids = torch.tensor([list(token_ids)], device=self._device)
        return self._model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]


class Recorder:
    """Passes a plain decoding through and remembers it, so that further drafters need the target no more."""

    def __init__(self, target: Verifier) -> None:
        self._target = target
        self._text: list[int] = []
        self._states: list[Tensor] = []

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, Tensor]:
        token, states = self._target.start(prompt_ids)
        self._text, self._states = [*prompt_ids, token], [states]
        return token, states

    def verify(self, token_ids: Sequence[int]) -> tuple[list[int], Tensor]:
        answers, states = self._target.verify(token_ids)
        self._text.extend(answers)
        self._states.append(states)
        return answers, states

    def keep(self, length: int) -> None:
        raise NotImplementedError("a recording is made of a plain decoding, which throws nothing away")

    @torch.inference_mode()
    def recording(self, k: int) -> Recording:
        """The recorded text, and k tokens more that the target would write after it: the last round may reach them."""
        for _ in range(k):
            self.verify(self._text[-1:])
        return Recording(self._text, torch.cat(self._states))


class Recording:
    """A target that answers from what it wrote before: acceptance is the same, for the price of the drafter alone."""

    def __init__(self, text: Sequence[int], states: Tensor) -> None:
        """`states` [T, K*H] belong to the first T = len(text) - 1 tokens of `text`."""
        self._text = text
        self._states = states
        self._length = 0

    def to(self, device: torch.device) -> Recording:
        """The same with its states on another device."""
        return Recording(self._text, self._states.to(device))

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, Tensor]:
        self._length = len(prompt_ids)
        return self._text[self._length], self._states[: self._length]

    def verify(self, token_ids: Sequence[int]) -> tuple[list[int], Tensor]:
        first, self._length = self._length, self._length + len(token_ids)
        return list(self._text[first + 1 : self._length + 1]), self._states[first : self._length]

    def keep(self, length: int) -> None:
        self._length = length


def place(drafter: Eagle3Drafter, device: torch.device, dtype: torch.dtype) -> Eagle3Drafter:
    """Moves a drafter beside a target for decoding: eval mode, weights in `dtype`, packed on a CPU.

    The rotary tables stay as they are: a blunt `.to(dtype)` would round the frequencies, which a server keeps in
    float32.
    """
    drafter.to(device).eval()
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(dtype)
    if device.type == "cpu":
        pack_linears(drafter)
    return drafter


class DrafterChain:
    """The EAGLE-3 drafter as a proposer: one column for every known token, then k-1 columns of its own making."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self._drafter = drafter
        self._cache: DraftCache = drafter.new_cache()
        self._known = 0

    def start(self) -> None:
        self._cache.truncate(0)
        self._known = 0

    def propose(self, text: Sequence[int], states: Tensor, k: int) -> list[int]:
        drafter, device = self._drafter, states.device
        # What was drafted in the last round goes: its columns came from the drafter's own states.
        self._cache.truncate(self._known)
        first, self._known = self._known, self._known + len(states)
        ids = torch.tensor(text[first + 1 : self._known + 1], device=device)
        features = drafter.fuse(states)
        positions = torch.arange(first, self._known, device=device)
        drafts: list[int] = []
        while True:
            g, logits = drafter.extend(self._cache, ids, features, positions)
            draft = drafter.to_target(logits[-1:].argmax(-1))
            drafts.append(int(draft))
            if len(drafts) == k:
                return drafts
            ids, features, positions = draft, g[-1:], positions[-1:] + 1
