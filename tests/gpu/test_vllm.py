"""Capture on a GPU: the pinned ring and its streams, and the real engine against Hugging Face, on one rank and two."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
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
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_group import VllmEngines
from eagle3.shards import Layout, ShardPlan, ShardWriter, check_layer_file, data_start, plan_shards, read_rows
from eagle3.tokens import Sample
from tests.test_recorder import make_plan, make_samples, settle
from tests.vllm.checkpoints import RECIPES
from tests.vllm.engines import ADAPTERS, hugging_face

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SHORT = 16
"""Rows of the samples whose batch is a small one when they are alone, for which kernels are others than for many."""
LENGTHS = [5, 300, 500, 41, 77, 490, 256, 128, *[SHORT] * 60]
ROUNDED_TWICE = 1.5
"""How many times the error of one pipeline in bfloat16 that of another may be. They round at about the same places. If
one rounded everywhere twice, as two ranks do with the sums that each has a part of, its error were 1.41 times as large.
"""


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


def checkpoint(family: str, folder: Path) -> Path:
    """A tiny checkpoint of the family whose weights are numbers of bfloat16, so that all formats load the same model.

    The recipes' weights of 0.1 fit a hidden size of 64. At 512 half of them is what lets no layer enlarge the rounding
    of those before it much: rows that differ by more than rounding then differ for another reason.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    more = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {"intermediate_size": 1024}
    RECIPES[family](folder, **sizes, **more)
    weights = load_file(folder / "model.safetensors")
    rounded = {name: (weight / 2 if weight.ndim > 1 else weight).bfloat16() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def configured(family: str, folder: Path, dtype: str = "bfloat16", **hardware: Any) -> tuple[Config, Target]:
    """The checkpoint in `folder` on this machine's GPUs."""
    cfg = Config()
    adapter = {"_target_": f"eagle3.adapters.{ADAPTERS[family]}"}
    cfg.model = ModelConfig(name="tiny", path=str(folder), adapter=adapter, dtype=dtype)
    cfg.hardware = HardwareConfig(name="gpu", engine="vllm", accelerator="gpu", batch_tokens=1024, **hardware)
    # A fixed and small part of the card, so that engines can stand beside each other.
    cfg.hardware.engine_options = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 10**9}
    cfg.hardware.engine_options["disable_custom_all_reduce"] = True
    cfg.dataset.max_length, cfg.dataset.max_new_tokens = 500, 10
    return cfg, open_target(cfg)


@dataclasses.dataclass(frozen=True)
class Standing:
    """Engines of one rank and, where there are two GPUs, of two; what exact arithmetic makes of the same weights.

    `exact` are Hugging Face's states in float32 by sample and layer: all that an engine in bfloat16 is away from them
    is its rounding.
    """

    family: str
    target: Target
    engines: list[VllmEngine]
    samples: list[Sample]
    exact: dict[str, list[torch.Tensor]]


@pytest.fixture(scope="module")
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """The engines of a family in a format, started at once: a minute each."""
    family, dtype = request.param
    folder = checkpoint(family, tmp_path_factory.mktemp("standing") / "model")
    samples = make_samples(LENGTHS)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        # Triton's products of float32 are TF32 unless told otherwise; those of bfloat16 are as they were.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("TRITON_F32_DEFAULT", "ieee")

        def start(ranks: int) -> VllmEngine:
            cfg, target = configured(family, folder, dtype, tensor_parallel_size=ranks)
            return stack.enter_context(VllmEngine(cfg, target, log_file=folder.parent / f"{ranks}.log"))

        engines = list(pool.map(start, (1, 2)[: torch.cuda.device_count()]))
        for engine in engines:
            print(engine.info())
        target = engines[0].target
        yield Standing(family, target, engines, samples, hugging_face(target, samples))


def stand(dtype: str) -> pytest.MarkDecorator:
    """For both families, in this format."""
    families = ["llama", "qwen3_moe"]
    ids = [f"{family}-{dtype}" for family in families]
    return pytest.mark.parametrize("standing", [(family, dtype) for family in families], indirect=True, ids=ids)


def captured(engine: VllmEngine, samples: Sequence[Sample]) -> dict[str, dict[int, torch.Tensor]]:
    """States by sample id and layer id."""
    return {found.sample_id: found.states for found in engine.capture(samples, range(7))}


def captured_alone(engine: VllmEngine, samples: Sequence[Sample]) -> dict[str, dict[int, torch.Tensor]]:
    """Each sample in a batch of its own."""
    return {key: states for sample in samples for key, states in captured(engine, [sample]).items()}


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], layer: int) -> torch.Tensor:
    """Relative difference of each row at a layer."""
    pairs = [(found[key][layer].float(), expected[key][layer].float()) for key in expected]
    return torch.cat([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in pairs])


