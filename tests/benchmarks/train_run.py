"""Whole training runs on GPUs: states on disk, data module, Lightning, DrafterTraining, on one or several devices.

    python -m tests.benchmarks.train_run --out results.json --folder /tmp/states --variants plain muon
    python -m tests.benchmarks.train_run --out results.json --folder /tmp/states --devices 2 --strategy ddp

Says tokens/s of all ranks, time a part, memory and the losses of each variant of the recipe; with --synthetic also the
same step on a batch that lies on the GPU already, so that the ratio is what reading, copying and Lightning cost. The
states (random, as many bytes as real ones) are written once, at the first call. `deterministic` and runs on several
devices need a process of their own. `--accelerator cpu --shape tiny --tokens 256` shows that a command works.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.adapters.llama import LlamaAdapter
from eagle3.batches import PackedDataModule
from eagle3.checkpoint import TargetHead
from eagle3.config import Config, DrafterConfig, HardwareConfig, TrainerConfig
from eagle3.prepared import Prepared, PreparedWriter
from eagle3.shards import Layout, ShardWriter, shards_at
from eagle3.store import StatesStore
from eagle3.tokens import Sample, Tokens, sample_id
from eagle3.trainer import build_trainer, quiet_lightning
from eagle3.training import DrafterTraining
from tests.benchmarks.synthetic import Synthetic, build, turns
from tests.benchmarks.timing import time_steps
from tests.benchmarks.train_step import STEPS, Case, Ours

LAYERS, FINAL = (2, 16, 29), 32
# What each variant sets in the recipe.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint_activations": {"checkpoint_activations": True},
    "muon": {"optimizer": "muon"},
    "deterministic": {"deterministic": True},
    # Gradients travel between ranks in bf16: half the bytes, and no longer one GPU's sums.
    "bf16_gradients": {
        "lightning": {
            "_target_": "lightning.pytorch.Trainer",
            "strategy": {
                "_target_": "lightning.pytorch.strategies.DDPStrategy",
                "gradient_as_bucket_view": True,
                "ddp_comm_hook": {
                    "_target_": "hydra.utils.get_method",
                    "path": "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook",
                },
            },
        }
    },
}


def write_states(folder: Path, synthetic: Synthetic, documents: int, length: int, fraction: float) -> None:
    """A prepared artifact and a states store of random documents; what is there already stays."""
    if (folder / "done").is_file():
        return
    rng = np.random.default_rng(0)
    samples = []
    for number in range(documents):
        ids = synthetic.draft_ids[rng.integers(0, len(synthetic.draft_ids), length)].astype(np.int32)
        mask = np.zeros(length, dtype=bool)
        for start, stop in turns(length, fraction, 1):
            mask[start:stop] = True
        samples.append(Sample(sample_id(ids), ids, mask, "train", f"random:{number}"))
    prepared, states = folder / "prepared", folder / "states"
    prepared.mkdir(parents=True)
    with PreparedWriter(prepared) as writer:
        for sample in samples:
            writer.add(Tokens(sample.input_ids, sample.loss_mask), sample.key, sample.key.encode())
        writer.finish(0, 0, synthetic.drafter.shape.vocab_size, [])
    facts = {"special_ids": [], "stop_ids": [], "vocab_size": synthetic.drafter.shape.vocab_size}
    manifest = {"metrics": {"samples": documents}, "tokenizer_hash": "none", **facts}
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    hidden = synthetic.drafter.shape.target_hidden_size
    layers = [*LAYERS, FINAL]
    plan = shards_at([0], [length] * documents, [sample.id for sample in samples])[0]
    with ShardWriter(states, Layout(hidden, "bfloat16", FINAL), plan, layers) as shard:
        for sample in samples:
            device = synthetic.drafter.embedding.device
            random = torch.randn(len(layers), length, hidden, dtype=torch.bfloat16, device=device).cpu()
            shard.write(sample.id, dict(zip(layers, random, strict=True)))
        shard.close(samples, {"name": "none", "version": "0"})
    manifest = {"hidden_size": hidden, "dtype": "bfloat16", "final_id": FINAL, "layer_ids": layers}
    (states / "manifest.json").write_text(json.dumps({**manifest, "shards": [{"name": plan.name}]}))
    (folder / "done").touch()


def train(chosen: argparse.Namespace, variant: str, synthetic: Synthetic) -> list[dict[str, float]]:
    """Trains; returns what the log says, line by line."""
    folder, gpu = chosen.folder, chosen.accelerator == "gpu"
    tokens, devices = chosen.tokens, chosen.devices
    hardware = HardwareConfig(
        name="benchmark",
        accelerator=chosen.accelerator,
        devices=devices,
        training_strategy=chosen.strategy,
        precision="bf16-mixed" if gpu else "32-true",
    )
    trainer = TrainerConfig(
        name="benchmark",
        batch_tokens=tokens,
        max_steps=chosen.steps,
        log_every_steps=10,
        checkpoint_every_steps=chosen.steps + 1,
        **VARIANTS[variant],
    )
    cfg = Config(
        hardware=hardware, trainer=trainer, drafter=DrafterConfig(name="dense", losses={"soft_cross_entropy": 1.0})
    )
    drafter, teacher = synthetic.drafter, synthetic.teacher
    drafter.initialise(0)
    data = PackedDataModule(
        Prepared.open(folder / "prepared"),
        StatesStore.open(folder / "states"),
        LAYERS,
        drafter.t2d.cpu().numpy() if drafter.target_ids is not None else None,
        STEPS,
        "exact",
        tokens,
        epochs=chosen.steps,
        max_steps=chosen.steps,
        rank=int(os.environ.get("LOCAL_RANK", "0")),
        ranks=devices,
        pin_memory=gpu,
    )
    lines: list[dict[str, float]] = []
    weight = torch.empty_like(teacher.weight)  # back from the draft vocabulary's order
    ids = torch.arange(len(weight), device=weight.device)
    if teacher.draft_ids is not None:
        others = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
        others[teacher.draft_ids] = False
        ids = torch.cat((teacher.draft_ids, ids[others]))
    weight[ids] = teacher.weight
    head = TargetHead(LlamaAdapter(), torch.ones_like(weight[0]), weight, drafter.shape.rms_norm_eps)
    module = DrafterTraining(
        drafter, head, cfg.drafter, cfg.trainer, data.plan.steps, lambda _, metrics, __: lines.append(metrics)
    )
    with quiet_lightning(), tempfile.TemporaryDirectory() as run_folder:
        build_trainer(cfg, Path(run_folder), [], []).fit(module, datamodule=data)
    return lines


def main() -> None:
    """Reads the command line, runs, appends one result to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--fraction", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=["plain"])
    parser.add_argument("--synthetic", action="store_true", help="also time the step alone, on one device")
    chosen = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = chosen.accelerator == "gpu"
    if gpu:
        torch.cuda.set_device(rank)
    synthetic = build(chosen.shape, chosen.tokens, "cuda" if gpu else "cpu")
    write_states(chosen.folder, synthetic, chosen.documents, chosen.tokens, chosen.fraction)
    for variant in chosen.variants:
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        lines = train(chosen, variant, synthetic)
        if rank:
            return
        result = said(chosen, variant, lines)
        if chosen.synthetic:
            result |= alone(chosen, result["tokens_per_s"])
        with chosen.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


