"""Peers' EAGLE-3 training steps on the shapes of `synthetic`, each in a process of its own (`peer_process`).

Their own classes, unpatched: SpecForge's OnlineEagle3Model with its strategy and optimizer, speculators'
Eagle3DraftModel with its optimizer. Random states; documents are given by their lengths and supervised spans.
Needs `pip install --no-deps specforge==0.2.0 speculators==0.9.0` and what these import.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from tests.benchmarks.synthetic import SHAPES
from tests.benchmarks.timing import time_steps

Spans = Sequence[Sequence[tuple[int, int]]]


class Peer(Protocol):
    """A peer's model with its optimizer."""

    def load(self, lengths: Sequence[int], spans: Spans) -> None:
        """Takes documents of random tokens and states as the batch of the next steps."""
        ...

    def step(self) -> None:
        """A whole training step."""
        ...

    def gradients(self, exact: bool) -> dict[str, torch.Tensor]:
        """Gradients of the batch's loss, in the peer's own precision or in fp32."""
        ...


class SpecForge:
    """SpecForge 0.2.0 at its fastest: flex attention, full teacher. Documents are rows, padded to the longest."""

    def __init__(self, shape: str, longest: int, steps: int) -> None:
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from specforge.modeling.target.target_head import TargetHead
        from specforge.optimizer import BF16Optimizer
        from specforge.training.strategies.base import Eagle3TrainStrategy
        from transformers import LlamaConfig

        hidden, inter, heads, kv_heads, width, vocab, draft_vocab, theta = SHAPES[shape]
        self.hidden, self.vocab = hidden, vocab
        config: Any = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inter,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=width,
            num_hidden_layers=1,
            vocab_size=vocab,
            max_position_embeddings=max(longest, 2048),
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            pad_token_id=0,
        )
        config.rope_theta, config.draft_vocab_size, config.pretraining_tp = theta, draft_vocab, 1
        self.draft = LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
        if draft_vocab < vocab:
            kept = torch.randperm(vocab)[:draft_vocab].sort().values
            self.draft.t2d.zero_()
            self.draft.t2d[kept] = True
            self.draft.d2t.copy_(kept - torch.arange(draft_vocab))
        self.draft.freeze_embedding()
        self.draft = self.draft.to("cuda", torch.bfloat16)
        self.model = OnlineEagle3Model(draft_model=self.draft, length=steps, attention_backend="flex_attention")
        self.model = self.model.to("cuda")
        self.head = TargetHead.__new__(TargetHead)  # its constructor reads a checkpoint
        torch.nn.Module.__init__(self.head)
        self.head.fc = torch.nn.Linear(hidden, vocab, bias=False, device="cuda", dtype=torch.bfloat16)
        torch.nn.init.normal_(self.head.fc.weight, std=3 / math.sqrt(hidden))
        self.head.freeze_weights()
        self.head.config = types.SimpleNamespace(vocab_size=vocab)
        self.strategy = Eagle3TrainStrategy(self.model, target_head=self.head, compact_teacher=False)
        self.optimizer = BF16Optimizer(self.draft, lr=1e-4, total_steps=1000, warmup_ratio=0.0)

    def load(self, lengths: Sequence[int], spans: Spans) -> None:
        from specforge.runtime.contracts import TrainBatch

        size = (len(lengths), max(lengths))
        mask = torch.zeros(size, dtype=torch.long, device="cuda")
        present = torch.zeros_like(mask)
        for row, (length, supervised) in enumerate(zip(lengths, spans, strict=True)):
            for start, stop in supervised:
                mask[row, start : min(stop, length - 1)] = 1
            present[row, :length] = 1
        self.batch = TrainBatch(
            sample_ids=[str(row) for row in range(len(lengths))],
            strategy="eagle3",
            tensors={
                "input_ids": torch.randint(1, self.vocab, size, device="cuda"),
                "attention_mask": present,
                "loss_mask": mask,
                "target": torch.randn(*size, self.hidden, device="cuda", dtype=torch.bfloat16),
                "hidden_state": torch.randn(*size, 3 * self.hidden, device="cuda", dtype=torch.bfloat16),
            },
            metadata={"target_repr": "hidden_state"},
        )

    def step(self) -> None:
        self.strategy.forward_loss(self.batch).loss.backward()
        self.optimizer.step()

    def gradients(self, exact: bool) -> dict[str, torch.Tensor]:
        dtype = torch.float32 if exact else torch.bfloat16
        for module in (self.model, self.head):
            module.to(dtype)
        tensors = self.batch.tensors
        for name in ("target", "hidden_state"):
            tensors[name] = tensors[name].to(dtype)
        self.draft.zero_grad(set_to_none=True)
        self.strategy.forward_loss(self.batch).loss.backward()
        return _gradients(self.draft)


