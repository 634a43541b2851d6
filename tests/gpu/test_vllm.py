"""Capture on a GPU: the pinned ring and its streams, and the real engine against Hugging Face in bfloat16."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.engines.recorder import Recorder
from eagle3.shards import Layout, ShardWriter, check_layer_file
from tests.test_recorder import make_plan, make_samples, settle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.mark.parametrize("world", [1, 3])
def test_the_ring_keeps_states_that_the_engine_overwrites_at_once(tmp_path: Path, world: int) -> None:
    """Ids and states are spoiled on the compute stream right after each batch; what is stored is from before."""
    layers, hidden = [0, 3], 64
    samples = make_samples([700, 900, 30, 1024, 2000])
    plan, layout = make_plan(samples), Layout(hidden, "bfloat16", 3)
    device = torch.device("cuda")
    with ShardWriter(tmp_path, layout, plan, layers) as writer:
        ranks = [
            Recorder(
                layers,
                batch_rows=2048,
                hidden_size=hidden,
                dtype=torch.bfloat16,
                device=device,
                rank=rank,
                world=world,
                slots=2,
            )
            for rank in range(world)
        ]
        shard = {
            "key": "shard",
            "files": {str(k): [str(file.path), file.data_offset] for k, file in writer.files.items()},
            "members": list(range(len(samples))),
            "lengths": list(plan.lengths),
            "first_rows": list(plan.starts),
            "input_ids": np.concatenate([sample.input_ids for sample in samples]).tobytes(),
        }
        for recorder in ranks:
            recorder.open(shard)
        expected = {k: torch.randn(plan.tokens, hidden, device=device).bfloat16() for k in layers}
        for sample, start in zip(samples, plan.starts, strict=True):
            length = len(sample.input_ids)
            for recorder in ranks:
                ids = torch.from_numpy(sample.input_ids).to(device)
                positions = torch.arange(length, device=device)
                recorder.begin(ids, positions)
                for number, k in enumerate(layers):
                    state = expected[k][start : start + length].clone()
                    if wanted := recorder.wanted(number):
                        recorder.keep(number, state[wanted[0] : wanted[1]] + 0)
                    state.fill_(torch.nan)
                recorder.end()
                ids.zero_()
                positions.zero_()
        settle(writer, samples, ranks)
        writer.close(samples, {"name": "simulated"})
    for k in layers:
        path = tmp_path / plan.name / layout.file_name(k)
        assert check_layer_file(path, layout, plan, k, checksums=True) is None
        data = np.fromfile(path, np.int16)[-plan.tokens * hidden :].reshape(-1, hidden)
        assert torch.equal(torch.from_numpy(data).view(torch.bfloat16), expected[k].cpu())


@needs_vllm
def test_states_are_those_of_hugging_face(tmp_path: Path) -> None:
    """Relative difference of bfloat16 states to Hugging Face's in bfloat16, at all layers; one batch or many."""
    from transformers import AutoModelForCausalLM

    from eagle3.checkpoint import open_target
    from eagle3.config import Config, HardwareConfig, ModelConfig
    from eagle3.engines.taps import StateTaps
    from eagle3.engines.vllm import VllmEngine
    from tests.vllm.checkpoints import llama

    folder = tmp_path / "model"
    folder.mkdir()
    llama(folder, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64, intermediate_size=1024)
    cfg = Config()
    cfg.model = ModelConfig(
        name="tiny", path=str(folder), adapter={"_target_": "eagle3.adapters.llama.LlamaAdapter"}, dtype="bfloat16"
    )
    cfg.hardware = HardwareConfig(name="gpu", engine="vllm", accelerator="gpu", batch_tokens=1024)
    cfg.hardware.engine_options = {"gpu_memory_utilization": 0.3}
    cfg.dataset.max_length, cfg.dataset.max_new_tokens = 500, 10
    target = open_target(cfg)
    samples = make_samples([5, 300, 500, 41, 77, 490, 256, 128])
    with VllmEngine(cfg, target, log_file=tmp_path / "engine.log") as engine:
        print(engine.info())
        together = {c.sample_id: c.states for c in engine.capture(samples, range(7))}
        alone = {c.sample_id: c.states for sample in samples for c in engine.capture([sample], range(7))}
        print(engine.last_capture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().cuda()
    for sample in samples:
        with StateTaps(target.adapter.layers(model), target.adapter, range(7)) as caught, torch.no_grad():
            model(torch.from_numpy(sample.input_ids[None].astype(np.int64)).cuda())
        for k in range(7):
            for found in (together, alone):
                expected = caught[k][0].float().cpu()
                assert (found[sample.id][k].float() - expected).norm() < 0.03 * expected.norm()
