"""One CPU training step, ours beside speculators', on the same shape and the same share of supervised rows.

    python -m tests.benchmarks.train_step_cpu --peer-python VENV/bin/python --peer-script peer_speculators_cpu.py

The peer script trains speculators' own model on synthetic data and prints a line `RESULT {...}` with `cpu_ms_median`;
it masks the first quarter of each document. Both run in this one call, in turn, on one thread each; a step is forward,
backward, clipping and AdamW. CPU time is compared, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from eagle3.batches import PackedBatch
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.loss import unroll_loss
from tests.drafters import Document, pack


class Head(nn.Module):
    """The target's norm and head."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6)
        return normed @ self.weight.T


def make_batch(options: argparse.Namespace, in_vocab: np.ndarray) -> PackedBatch:
    """Documents of random ids and states, all but their first quarter supervised."""
    rng = np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    length, documents = options.sample_len, []
    for number in range(options.seq // length):
        states = [torch.randn(length, options.hidden, generator=generator) for _ in range(4)]
        mask = np.arange(length) >= length // 4
        documents.append(Document(str(number), rng.integers(0, options.vocab, length), mask, states[:3], states[3]))
    return pack(documents, options.ttt, in_vocab, options.alignment)


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of CPU time a step."""
    torch.manual_seed(0)
    shape = DrafterShape(
        hidden_size=options.hidden,
        target_hidden_size=options.hidden,
        layer_ids=(2, 4, 5),
        vocab_size=options.vocab,
        draft_vocab_size=options.draft_vocab,
        intermediate_size=options.inter,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.hidden // options.heads,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=4096,
    )
    drafter = Eagle3Drafter(shape, torch.randn(options.vocab, options.hidden))
    drafter.initialise(0)
    target_ids = torch.arange(0, options.vocab, options.vocab // options.draft_vocab)
    t2d = torch.zeros(options.vocab, dtype=torch.bool)
    t2d[target_ids] = True
    drafter.set_vocabulary(target_ids - torch.arange(len(target_ids)), t2d)
    teacher = Head(torch.randn(options.vocab, options.hidden) * 0.2)
    batch = make_batch(options, t2d.numpy())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
    weights = 1.0 / batch.row_counts
    times = []
    for step in range(options.warmup + options.steps):
        started = time.process_time()
        hidden = drafter.unroll(batch.input_ids, batch.hidden_states, batch.position_ids, batch.slots, batch.blocks)
        result = unroll_loss(
            hidden,
            drafter.lm_head.weight,
            batch.final_states,
            teacher,
            batch.slots,
            weights,
            drafter.target_ids,
            drafter.t2d,
            oov="keep",
        )
        optimizer.zero_grad()
        result.loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if step >= options.warmup:
            times.append((time.process_time() - started) * 1e3)
    return {"cpu_ms_median": statistics.median(times), "rows": batch.row_counts.tolist(), "tokens": batch.tokens}


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """The peer script's own report."""
    names = ("hidden", "inter", "heads", "kv_heads", "vocab", "draft_vocab", "seq", "sample_len", "ttt", "warmup")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    with tempfile.TemporaryDirectory() as folder:
        command = [options.peer_python, options.peer_script, *words, "--threads", "1", "--work", f"{folder}/work"]
        command += ["--steps", str(options.warmup + options.steps)]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    return json.loads(next(line for line in out.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


def main() -> None:
    """Measures in turn, prints and optionally writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 256, "inter": 1024, "heads": 4, "kv-heads": 4, "vocab": 4096, "draft-vocab": 1024}
    sizes |= {"seq": 512, "sample-len": 128, "ttt": 3, "steps": 20, "warmup": 3, "rounds": 3}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--alignment", default="speculators", help="which rows are supervised; the peer's by default")
    parser.add_argument("--peer-python", help="the interpreter of an environment with speculators")
    parser.add_argument("--peer-script", help="the script that trains it")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mine, theirs = [], []
    for _ in range(options.rounds):
        mine.append(ours(options))
        if options.peer_python:
            theirs.append(peer(options))
    best = min(mine, key=lambda result: result["cpu_ms_median"])
    shown = {key: value for key, value in vars(options).items() if key not in ("peer_python", "peer_script", "json")}
    result: dict[str, Any] = {"setting": shown, "torch": torch.__version__, "ours": best}
    if theirs:
        result["speculators"] = min(theirs, key=lambda found: found["cpu_ms_median"])
        result["ratio"] = result["speculators"]["cpu_ms_median"] / best["cpu_ms_median"]
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
