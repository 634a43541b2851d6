"""Capture against plain prefill in vLLM, in one run: python -m tests.benchmarks.capture_vllm SHAPE ... [options]

The baseline is the same engine (same batches, prompts of the same lengths) without capture, compiled and with CUDA
graphs unless --eager-baseline; both stay loaded and are measured in turn. With --one-by-one the capturing engine has
the cards to itself, then the baseline has. The capturing engine's own plain prefill, which is eager, is measured too.
Ours is the product's own path: hooks, pinned ring, files, checksums, index, rename, in --folder.
Weights are random (`load_format=dummy`); shapes: llama8b, tiny, kimiN (Kimi-K2.5's width, INT4 experts, N of 61
layers). Prints a JSON object for each shape; with --out they are also written into that folder.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.capture import Capture, Tally
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config, HardwareConfig, ModelConfig
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_process import EngineProcess
from eagle3.engines.vllm_settings import engine_arguments, engine_environment
from eagle3.shards import Layout, plan_shards
from eagle3.streaming import stream
from eagle3.tokens import Sample
from tests.vllm.hollow import DEEPSEEK_SIZES, ends, write_hollow

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
TINY = {**LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
TINY = {**TINY, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "dtype": "float32"}

# Two engines on one card: each takes a fixed part for keys and values, enough for three batches, instead of the rest.
BESIDE_EACH_OTHER = {
    "disable_custom_all_reduce": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 8_000_000_000,
}
ALONE = {**BESIDE_EACH_OTHER, "gpu_memory_utilization": 0.95, "kv_cache_memory_bytes": 4_000_000_000}
COMPILED, EAGER = "compiled, CUDA graphs", "eager"


def make_target(shape: str, cfg: Config, folder: Path) -> Target:
    """A checkpoint of the shape without data, opened."""
    adapter = "llama.LlamaAdapter"
    if shape.startswith("kimi"):
        adapter = "deepseek_v3.DeepseekV3Adapter"
        config = {**DEEPSEEK_SIZES, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        config.update(num_hidden_layers=int(shape[4:]), max_position_embeddings=8192, rope_scaling=None)
    else:
        config = {"llama8b": LLAMA, "tiny": TINY}[shape]
    write_hollow(folder, config, ends("", config["vocab_size"], config["hidden_size"]), shard_bytes=1e12)
    cfg.model = ModelConfig(name=shape, path=str(folder), adapter={"_target_": f"eagle3.adapters.{adapter}"})
    return open_target(cfg)


def make_samples(lengths: list[int], vocab_size: int, seed: int) -> list[Sample]:
    """Random documents; `seed` makes them others than those of another call."""
    random = np.random.default_rng(seed)
    ids = [random.integers(10, vocab_size - 10, length).astype(np.int32) for length in lengths]
    return [Sample(f"{seed}-{i}", row, np.ones(len(row), dtype=bool), "train", str(i)) for i, row in enumerate(ids)]


def mixed_lengths(tokens: int) -> list[int]:
    """Lengths of 128 to 4096, evenly spread over the logarithm, shuffled."""
    random, lengths = np.random.default_rng(5), []
    while sum(lengths) < tokens:
        lengths.append(int(2 ** random.uniform(7, 12)))
    return lengths


def plain(process: EngineProcess, samples: list[Sample]) -> float:
    """Seconds that the engine takes to prefill the samples, everything queued at once."""
    sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    requests = [(f"{sample.id}-{time.time_ns()}", sample.input_ids.tolist(), sampling) for sample in samples]
    started, left = time.perf_counter(), {request_id for request_id, _, _ in requests}
    process.submit(requests)
    while left:
        left.difference_update(request_id for request_id, _, _ in process.finished(1.0))
    return time.perf_counter() - started


def captured(engine: VllmEngine, samples: list[Sample], ids: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Seconds and report of a capture into `folder`, checked afterwards and removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = engine.target.shape
    layout = Layout(shape.hidden_size, "bfloat16", shape.num_layers)
    lengths = [len(sample.input_ids) for sample in samples]
    plans = plan_shards(
        lengths, [sample.id for sample in samples], len(ids) * layout.row_bytes, 1_500_000_000, None, 60.0
    )
    capture = Capture(folder, layout, tuple(plans), ids, shape.max_position_embeddings)
    tally = Tally(Counter(), 0, lambda n: None)
    started = time.perf_counter()
    stream(capture, engine, samples, {plan.number: list(ids) for plan in plans}, tally)
    seconds = time.perf_counter() - started
    assert tally.count.tokens == sum(lengths)
    assert not capture.missing()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    ranks = [
        {k: round(v, 3) if isinstance(v, float) else v for k, v in rank.items() if k not in ("finished", "failure")}
        for rank in engine.last_capture["ranks"]
    ]
    parts = {name: round(engine.last_capture[name], 3) for name in ("seconds", "arm_seconds", "tail_seconds")}
    return {"seconds": seconds, "bytes": size, "shards": len(plans), "engine": parts, "ranks": ranks}


def write_rate(folder: Path, gigabytes: float, flags: int) -> float:
    """Bytes per second of a plain sequential write with fsync at the end; `flags` of `open`, as O_DIRECT."""
    folder.mkdir(parents=True, exist_ok=True)
    # Memory of whole pages, as O_DIRECT wants it.
    block, path = mmap.mmap(-1, 16 << 20), folder / "plain.bin"
    block.write(os.urandom(len(block)))
    started = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    for _ in range(int(gigabytes * 1e9 / len(block))):
        os.write(file, block)
    os.fsync(file)
    os.close(file)
    rate = path.stat().st_size / (time.perf_counter() - started)
    path.unlink()
    return rate


@dataclass
class Measured:
    """What one set of prompts took: seconds of plain prefill by baseline, and the captures."""

    lengths: list[int]
    plain: dict[str, list[float]]
    captures: list[dict[str, Any]]

    def row(self) -> dict[str, Any]:
        """Rates and ratios by baseline, the fastest run of each counts."""
        tokens, best = sum(self.lengths), min(self.captures, key=lambda run: run["seconds"])
        return {
            "tokens": tokens,
            "plain_tokens_per_s": {name: round(tokens / min(seconds)) for name, seconds in self.plain.items()},
            "tokens_per_s": round(tokens / best["seconds"]),
            "ratio": {name: round(min(seconds) / best["seconds"], 4) for name, seconds in self.plain.items()},
            "bytes_per_s": round(best["bytes"] / best["seconds"]),
            "all_plain_seconds": {name: [round(s, 3) for s in seconds] for name, seconds in self.plain.items()},
            "all_seconds": [round(run["seconds"], 3) for run in self.captures],
            "report": best,
        }


def measure_disk(
    lengths: list[int], vocab: int, plain_tokens_per_s: float, engine: VllmEngine, ids: tuple[int, ...], folder: Path
) -> dict[str, Any]:
    """Capture into a folder on a disk, against what bounds it: the disk's own faster rate, or plain prefill."""
    rates = {"buffered": write_rate(folder, 3.0, 0), "direct": write_rate(folder, 3.0, os.O_DIRECT)}
    run = captured(engine, make_samples(lengths, vocab, 1001), ids, folder / "states")
    reached, prefill = run["bytes"] / run["seconds"], plain_tokens_per_s * run["bytes"] / sum(lengths)
    return {
        "plain_write_bytes_per_s": {name: round(rate) for name, rate in rates.items()},
        "plain_prefill_bytes_per_s": round(prefill),
        "bytes_per_s": round(reached),
        "ratio_to_bound": round(reached / min(max(rates.values()), prefill), 4),
        "report": run,
    }