def expert_choices(target: Target, found: Mapping[str, Any], samples: Sequence[Sample]) -> list[torch.Tensor]:
    """The experts [rows, chosen], ascending, that each layer chooses, in float32, for the states found before it."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    given: dict[int, torch.Tensor] = {}
    chosen: list[list[torch.Tensor]] = []
    layers: Any = target.adapter.layers(model)
    for k, layer in enumerate(layers):
        rows: list[torch.Tensor] = []
        chosen.append(rows)
        layer.register_forward_pre_hook(lambda _, args, k=k: (given[k], *args[1:]))
        layer.mlp.gate.register_forward_hook(lambda _, args, out, rows=rows: rows.append(out[-1].sort(-1).values))
    for sample in samples:
        given.update({k: found[sample.id][k][None].float() for k in range(len(layers))})
        with torch.no_grad():
            model(torch.from_numpy(sample.input_ids[None].astype(np.int64)))
    return [torch.cat(rows) for rows in chosen]


@needs_vllm
@stand("bfloat16")
def test_states_are_those_of_hugging_face(standing: Standing) -> None:
    """At each layer the engine's median row, in one batch or in many, errs hardly more than that of Hugging Face in
    bfloat16 does. That no single row is another's is for float32 to show."""
    samples, exact = standing.samples, standing.exact
    together, alone = captured(standing.engines[0], samples), captured_alone(standing.engines[0], samples)
    rounded = hugging_face(standing.target, samples, torch.bfloat16)
    for k in range(7):
        theirs, *ours = (differences(found, exact, k).median() for found in (rounded, together, alone))
        told = f"Hugging Face {theirs:.2e}, one batch {ours[0]:.2e}, many {ours[1]:.2e}"
        print(f"{standing.family}, layer {k}: median errors: {told}")
        assert max(ours) <= ROUNDED_TWICE * theirs


@needs_vllm
@needs_two
@stand("bfloat16")
def test_two_ranks_err_hardly_more_than_one(standing: Standing) -> None:
    """At each layer, by the median row. And two ranks differ from one at most twice as much as a sample by itself does
    from the same in a full batch or, where the batch changes fewer bits than that, as one rank errs.

    The experts that rows would be sent to with the one state and not with the other are counted.
    """
    samples, exact = standing.samples, standing.exact
    one, two = (captured(engine, samples) for engine in standing.engines)
    alone = captured_alone(standing.engines[0], samples)
    short = {sample.id: one[sample.id] for sample in samples if len(sample.input_ids) == SHORT}
    for k in range(1, 7):
        error, error_two = (differences(found, exact, k).median() for found in (one, two))
        batches, ranks = (differences(found, short, k).median() for found in (alone, two))
        judge = "batches" if ranks <= 2 * batches else f"error, since batches change {batches:.2e} only"
        told = f"errors: one rank {error:.2e}, two {error_two:.2e}; two against one: {ranks:.2e}, judged by {judge}"
        print(f"{standing.family}, layer {k}: medians: {told}")
        assert error_two <= ROUNDED_TWICE * error
        assert ranks <= 2 * max(batches, error)
    if standing.family == "qwen3_moe":
        chosen = [expert_choices(standing.target, found, samples) for found in (one, two, alone, exact)]
        for k, (mine, *others) in enumerate(zip(*chosen, strict=True)):
            flips = [int((mine != other).any(1).sum()) for other in others]
            told = f"{flips[0]} (two ranks), {flips[1]} (alone), {flips[2]} (exact)"
            print(f"layer {k}: other experts than with one rank's states for {told} of {len(mine)} rows")


@needs_vllm
@stand("float32")
def test_states_in_float32_are_exact(standing: Standing) -> None:
    """Every row at every layer: two ranks agree with one to 1e-5, and each with Hugging Face, whose kernels are others
    on another device, to three times that. No row is so near to other experts that such errors send it there."""
    found = [captured(engine, standing.samples) for engine in standing.engines]
    for k in range(7):
        errors = [differences(states, standing.exact, k).max() for states in found]
        ranks = differences(found[-1], found[0], k).max()
        print(f"{standing.family}, layer {k}: worst rows: errors {[f'{e:.1e}' for e in errors]}, ranks {ranks:.1e}")
        assert max(errors) <= 3e-5
        assert ranks <= 1e-5


@needs_vllm
@needs_two
def test_two_engines_on_a_gpu_each_make_the_store_of_one(tmp_path: Path) -> None:
    """Both take part, each on a card of its own; rows differ from those of the first of them alone no more than
    bfloat16 resolves."""
    cfg, target = configured("llama", checkpoint("llama", tmp_path / "model"), data_parallel_size=2)
    samples = make_samples([5, 300, 500, 41, 77, 490, 256, 128] * 48)
    lengths, ids, layers = [len(s.input_ids) for s in samples], [s.id for s in samples], (1, 3, 6)
    layout = Layout(target.shape.hidden_size, "bfloat16", target.shape.num_layers)
    plans = plan_shards(lengths, ids, layout.row_bytes, 1000 * layout.row_bytes, None, 60)
    prompts = [Prompt(f"p{n}", sample.input_ids[:64].tolist(), 10) for n, sample in enumerate(samples)]
    stores: list[Capture] = []
    answers: list[dict[str, list[int]]] = []
    with open_engine(cfg, target, tmp_path / "engine.log") as engines:
        assert isinstance(engines, VllmEngines)
        given = [Path(f"/proc/{one._process._process.pid}/environ").read_text() for one in engines.engines]
        cards = {name for text in given for name in text.split("\0") if name.startswith("CUDA_VISIBLE_DEVICES=")}
        assert len(cards) == 2
        for name, engine in (("two", engines), ("one", engines.engines[0])):
            stores.append(Capture(tmp_path / name, layout, plans, layers, 500))
            stores[-1].folder.mkdir()
            count = stores[-1].run(engine, samples, stores[-1].missing(), 0, lambda tokens: None)
            report = engine.last_capture
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