def said(chosen: argparse.Namespace, variant: str, lines: list[dict[str, float]]) -> dict[str, Any]:
    """The medians of a run's log, and all its losses."""
    settled = lines[2:]  # the first steps compile and fill the cache of pages

    def median(name: str) -> float:
        return round(statistics.median(line[name] for line in settled), 3)

    names = ["tokens_per_s", "supervised_rows_per_s", "mfu", "peak_memory_bytes"]
    names += [f"time/{part}_ms" for part in ("data", "forward", "backward", "optimizer")]
    return {
        **{name: getattr(chosen, name) for name in ("shape", "tokens", "steps", "devices", "strategy")},
        "variant": variant,
        "device": torch.cuda.get_device_name() if chosen.accelerator == "gpu" else "cpu",
        **{name: median(name) for name in names if name in lines[0]},
        "losses": [round(line["loss"], 5) for line in lines],
        "grad_norms": [round(line["grad_norm"], 5) for line in lines],
    }


def alone(chosen: argparse.Namespace, tokens_per_s: float) -> dict[str, Any]:
    """The same step on a batch on the GPU, and what of its speed the run keeps."""
    ours = Ours(Case(chosen.shape, [chosen.tokens], chosen.fraction))
    times = time_steps(ours.step, steps=15, warmup=3)
    ratio = tokens_per_s / (1e3 * chosen.tokens / times["unpaused_ms"])
    return {"synthetic": times, "ratio_to_synthetic": round(ratio, 3)}


if __name__ == "__main__":
    main()
