"""The LightningModule: schedule, normalisation, clipping, metrics."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from eagle3.artifacts import Artifact, Artifacts
from eagle3.batches import PackedDataModule
from eagle3.blueprint import new_drafter, state_scales
from eagle3.checkpoint import open_target
from eagle3.config import Config, DrafterConfig, TrainerConfig
from eagle3.drafter import WEIGHTS, load_drafter
from eagle3.errors import RequestError, StageFailed
from eagle3.loss import UnrollLoss
from eagle3.prepared import Prepared
from eagle3.shards import data_start
from eagle3.slots import spans
from eagle3.stages import extract
from eagle3.store import StatesStore
from eagle3.trainer import quiet_lightning
from eagle3.training import DrafterTraining, Tally, learning_rate_factor
from eagle3.vocab import build_vocab
from tests.drafters import Teacher, make_document, make_drafter, make_shape, pack, stored
from tests.stages import run_stage
from tests.trained import copied, make_inputs, recorded, train_config, trained, write_prompts


@pytest.fixture(scope="session")
def inputs(tiny_target: Path) -> Path:
    """A prepared and extracted data set."""
    return make_inputs(tiny_target)


def opened(cfg: Config) -> tuple[Prepared, StatesStore, Any]:
    """What a training run of this config reads: samples, states, target."""
    artifacts = Artifacts(Path(cfg.output_dir) / "artifacts")
    states = extract.states(cfg, artifacts)
    prepared = extract.source(cfg, artifacts)
    return Prepared.open(prepared.folder), StatesStore.open(states.folder), open_target(cfg)


def test_schedule_warms_up_and_ends_with_the_last_step() -> None:
    factors = [learning_rate_factor(step, 100, 0.1, 0.0) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[9] == pytest.approx(10 / 11)
    assert factors[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(factors[10:]))
    assert 0 < factors[-1] < 0.001
    assert learning_rate_factor(100, 100, 0.1, 0.0) == 0.0
    assert learning_rate_factor(100, 100, 0.1, 0.25) == 0.25
    assert [learning_rate_factor(step, 1, 0.0, 0.0) for step in (0, 1)] == [1.0, 0.0]


def test_t6_schedule_moves_with_optimizer_steps(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """T6, W7: the same rates at the same optimizer steps with and without accumulation; metrics on that axis."""
    rates: dict[int, dict[int, float]] = {}
    for accumulate in (1, 4):
        folder, record = copied(inputs, tmp_path / str(accumulate)), tmp_path / f"{accumulate}.jsonl"
        overrides = (
            f"trainer.accumulate={accumulate}",
            "trainer.max_steps=6",
            f"+trainer.callbacks.record={{_target_: tests.trained.Recorder, path: '{record}'}}",
        )
        metrics, _, run = trained(train_config(folder, tiny_target, *overrides))
        assert metrics["steps"] == 6
        lines = recorded(record)
        assert len(lines) == 6 * accumulate
        rates[accumulate] = {line["step"]: line["lr"] for line in lines}
        logged = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in logged]
        assert steps == sorted(steps) == [2, 4, 4, 6, 6]
        assert [line["step"] for line in logged if "validation/loss" in line] == [4, 6]
        with open(run.folder / "csv" / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == steps
        assert [int(row["step"]) for row in rows if row["validation/loss"]] == [4, 6]
        for line in logged:
            if "train/lr" in line:
                assert line["train/lr"] == pytest.approx(rates[accumulate][line["step"] - 1])
    assert rates[1] == rates[4]


class Gradients(Callback):
    """Keeps the gradients of the first optimizer step, before clipping."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            grads = {name: p.grad.clone() for name, p in pl_module.drafter.named_parameters()}
            torch.save(grads, self.path)