@dataclass
class Case:
    """One shape: what both of its engines are started with, and what they are fed."""

    cfg: Config
    target: Target
    ids: tuple[int, ...]
    sets: dict[str, Measured]
    work: Path
    args: argparse.Namespace
    baseline: str
    seeds: Iterator[int]

    @classmethod
    def make(cls, shape: str, args: argparse.Namespace, work: Path) -> Case:
        """The checkpoint is written, nothing is started."""
        cpu = shape == "tiny"
        options = {} if cpu else ALONE if args.one_by_one else BESIDE_EACH_OTHER
        cfg = Config()
        cfg.hardware = HardwareConfig(
            name="bench",
            engine="vllm",
            accelerator="cpu" if cpu else "gpu",
            threads=1 if cpu else None,
            tensor_parallel_size=args.ranks,
            batch_tokens=args.batch_tokens,
            engine_options={**options, **json.loads(args.options)},
            on_backend_mismatch="warn",
        )
        cfg.dataset.max_length, cfg.dataset.max_new_tokens = 4096, 1
        target = make_target(shape, cfg, work / shape)
        n = target.shape.num_layers
        ids = (2, n // 2, n - 3, n) if n >= 8 else (1, 2, n - 1, n)
        lengths = {"mixed_128_4096": mixed_lengths(args.tokens), "fixed_2048": [2048] * (args.tokens // 2048)}
        sets = {name: Measured(rows, {}, []) for name, rows in lengths.items()}
        baseline = EAGER if args.eager_baseline or cpu else COMPILED
        return cls(cfg, target, ids, sets, work, args, baseline, iter(range(2, 1000)))

    def start_plain(self) -> EngineProcess:
        """The engine without capture, starting."""
        arguments = engine_arguments(self.cfg, self.target, self.target.folder, "dummy")
        arguments.pop("worker_extension_cls")
        arguments["enforce_eager"] = self.baseline == EAGER
        log_file = self.work / f"{self.cfg.model.name}-plain.log"
        return EngineProcess(arguments, engine_environment(self.cfg), log_file)

    def start_capture(self) -> VllmEngine:
        """The engine that captures, loaded."""
        log_file = self.work / f"{self.cfg.model.name}-capture.log"
        return VllmEngine(self.cfg, self.target, load_format="dummy", log_file=log_file)

    def plain(self, name: str, process: EngineProcess, found: Measured) -> None:
        """Measures plain prefill of a set once."""
        vocab = self.target.shape.vocab_size
        found.plain.setdefault(name, []).append(plain(process, make_samples(found.lengths, vocab, next(self.seeds))))

    def warm(self, process: EngineProcess) -> None:
        """Kernels are chosen at the first batches."""
        plain(process, make_samples(self.sets["mixed_128_4096"].lengths[:64], self.target.shape.vocab_size, 0))

    def run(self, engine: VllmEngine, process: EngineProcess | None, disk: Path | None) -> None:
        """All measurements with the capturing engine; `process` is the baseline's, closed when it is done with."""
        vocab, folder = self.target.shape.vocab_size, self.args.folder
        # Once at full size: the machine's memory is made to exist.
        captured(engine, make_samples(self.sets["mixed_128_4096"].lengths, vocab, 1), self.ids, folder)
        if process is not None:
            process.wait_ready(lambda text: None)
            self.warm(process)
        for found in self.sets.values():
            for _ in range(self.args.rounds):
                if process is not None:
                    self.plain(self.baseline, process, found)
                self.plain(f"{EAGER}, the capturing engine", engine._process, found)
                samples = make_samples(found.lengths, vocab, next(self.seeds))
                found.captures.append(captured(engine, samples, self.ids, folder))
            self.tell(engine)
        if process is not None:
            process.close()
        if disk:
            found = self.sets["fixed_2048"]
            rate = max(found.row()["plain_tokens_per_s"].values())
            self.tell(engine, disk=measure_disk(found.lengths, vocab, rate, engine, self.ids, disk))

    def run_plain(self, engine: VllmEngine) -> None:
        """The baseline's measurements, when the capturing engine (closed by now) is done."""
        process = self.start_plain()
        process.wait_ready(lambda text: None)
        self.warm(process)
        for found in self.sets.values():
            for _ in range(self.args.rounds):
                self.plain(self.baseline, process, found)
            self.tell(engine)
        process.close()

    def tell(self, engine: VllmEngine, **more: Any) -> None:
        """Prints what is known so far; writes it too, so that a run that is cut leaves something."""
        info = engine.info()
        names = ("weight_bytes", "context_bytes", "memory_total_bytes")
        result = {
            "shape": self.cfg.model.name,
            "layers": info.num_layers,
            "ids": self.ids,
            "ranks": self.args.ranks,
            "vllm": engine.version,
            "device": info.device,
            "runner": info.details["runner"],
            "backends": info.details["backends"],
            "engines": "one by one" if self.args.one_by_one else "side by side",
            "capture_start_s": round(engine.load_seconds, 1),
            "memory": [{name: rank[name] for name in names} for rank in engine.ranks],
            "sets": {name: found.row() for name, found in self.sets.items() if found.captures},
            **more,
        }
        print(json.dumps(result), flush=True)
        if self.args.out:
            ranks = f"_tp{self.args.ranks}" if self.args.ranks > 1 else ""
            name = f"capture_vllm_{self.cfg.model.name}{ranks}.json"
            (self.args.out / name).write_text(json.dumps(result, indent=1) + "\n")


def run_side_by_side(cases: list[Case], disk: Path | None) -> None:
    """The engines that capture load at once, their baselines when it is their turn: all would not fit."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        loading = [pool.submit(case.start_capture) for case in cases]
        process = cases[0].start_plain()
        engines = [stack.enter_context(engine.result()) for engine in loading]
        for case, engine in zip(cases, engines, strict=True):
            first = case is cases[0]
            with engine:
                case.run(engine, process if first else case.start_plain(), disk if first else None)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--tokens", type=int, default=786432)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/eagle3-bench"))
    parser.add_argument("--disk", type=Path, help="capture the first shape into this folder on a disk too")
    parser.add_argument("--eager-baseline", action="store_true")
    parser.add_argument("--one-by-one", action="store_true", help="the engines one after the other, alone on the cards")
    parser.add_argument("--options", default="{}", help="engine options, JSON")
    parser.add_argument("--out", type=Path, help="folder for a JSON file of each shape")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="eagle3-bench-"))
    cases = [Case.make(shape, args, work) for shape in args.shapes]
    if args.one_by_one:
        for number, case in enumerate(cases):
            with case.start_capture() as engine:
                case.run(engine, None, None if number else args.disk)
            case.run_plain(engine)
    else:
        run_side_by_side(cases, args.disk)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
