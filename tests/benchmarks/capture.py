"""Speed of capture beside the plain forward of the same model on the same batches, and of generation.

    python tests/benchmarks/capture.py --model ~/.cache/eagle3/smollm2-135m-instruct --tokens 6000 --threads 2

Batches are alternated (plain, capture, plain, ...) so that a busy machine slows both alike; both wall and CPU seconds
are reported. Capture must stay within 10 % of plain.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from eagle3.checkpoint import open_target
from eagle3.config import Config, HardwareConfig, ModelConfig
from eagle3.engines import Prompt
from eagle3.engines.padding import length_batches, pad
from eagle3.engines.transformers import TransformersEngine
from eagle3.layers import eagle_ids
from eagle3.shards import Layout, ShardWriter, shards_at
from eagle3.tokens import Sample, sample_id


class Clock:
    """Wall and CPU seconds of the calls it has measured."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def measure(self, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


def make_samples(tokens: int, vocab_size: int, seed: int = 0) -> list[Sample]:
    """Random ids in lengths as chat data has them (log-normal around 130, 20 to 600)."""
    random = np.random.default_rng(seed)
    samples: list[Sample] = []
    while sum(len(sample.input_ids) for sample in samples) < tokens:
        length = int(np.clip(random.lognormal(4.9, 0.6), 20, 600))
        input_ids = random.integers(3, vocab_size, length).astype(np.int32)
        samples.append(Sample(sample_id(input_ids), input_ids, np.ones(length, bool), "train", str(len(samples))))
    return samples


def compare_capture(engine: TransformersEngine, samples: list[Sample], folder: Path) -> dict[str, float]:
    """Plain forward of each batch against capture of the same batch, written to the store, in turn."""
    shape = engine.target.shape
    layer_ids = (*eagle_ids(shape.num_layers), shape.num_layers)
    layout = Layout(shape.hidden_size, "bfloat16", shape.num_layers)
    plain, capture = Clock(), Clock()
    lengths = [len(sample.input_ids) for sample in samples]
    plan = shards_at([0], lengths, [sample.id for sample in samples])[0]
    with ShardWriter(folder, layout, plan, layer_ids) as writer:

        def forward(batch: list[Sample]) -> None:
            with torch.no_grad():
                engine.model.base_model(pad([sample.input_ids for sample in batch]), use_cache=False)

        def store(batch: list[Sample]) -> None:
            for caught in engine.capture(batch, layer_ids):
                writer.write(caught.sample_id, caught.states)

        for i, rows in enumerate(length_batches(lengths, engine.hardware.batch_tokens)):
            batch = [samples[row] for row in rows]
            order = [(plain, forward), (capture, store)]
            for clock, work in order if i % 2 else reversed(order):
                clock.measure(lambda work=work, batch=batch: work(batch))
        capture.measure(lambda: writer.close(samples, {}))
    tokens = sum(lengths)
    return {
        "tokens": tokens,
        "plain_tokens_per_s": tokens / plain.wall,
        "capture_tokens_per_s": tokens / capture.wall,
        "capture_tokens_per_cpu_s": tokens / capture.cpu,
        "ratio_wall": plain.wall / capture.wall,
        "ratio_cpu": plain.cpu / capture.cpu,
    }


def time_generation(engine: TransformersEngine, samples: list[Sample], max_new_tokens: int) -> dict[str, float]:
    """Continuous slots over the samples' starts as prompts; no stop token, so that every run does the same work."""
    prompts = [Prompt(sample.key, sample.input_ids[:60].tolist(), max_new_tokens) for sample in samples]
    clock, count = Clock(), 0
    clock.measure(lambda: [None for _ in engine.generate(prompts, temperature=0, seed=0, stop_ids=[])])
    count = len(prompts) * max_new_tokens
    return {"new_tokens": count, "new_tokens_per_s": count / clock.wall, "new_tokens_per_cpu_s": count / clock.cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Llama checkpoint")
    parser.add_argument("--out", default="/tmp/eagle3-capture-benchmark")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--new", type=int, default=0, help="new tokens a prompt; 0 leaves generation out")
    given = parser.parse_args()
    adapter = {"_target_": "eagle3.adapters.llama.LlamaAdapter"}
    hardware = HardwareConfig(
        name="cpu", threads=given.threads, batch_tokens=given.batch_tokens, generate_slots=given.slots
    )
    cfg = Config(model=ModelConfig(name="benchmark", path=given.model, adapter=adapter), hardware=hardware)
    target = open_target(cfg)
    samples = make_samples(given.tokens, target.shape.vocab_size)
    with TransformersEngine(target, hardware) as engine:
        list(engine.capture(samples[:2], [1]))  # warm up
        result = {"threads": torch.get_num_threads(), **compare_capture(engine, samples, Path(given.out))}
        if given.new:
            result |= time_generation(engine, samples, given.new)
    print(json.dumps({key: round(value, 3) for key, value in result.items()}, indent=1))


if __name__ == "__main__":
    main()
