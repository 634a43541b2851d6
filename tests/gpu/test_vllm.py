"""Capture on a GPU: the pinned ring and its streams, and the real engine against Hugging Face in bfloat16."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3.capture import Capture
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config, HardwareConfig, ModelConfig
from eagle3.engines import Prompt, open_engine
from eagle3.engines.recorder import Recorder
from eagle3.engines.taps import StateTaps
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_group import VllmEngines
from eagle3.shards import Layout, ShardPlan, ShardWriter, check_layer_file, data_start, plan_shards, read_rows
from eagle3.tokens import Sample
from tests.test_recorder import make_plan, make_samples, settle
from tests.vllm.checkpoints import RECIPES
from tests.vllm.engines import ADAPTERS

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


def configured(family: str, folder: Path, **hardware: Any) -> tuple[Config, Target]:
    """A tiny checkpoint of the family in bfloat16 on this machine's GPUs."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    more = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {"intermediate_size": 1024}
    folder.mkdir()
    RECIPES[family](folder, **sizes, **more)
    cfg = Config()
    adapter = {"_target_": f"eagle3.adapters.{ADAPTERS[family]}"}
    cfg.model = ModelConfig(name="tiny", path=str(folder), adapter=adapter, dtype="bfloat16")
    cfg.hardware = HardwareConfig(name="gpu", engine="vllm", accelerator="gpu", batch_tokens=1024, **hardware)
    # A fixed and small part of the card, so that engines can stand beside each other.
    cfg.hardware.engine_options = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 10**9}
    cfg.hardware.engine_options["disable_custom_all_reduce"] = True
    cfg.dataset.max_length, cfg.dataset.max_new_tokens = 500, 10
    return cfg, open_target(cfg)


def captured(engine: VllmEngine, samples: Sequence[Sample]) -> dict[str, dict[int, torch.Tensor]]:
    return {found.sample_id: found.states for found in engine.capture(samples, range(7))}


def differences(found: dict[str, Any], expected: dict[str, Any], layer: int) -> torch.Tensor:
    """Relative difference of each row at a layer."""
    pairs = [(found[key][layer].float(), expected[key][layer].float()) for key in expected]
    return torch.cat([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in pairs])


def expert_choices(
    target: Target, found: dict[str, dict[int, torch.Tensor]], samples: Sequence[Sample], device: str = "cuda"
) -> list[torch.Tensor]:
    """The experts [rows, chosen], ascending, that each of Hugging Face's layers chooses for the states found there."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.bfloat16)
    model.eval().to(device)
    given: dict[int, torch.Tensor] = {}
    chosen: list[list[torch.Tensor]] = []
    layers: Any = target.adapter.layers(model)
    for k, layer in enumerate(layers):
        rows: list[torch.Tensor] = []
        chosen.append(rows)
        layer.register_forward_pre_hook(lambda _, args, k=k: (given[k], *args[1:]))
        layer.mlp.gate.register_forward_hook(lambda _, args, out, rows=rows: rows.append(out[-1].sort(-1).values.cpu()))
    for sample in samples:
        given.update({k: state[None].to(device) for k, state in found[sample.id].items()})
        with torch.no_grad():
            model(torch.from_numpy(sample.input_ids[None].astype(np.int64)).to(device))
    return [torch.cat(rows) for rows in chosen]


@needs_vllm
def test_states_are_those_of_hugging_face(tmp_path: Path) -> None:
    """Relative difference of bfloat16 states to Hugging Face's in bfloat16, at all layers; one batch or many."""
    from transformers import AutoModelForCausalLM

    cfg, target = configured("llama", tmp_path / "model")
    samples = make_samples([5, 300, 500, 41, 77, 490, 256, 128])
    with VllmEngine(cfg, target, log_file=tmp_path / "engine.log") as engine:
        print(engine.info())
        together = captured(engine, samples)
        alone = {key: states for sample in samples for key, states in captured(engine, [sample]).items()}
        print(engine.last_capture)
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.bfloat16)
    model.eval().cuda()
    for sample in samples:
        with StateTaps(target.adapter.layers(model), target.adapter, range(7)) as caught, torch.no_grad():
            model(torch.from_numpy(sample.input_ids[None].astype(np.int64)).cuda())
        for k in range(7):
            for found in (together, alone):
                expected = caught[k][0].float().cpu()
                assert (found[sample.id][k].float() - expected).norm() < 0.03 * expected.norm()