def test_accumulated_step_equals_the_big_batch(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """The gradients of one optimizer step of four batches are those of all their documents in one batch."""
    folder = copied(inputs, tmp_path)
    overrides = (
        "trainer.accumulate=4",
        "trainer.max_steps=1",
        f"+trainer.callbacks.keep={{_target_: tests.test_training.Gradients, path: '{tmp_path / 'grads.pt'}'}}",
    )
    cfg = train_config(folder, tiny_target, *overrides)
    trained(cfg)
    found = torch.load(tmp_path / "grads.pt")
    prepared, store, target = opened(cfg)
    drafter, vocab = new_drafter(cfg.drafter, target, prepared, (1, 3, 4), cfg.seed, state_scales(store, (1, 3, 4)))
    data = PackedDataModule(
        prepared, store, (1, 3, 4), vocab.t2d.numpy(), 3, "exact", 160, epochs=50, max_steps=1, accumulate=4
    )
    documents = [stored(data, int(row)) for row in data.train_rows[data.plan.step_documents(0)]]
    assert len(documents) > 6
    batch = pack(documents, 3, vocab.t2d.numpy())
    module = DrafterTraining(drafter, target.teacher_head(), cfg.drafter, cfg.trainer, 1, lambda *_: None)
    module.unroll(batch).loss.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_fresh_drafter_starts_from_the_deepest_state(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """fc gives the deepest state at size one, and first guesses are nearly flat although the head is the target's."""
    cfg = train_config(copied(inputs, tmp_path), tiny_target)
    prepared, store, target = opened(cfg)
    states = store.read(store.sample_ids[0], (1, 3, 4))
    scales = state_scales(store, (1, 3, 4))
    drafter, _ = new_drafter(cfg.drafter, target, prepared, (1, 3, 4), cfg.seed, scales)
    fused = drafter.fuse(torch.cat([states[k] for k in (1, 3, 4)], dim=-1))
    torch.testing.assert_close(fused, states[4].float() / scales[2])
    every = torch.cat([store.read(sample_id, (4,))[4] for sample_id in store.sample_ids]).double()
    assert scales[2] == pytest.approx(float(every.square().mean(-1).sqrt().median()), rel=0.1)
    assert bool((drafter.norm.weight < 1).all())


def make_module(drafter: Any, report: Any = lambda *_: None, **recipe: Any) -> DrafterTraining:
    teacher: Any = Teacher(23, 16).to(drafter.dtype)
    settings = DrafterConfig(name="x", unroll_steps=3)
    return DrafterTraining(drafter, teacher, settings, TrainerConfig(name="x", **recipe), 10, report)


def test_tally_counts_by_hand() -> None:
    """V5: unconditional accuracy over all rows of a step, conditional over those whose earlier drafts all hit."""
    document = make_document(make_shape(), [(2, 7)], 8, 1)
    batch = pack([document], 3)  # rows: slots 1-4 at step 0, 1-3 at step 1, 1-2 at step 2
    hits = torch.tensor([True, False, True, True, False, True, True, True, False])
    losses = torch.arange(9.0)
    oov = torch.tensor([True] + [False] * 8)
    tally = Tally(3, torch.device("cpu"))
    for _ in range(2):
        tally.add(batch, UnrollLoss(torch.zeros(()), losses, hits, oov))
    found = tally.metrics(0.5)
    assert found["loss/step_0"] == 1.5
    assert found["loss/step_1"] == 5.0
    assert found["loss"] == 1.5 + 0.5 * 5.0 + 0.25 * 7.5
    assert found["accuracy_unconditional/step_0"] == 0.75
    assert found["accuracy_unconditional/step_1"] == pytest.approx(2 / 3)
    assert found["accuracy_unconditional/step_2"] == 0.5
    # Step 1: slots 1 and 3 had hit, of which 3 hits again. Step 2: slot 3 is not supervised there, 1 did not hit.
    assert found["accuracy_conditional/step_0"] == 0.75
    assert found["accuracy_conditional/step_1"] == 0.5
    assert found["accuracy_conditional/step_2"] == 0.0
    assert found["oov_fraction"] == pytest.approx(1 / 9)


def test_norms_are_not_decayed() -> None:
    module = make_module(make_drafter(make_shape(fc_norm=True), dtype=torch.float32))
    module.recipe.weight_decay = 0.1
    optimizer: Any = module.configure_optimizers()
    matrices, norms = optimizer["optimizer"].param_groups
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in matrices["params"])
    assert all(p.ndim == 1 for p in norms["params"])
    assert len(matrices["params"]) + len(norms["params"]) == len(list(module.drafter.parameters()))


@pytest.mark.parametrize("again", [False, True])
def test_activations_are_made_again_where_it_is_asked_for(again: bool) -> None:
    """By the plain step: its MLP runs once in each unroll step, or once more in the backward pass."""
    module = make_module(make_drafter(make_shape()), checkpoint_activations=again)
    calls: list[Any] = []
    module.drafter.midlayer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    module.unroll(pack([make_document(make_shape(), [(2, 7)], 8, 1)], 3)).loss.backward()
    assert len(calls) == (6 if again else 3)


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_the_plain_step_in_the_place_of_the_kernels_is_said(caplog: pytest.LogCaptureFixture) -> None:
    module = make_module(make_drafter(make_shape(head_dim=192), dtype=torch.float32))
    with quiet_lightning():
        module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with caplog.at_level(logging.WARNING, "eagle3"):
        module._fuse()
    assert module.fused is None
    assert caplog.messages == [
        "trainer: takes the plain, slower step instead of that of the kernels for GPUs: heads are 192 wide "
        "(drafter.head_dim), the kernels take up to 128"
    ]


def test_muon_refuses_weights_in_shards(tmp_path: Path) -> None:
    """Also where a strategy made them that has no name in the config (`trainer.lightning.strategy`)."""
    module = make_module(make_drafter(make_shape(), dtype=torch.float32))
    module.recipe.optimizer = "muon"
    module.configure_optimizers()
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        fully_shard(module.drafter, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(RequestError, match=r"trainer\.optimizer: found muon with weights in shards.*=ddp"):
            module.configure_optimizers()
    finally:
        torch.distributed.destroy_process_group()


def test_a_gradient_that_is_not_finite_stops_training(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = copied(inputs, tmp_path)
    overrides = "+trainer.callbacks.spoil={_target_: tests.test_training.Spoil, step: 2}"
    with pytest.raises(StageFailed, match=r"optimizer step 3 is not finite .*eagle3 stage=verify"):
        trained(train_config(folder, tiny_target, overrides))
    assert not list((folder / "outputs/artifacts/drafter").glob("*[0-9a-f]"))


class Spoil(Callback):
    """Makes a gradient infinite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == self.step:
            pl_module.drafter.fc.weight.grad[0, 0] = math.inf


def test_a_validation_loss_that_is_not_finite_stops_training(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """The first validation behind a damage of the states names the sample; the best drafter stays that of before."""
    folder, words = copied(inputs, tmp_path), "trainer.batch_tokens=600"
    prepared, store, _ = opened(train_config(folder, tiny_target))
    sample = prepared.samples[int(prepared.split_indices("validation")[1])]
    shard, index = next(
        (name, index)
        for number, name in enumerate(store.shards)
        if sample.id in (index := store.index(number)).sample_ids
    )
    path = store.folder / shard / store.layout.file_name(3)
    row = int(index.starts[index.sample_ids.index(sample.id)] + spans(sample.loss_mask)[0, 0])
    damage = f"{{_target_: tests.test_training.Damage, step: 6, path: '{path}', row: {row}, width: 48}}"
    with pytest.raises(
        StageFailed,
        match=rf"validation at step 8 is not finite \(nan\), first that of sample {sample.id}; .*eagle3 stage=verify",
    ):
        trained(train_config(folder, tiny_target, words, f"+trainer.callbacks.damage={damage}"))
    (unfinished,) = (folder / "outputs/artifacts/drafter").iterdir()
    assert unfinished.suffix == ".partial"
    assert [best.name for best in (unfinished / "checkpoints").glob("best-*")] == ["best-00000004"]
    (metrics,) = (folder / "outputs/runs").glob("*/*train*/metrics.jsonl")
    assert "NaN" not in metrics.read_text()


class Damage(Callback):
    """Overwrites a row of stored float32 states with NaN before a step, as a failing disk might."""

    def __init__(self, step: int, path: str, row: int, width: int) -> None:
        self.step, self.path, self.row, self.width = step, Path(path), row, width

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            with self.path.open("r+b") as file:
                file.seek(data_start(self.path) + self.row * self.width * 4)
                file.write(np.full(self.width, np.nan, dtype=np.float32).tobytes())


def drafted(drafter: Any, document: Any, k: int) -> tuple[int, int]:
    """Rounds and accepted drafts of real drafting on a fixed text: the drafter reads its own drafts."""
    ids = torch.from_numpy(document.input_ids.astype(np.int64))
    features = drafter.fuse(torch.cat(list(document.hidden_states), -1))
    rounds = accepted = 0
    for start, stop in spans(document.loss_mask):
        t = int(start) - 1
        while t + 2 < stop:
            cache = drafter.new_cache()
            read, state, positions = ids[1 : t + 2], features[: t + 1], torch.arange(t + 1)
            taken = 0
            for j in range(k):
                g, logits = drafter.extend(cache, read, state, positions)
                draft = drafter.to_target(logits[-1:].argmax(-1))
                if t + 2 + j >= stop or int(draft) != int(ids[t + 2 + j]):
                    break
                taken += 1
                read, state, positions = draft, g[-1:], positions[-1:] + 1
            rounds, accepted, t = rounds + 1, accepted + taken, t + 1 + taken
    return rounds, accepted


def test_v4_simulated_acceptance_is_that_of_real_drafting(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """V4, V5: what validation reports for k = 1, 2, 3 is what a drafter with a cache gets on the same texts."""
    folder = copied(inputs, tmp_path)
    overrides = (
        "trainer.max_steps=150",
        "trainer.lr=1e-2",
        "trainer.validate_every_steps=1000",
        "trainer.clip_norm=10",
    )
    cfg = train_config(folder, tiny_target, *overrides)
    metrics, artifact, _ = trained(cfg)
    prepared, store, target = opened(cfg)
    drafter = load_drafter(artifact.folder, target.embedding())
    data = PackedDataModule(prepared, store, (1, 3, 4), drafter.t2d.numpy(), 3, "exact", 160, epochs=1)
    with torch.no_grad():
        for k in (1, 2, 3):
            walks = [drafted(drafter, stored(data, int(row)), k) for row in data.validation_rows]
            rounds, accepted = np.sum(walks, axis=0)
            assert metrics["validation"][f"simulated_acceptance_length/k_{k}"] == pytest.approx(1 + accepted / rounds)
    assert metrics["simulated_acceptance_length"] == metrics["validation"]["simulated_acceptance_length/k_3"] > 1.0


def test_t12_warm_start_keeps_the_vocabulary_and_what_was_learned(
    inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """T12: trained on, the map is bit-equal, and the first validation finds what the last one of before found.

    With new data the map stays, though these data would make another; another size means training afresh."""
    folder = copied(inputs, tmp_path)
    before, first, _ = trained(train_config(folder, tiny_target))
    overrides = (f"drafter.warm_start={first.id}", "trainer.lr=1e-12", "trainer.max_steps=1", "seed=5")
    after, second, _ = trained(train_config(folder, tiny_target, *overrides, "inputs.states=" + states_of(first)))
    assert isinstance(second, Artifact)
    assert second.id != first.id
    target = open_target(train_config(folder, tiny_target))
    old, new = (load_drafter(a.folder, target.embedding()) for a in (first, second))
    assert torch.equal(old.d2t, new.d2t)
    assert torch.equal(old.t2d, new.t2d)
    for name, value in before["validation"].items():
        assert after["validation"][name] == pytest.approx(value, abs=1e-4), name
    assert second.manifest()["warm_start"] == first.id

    other = tmp_path / "other"
    other.mkdir()
    write_prompts(other / "rows.jsonl", 12, seed=9)
    words = ("drafter.draft_vocab_size=60", "trainer.max_steps=1", "dataset.validation_samples=0")
    _, reduced, _ = trained(train_config(folder, tiny_target, *words[:2]))
    cfg = train_config(other, tiny_target, *words, f"drafter.warm_start={reduced.folder}")
    for stage in ("prepare", "extract"):
        run_stage(stage, cfg)
    _, third, _ = trained(cfg)
    prepared, _, _ = opened(cfg)
    own = build_vocab(prepared.token_counts(), 60, 400, prepared.special_ids, prepared.tokenizer_hash)
    kept = load_file(third.folder / WEIGHTS)["d2t"]
    assert torch.equal(kept, load_file(reduced.folder / WEIGHTS)["d2t"])
    assert not torch.equal(kept, own.d2t)
    cfg.drafter.draft_vocab_size = 50
    with pytest.raises(RequestError, match=r"drafter\.draft_vocab_size: found 50, expected 60.*is kept"):
        trained(cfg)


def states_of(drafter: Artifact) -> str:
    return str(drafter.folder.parents[1] / "states" / drafter.manifest()["identity"]["states"])


def test_t3_rows_that_never_have_a_loss_stop_training(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """T3: a vocabulary, here another drafter's, of tokens that the target never chooses."""
    folder = copied(inputs, tmp_path)
    words = ("drafter.draft_vocab_size=60", "trainer.log_every_steps=4")
    cfg = train_config(folder, tiny_target, *words, "trainer.max_steps=1")
    _, first, _ = trained(cfg)
    _, store, target = opened(cfg)
    chosen = [
        target.teacher_head()(store.read(sample_id, (6,))[6].float()).argmax(-1) for sample_id in store.sample_ids
    ]
    t2d = torch.ones(400, dtype=torch.bool)
    t2d[torch.cat(chosen)] = False
    t2d[t2d.nonzero()[60:]] = False
    tensors = load_file(first.folder / WEIGHTS)
    with safe_open(first.folder / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    vocabulary = {"t2d": t2d, "d2t": t2d.nonzero()[:, 0] - torch.arange(60)}
    save_file({**tensors, **vocabulary}, first.folder / WEIGHTS, metadata)
    warm = (*words, f"drafter.warm_start={first.id}", f"inputs.states={states_of(first)}")
    with pytest.raises(
        StageFailed, match=r"^drafter\.oov=mask: up to step 12 no supervised row had a loss.*stage=vocab"
    ):
        trained(train_config(folder, tiny_target, *warm, "trainer.max_steps=50"))
    metrics, _, _ = trained(train_config(folder, tiny_target, *warm, "trainer.max_steps=12", "drafter.oov=keep"))
    assert metrics["loss"] > 0


def test_profile_leaves_a_timeline_and_a_table(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    _, _, run = trained(train_config(copied(inputs, tmp_path), tiny_target, "trainer.profile=true"))
    events = json.loads((run.folder / "profile.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "_UnrollAttention" for event in events) == 3 * 3
    assert "_UnrollAttention" in (run.folder / "profile.txt").read_text()