class Speculators:
    """speculators 0.9.0 at its fastest: compiled flex attention, eager loss. Documents are packed, the head frozen."""

    def __init__(self, shape: str, longest: int, steps: int) -> None:
        from safetensors.torch import save_file
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig
        from transformers import LlamaConfig

        hidden, inter, heads, kv_heads, width, vocab, draft_vocab, _ = SHAPES[shape]
        self.hidden, self.vocab = hidden, vocab

        def config(layers: int) -> Any:
            return LlamaConfig(
                vocab_size=vocab,
                hidden_size=hidden,
                intermediate_size=inter,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=width,
                max_position_embeddings=max(4096, longest),
                tie_word_embeddings=False,
            )

        folder = Path(tempfile.mkdtemp())
        target = config(8)
        target.architectures = ["LlamaForCausalLM"]
        target.save_pretrained(folder)
        weights = {
            "model.embed_tokens.weight": torch.randn(vocab, hidden, device="cuda") * 0.02,
            "lm_head.weight": torch.randn(vocab, hidden, device="cuda") * 3 / math.sqrt(hidden),
            "model.norm.weight": torch.ones(hidden),
        }
        save_file({name: weight.bfloat16().cpu() for name, weight in weights.items()}, folder / "model.safetensors")
        kept = torch.randperm(vocab)[:draft_vocab].sort().values
        inside = torch.zeros(vocab, dtype=torch.bool)
        inside[kept] = True
        layer = config(1)
        layer.layer_types, layer.sliding_window = ["full_attention"], None
        options = {
            "verifier_name_or_path": str(folder),
            "draft_vocab_size": draft_vocab,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "ttt_steps": steps,
            "ttt_step_loss_decay": 1.0,
            "draft_attn_impl": "simple_flex_attention",
            "loss_fn": "kl_div",
            "loss_implementation": "eager",
            "target_layer_ids": [2, 4, 5],
        }
        d2t = kept - torch.arange(draft_vocab)
        model = Eagle3DraftModel.from_training_args(verifier_config=layer, t2d=inside, d2t=d2t, **options)
        self.model: Any = model.to("cuda")
        self.arguments, _ = Eagle3DraftModel.get_trainer_kwargs(**options)
        settings = TrainerConfig(lr=1e-4, num_epochs=1, save_path=str(folder / "ck"), optimizer="adamw")
        self.optimizers = build_optimizers(self.model, settings)

    def load(self, lengths: Sequence[int], spans: Spans) -> None:
        tokens, starts = sum(lengths), [sum(lengths[:number]) for number in range(len(lengths))]
        mask = torch.zeros(tokens, dtype=torch.long)
        for first, supervised in zip(starts, spans, strict=True):
            for start, stop in supervised:
                mask[first + start : first + stop] = 1
        batch = {
            "hidden_states": torch.randn(1, tokens, 3 * self.hidden, dtype=torch.bfloat16),
            "input_ids": torch.randint(1, self.vocab, (1, tokens)),
            "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
            "loss_mask": mask[None],
            "position_ids": torch.cat([torch.arange(n) + 1 for n in lengths])[None],
            "verifier_last_hidden_states": torch.randn(1, tokens, self.hidden, dtype=torch.bfloat16),
        }
        self.batch = {name: tensor.cuda() for name, tensor in batch.items()}

    def step(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss, _ = self.model(**self.batch, **self.arguments)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def gradients(self, exact: bool) -> dict[str, torch.Tensor]:
        batch = {name: x.float() if exact and x.is_floating_point() else x for name, x in self.batch.items()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16())
        with contextlib.nullcontext() if exact else torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss, _ = self.model(**batch, **self.arguments)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        return _gradients(self.model)


def _gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}


PEERS = {"specforge": SpecForge, "speculators": Speculators}


def relative_errors(rounded: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Median and largest error of a weight's gradient, as a fraction of its norm."""
    errors = {name: float((rounded[name] - grad).norm() / grad.norm()) for name, grad in exact.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {"median": statistics.median(errors.values()), "largest": errors[worst], "of": worst}  # pyright: ignore


def main() -> None:
    """Reads a request from the command line; prints one line of JSON a batch.

    Before it times anything it compiles, says so with a line and waits for one: others may be timed meanwhile.
    """
    request = json.loads(sys.argv[1])
    torch.manual_seed(0)
    batches = request["batches"]
    longest = max(max(batch["lengths"]) for batch in batches)
    peer: Peer = PEERS[request["peer"]](request["shape"], longest, request["steps"])
    name = f"{request['peer']} {version(request['peer'])}"

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    if request["errors"]:
        torch.backends.cuda.matmul.allow_tf32 = False
        for batch in batches:
            torch.compiler.set_stance("default")
            peer.load(batch["lengths"], batch["spans"])
            rounded = peer.gradients(exact=False)
            torch.compiler.set_stance("force_eager")
            say({"case": batch["case"], "peer": name, **relative_errors(rounded, peer.gradients(exact=True))})
        return
    compiled = []
    for batch in batches:
        start = time.perf_counter()
        peer.load(batch["lengths"], batch["spans"])
        peer.step()
        torch.cuda.synchronize()
        compiled.append(time.perf_counter() - start)
    torch.cuda.empty_cache()
    say({"compiled": compiled})
    if not sys.stdin.readline():
        return
    for batch, first in zip(batches, compiled, strict=True):
        peer.load(batch["lengths"], batch["spans"])
        found = time_steps(peer.step, steps=8, warmup=3) | {"first_step_s": round(first, 2)}
        found["tokens_per_s"] = round(1e3 * sum(batch["lengths"]) / found["median_ms"], 1)
        say({"case": batch["case"], "peer": name, **found})


if __name__ == "__main__":
    main()