@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_ranks_differ_no_more_than_two_batches(family: str, tmp_path: Path) -> None:
    """In each layer the median row of two ranks differs from one rank's at most twice as much as one rank's row does
    in another batch (or than bfloat16 resolves). The experts that rows would be sent to at a layer with the one state
    and not with the other are counted and printed, for a family that has them."""
    cfg, target = configured(family, tmp_path / "model")
    cfg_two = dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, tensor_parallel_size=2))
    samples = make_samples([5, 300, 500, 41, 77, 490, 256, 128])
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        starts = [
            pool.submit(VllmEngine, each, target, log_file=tmp_path / f"{each.hardware.tensor_parallel_size}.log")
            for each in (cfg, cfg_two)
        ]
        engine, engine_two = (stack.enter_context(start.result()) for start in starts)
        one, two = captured(engine, samples), captured(engine_two, samples)
        other = {key: states for sample in samples for key, states in captured(engine, [sample]).items()}
    for k in range(1, 7):
        batches, ranks = differences(other, one, k), differences(two, one, k)
        print(family, k, f"medians: batches {batches.median():.2e}, ranks {ranks.median():.2e}")
        assert ranks.median() <= max(2 * batches.median(), 4e-3)
    if family == "qwen3_moe":
        choices, others, twos = (expert_choices(target, found, samples) for found in (one, other, two))
        for k, (mine, batch, rank) in enumerate(zip(choices, others, twos, strict=True)):
            flipped = int((mine != batch).any(1).sum()), int((mine != rank).any(1).sum())
            print(f"layer {k}: other experts for {flipped[0]} (batches), {flipped[1]} (ranks) of {len(mine)} rows")


@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_engines_on_a_gpu_each_make_the_store_of_one(tmp_path: Path) -> None:
    """Both take part, each on a card of its own; rows differ no more than bfloat16 resolves."""
    cfg, target = configured("llama", tmp_path / "model", data_parallel_size=2)
    alone = dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, data_parallel_size=1))
    samples = make_samples([5, 300, 500, 41, 77, 490, 256, 128] * 48)
    lengths, ids, layers = [len(s.input_ids) for s in samples], [s.id for s in samples], (1, 3, 6)
    layout = Layout(target.shape.hidden_size, "bfloat16", target.shape.num_layers)
    plans = plan_shards(lengths, ids, layout.row_bytes, 1000 * layout.row_bytes, None, 60)
    prompts = [Prompt(f"p{n}", sample.input_ids[:64].tolist(), 10) for n, sample in enumerate(samples)]
    stores: list[Capture] = []
    answers: list[dict[str, list[int]]] = []
    for name, each in (("two", cfg), ("one", alone)):
        stores.append(Capture(tmp_path / name, layout, plans, layers, 500))
        stores[-1].folder.mkdir()
        with open_engine(each, target, tmp_path / f"{name}.log") as engine:
            if isinstance(engine, VllmEngines):
                given = [Path(f"/proc/{one._process._process.pid}/environ").read_text() for one in engine.engines]
                cards = {
                    name for text in given for name in text.split("\0") if name.startswith("CUDA_VISIBLE_DEVICES=")
                }
                assert len(cards) == 2
            count = stores[-1].run(engine, samples, stores[-1].missing(), 0, lambda tokens: None)
            report: Any = getattr(engine, "last_capture", None)
            print(name, f"{count.tokens / count.seconds:,.0f} tokens/s", [r["rows_written"] for r in report["ranks"]])
            assert all(rank["rows_written"] > 0 for rank in report["ranks"])
            found = engine.generate(prompts, temperature=0.0, seed=0, stop_ids=[])
            answers.append({answer.key: answer.token_ids for answer in found})
    two, one = stores
    assert two.kept() == one.kept() == (len(samples), sum(lengths), {})
    for k in layers:
        pairs = [[rows_of(store, plan, k) for store in stores] for plan in plans]
        different = torch.cat([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in pairs])
        assert different.median() <= 4e-3
    assert answers[0].keys() == answers[1].keys()
    same = sum(answers[0][key] == answers[1][key] for key in answers[0])
    print(f"{same} of {len(prompts)} answers equal")
    assert same > 0.8 * len(prompts)


def rows_of(store: Capture, plan: ShardPlan, layer_id: int) -> torch.Tensor:
    path = store.folder / plan.name / store.layout.file_name(layer_id)
    return read_rows(path, store.layout, data_start(path), 0, plan.tokens).float()
