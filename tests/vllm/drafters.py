"""Drafters for tiny targets that accept some drafts and miss others: fitted to the target's own texts, then shaken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.blueprint import drafter_shape
from eagle3.checkpoint import Target
from eagle3.config import DrafterConfig
from eagle3.decoding import Acceptance, Decoded, DrafterChain, LiveTarget, Recorder, decode
from eagle3.drafter import Eagle3Drafter

PROMPTS = ([1, 40, 90, 17, 200, 31, 8, 120, 55], [1, 7, 9, 300, 22, 35], [5, 6, 7, 8, 100, 101, 102, 103, 104, 105])
NEW_TOKENS = 48
QUESTIONS = ["What is the capital of France?", "Write a story about a ship.", "one two three", "Who are you?"]


@dataclass
class Fitted:
    """A drafter with the Hugging Face target that it was fitted to."""

    drafter: Eagle3Drafter
    live: LiveTarget

    def decoded(self, drafter: Eagle3Drafter, k: int, stop_ids: Sequence[int] = ()) -> list[Decoded]:
        """Our decoder's texts and rounds for all prompts."""
        chain = DrafterChain(drafter)
        return [
            decode(self.live, ids, max_new_tokens=NEW_TOKENS, stop_ids=stop_ids, proposer=chain, k=k) for ids in PROMPTS
        ]


def acceptance(decoded: Sequence[Decoded], k: int) -> Acceptance:
    """The rounds of several texts together."""
    return Acceptance.of([accepted for text in decoded for accepted in text.accepted], k)


def fit(
    target: Target,
    layer_ids: tuple[int, ...],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    reduced: bool = True,
    steps: int = 120,
    shake: float = 0.35,
    **settings: Any,
) -> Fitted:
    """Teacher-forced on the target's greedy texts, with a crude second step; `settings` are DrafterConfig fields.

    A reduced vocabulary holds the texts' tokens and twenty more.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval().requires_grad_(False)
    live = LiveTarget(model, target.adapter, layer_ids)
    texts, states = zip(*(_recorded(live, ids) for ids in prompts), strict=True)
    vocab = target.shape.vocab_size
    used = sorted({token for text in texts for token in text})
    others = [token for token in range(vocab) if token not in used][:20]
    target_ids = torch.tensor(sorted(used + others)) if reduced else torch.arange(vocab)
    shape = drafter_shape(DrafterConfig(**settings), target, layer_ids, len(target_ids))
    drafter = Eagle3Drafter(shape, target.embedding().float())
    t2d = torch.zeros(vocab, dtype=torch.bool).index_fill(0, target_ids, True)
    drafter.set_vocabulary(target_ids - torch.arange(len(target_ids)), t2d)
    drafter.initialise(0)
    draft_ids = torch.full((vocab,), -100).index_put((target_ids,), torch.arange(len(target_ids)))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for text, known in zip(texts, states, strict=True):
            ids, n = torch.tensor(text), len(text) - 2
            features = drafter.fuse(known[:n])
            g, logits = drafter.extend(drafter.new_cache(), ids[1 : n + 1], features, torch.arange(n))
            loss = loss + torch.nn.functional.cross_entropy(logits, draft_ids[ids[2 : n + 2]])
            _, later = drafter.extend(drafter.new_cache(), ids[2 : n + 1], g[:-1], torch.arange(1, n))
            loss = loss + 0.5 * torch.nn.functional.cross_entropy(later, draft_ids[ids[3 : n + 2]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * shake)
    return Fitted(drafter.eval(), live)


def _recorded(live: LiveTarget, ids: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """A greedy text and the states along it."""
    recorder = Recorder(live)
    decode(recorder, ids, max_new_tokens=NEW_TOKENS, stop_ids=())
    recording = recorder.recording(3)
    return list(recording._text), recording._states.clone()


def write_prompts(path: Path, texts: Sequence[str]) -> Path:
    """A prompt set of one's own."""
    import json

    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path
