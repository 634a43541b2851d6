"""Stage train: what it refuses before it starts, what it leaves behind, and two ranks that equal one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3 import disk_room
from eagle3.artifacts import MANIFEST, Artifact, Artifacts
from eagle3.batches import PackedBatch, PackedDataModule
from eagle3.config import Config
from eagle3.drafter import WEIGHTS, DrafterShape
from eagle3.errors import RequestError, StoreError
from eagle3.runs import Run
from eagle3.stages import train
from eagle3.trackers import IDENTITY
from tests.commands import eagle3
from tests.conftest import write_target
from tests.stages import run_stage
from tests.trained import copied, make_inputs, train_config, train_words, trained, write_prompts

LATENT = (
    *("drafter=mla", "drafter.q_lora_rank=24", "drafter.kv_lora_rank=16"),
    *("drafter.qk_nope_head_dim=8", "drafter.qk_rope_head_dim=4", "drafter.v_head_dim=12"),
)


def anything(**options: Any) -> dict[str, Any]:
    """What a function makes shows when it is called."""
    return options


@pytest.fixture(scope="session")
def inputs(tiny_target: Path) -> Path:
    """A prepared and extracted data set."""
    return make_inputs(tiny_target)


@pytest.fixture(scope="module")
def done(
    inputs: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Any, Artifact, Any]:
    """One run to look at: its config, metrics, artifact and run."""
    cfg = train_config(copied(inputs, tmp_path_factory.mktemp("done")), tiny_target)
    return (cfg, *trained(cfg))


def test_every_rank_looks_for_room(
    inputs: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where srun starts the ranks, one that refused alone would leave the others waiting at the rendezvous."""
    monkeypatch.setattr(disk_room, "free_bytes", lambda folder: 0)
    cfg = train_config(copied(inputs, tmp_path), tiny_target)
    for rank in (0, 1):
        run = Run.start(cfg, []) if rank == 0 else Run.attach(cfg, rank, tmp_path)
        with pytest.raises(RequestError, match=r"training, with \d checkpoints at once, will need .*but 0 B are free"):
            train.run(cfg, run)
        run.finish("refused", 2)


def test_whoever_only_asks_for_a_drafter_does_not_wait_for_lightning() -> None:
    words = "import sys, eagle3.stages.evaluate, eagle3.stages.export; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0


def test_metrics_have_the_names_that_are_promised(done: tuple[Config, Any, Artifact, Any]) -> None:
    cfg, metrics, artifact, run = done
    names = {"steps", "tokens", "tokens_per_s", "loss", "simulated_acceptance_length", "peak_memory_bytes"}
    assert names <= set(metrics)
    assert metrics["steps"] == 12 == cfg.trainer.max_steps
    assert metrics["tokens_per_s"] > 0
    assert metrics["peak_memory_bytes"] > 1e7
    assert 1.0 <= metrics["simulated_acceptance_length"] <= 4.0
    assert artifact.manifest()["metrics"] == metrics
    result = json.loads((run.folder / "result.json").read_text())
    assert result["metrics"] == metrics


def test_artifact_says_what_the_drafter_is(done: tuple[Config, Any, Artifact, Any]) -> None:
    """C5: everything in it is plain JSON; X1: the vocabulary map is in the weights' file."""
    cfg, _, artifact, _ = done
    manifest = artifact.manifest()
    assert manifest["layer_ids"] == [1, 3, 4]
    assert "entering decoder layer k" in manifest["layer_convention"]
    assert manifest["vocabulary"]["size"] == 300
    assert manifest["vocabulary"]["coverage"] == 1.0
    assert manifest["samples"] == {"train": 20, "validation": 4}
    assert [name.split("/")[0] for name in manifest["made_from"]] == ["states", "prepared"]
    with safe_open(artifact.folder / WEIGHTS, "pt") as file:
        shape = DrafterShape.from_plain(json.loads(file.metadata()["shape"]))
    assert shape == DrafterShape.from_plain(manifest["shape"])
    assert shape.layer_ids == (1, 3, 4)
    weights = load_file(artifact.folder / WEIGHTS)
    assert weights["d2t"].dtype == torch.int64
    assert int(weights["t2d"].sum()) == 300
    assert not any(name.startswith("embed") for name in weights)
    expected = ["checkpoints", WEIGHTS, "manifest.json", IDENTITY]
    assert sorted(path.name for path in artifact.folder.iterdir()) == expected
    assert cfg.drafter.draft_vocab_size == 300


def test_log_tells_the_story(done: tuple[Config, Any, Artifact, Any]) -> None:
    """D14 too: coverage, and what only fills the vocabulary up to its size."""
    _, _, artifact, run = done
    assert 0 < artifact.manifest()["vocabulary"]["padded"] < 300
    log = (run.folder / "run.log").read_text()
    for words in (
        r"layers \[1, 3, 4\], draft vocabulary 300 of 400 \(100\.00% of the training answers' tokens, [\d.]+% of "
        "the validation answers'; "
        rf"{artifact.manifest()['vocabulary']['padded']} ids that occur in none fill it up\)",
        r"20 samples, [\d,]+ tokens an epoch, \d+ first drafts supervised; 4 validation samples",
        r"12 optimizer steps of 1 x 1 batches of up to 160 tokens, 3 unroll steps",
        r"step 2/12: loss [\d.]+, accuracy [\d.]+% at the first draft, gradient norm [\d.]+, lr ",
        r"validation at step 12: .* simulated acceptance length [\d.]+ \(k 3\)",
        rf"{artifact.id}, of step (4|8|12) \(best validation\)",
    ):
        assert re.search(words, log), words
    assert "Tip:" not in log
    assert (run.folder / "csv/metrics.csv").is_file()
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["train/grad_norm"] > 0
    assert metrics[0]["train/loss"] > metrics[-2]["train/loss"], "nothing was learned"


def test_the_same_again_is_a_hit(done: tuple[Config, Any, Artifact, Any]) -> None:
    cfg, metrics, artifact, _ = done
    operational = dataclasses.replace(
        cfg, trainer=dataclasses.replace(cfg.trainer, log_every_steps=1, keep_checkpoints=9, num_workers=1)
    )
    again, run = run_stage("train", operational)
    assert again == metrics
    assert "train: hit" in (run.folder / "run.log").read_text()
    assert not artifact.partial.exists()


@pytest.mark.parametrize(
    "override",
    [
        *("layers.ids=[1,3,5]", "drafter.unroll_steps=2", "drafter.step_decay=0.9", "drafter.oov=keep", "seed=1"),
        *("trainer.lr=1e-2", "trainer.max_steps=13", "trainer.batch_tokens=100", "drafter.fc_norm=true"),
        *("drafter.draft_vocab_size=299", "drafter.draft_vocab_size=null"),
    ],
)
def test_what_changes_the_result_changes_the_id(
    override: str, done: tuple[Config, Any, Artifact, Any], inputs: Path, tiny_target: Path
) -> None:
    """D15 too: another vocabulary's drafter is never taken."""
    cfg, _, artifact, _ = done
    artifacts = Artifacts(Path(cfg.output_dir) / "artifacts")
    folder = Path(cfg.output_dir).parent
    given = "inputs.states=" + artifact.manifest()["identity"]["states"]
    assert train.drafter(train_config(folder, tiny_target, given), artifacts).id == artifact.id
    assert train.drafter(train_config(folder, tiny_target, given, override), artifacts).id != artifact.id


def test_a_drafter_with_latent_attention_learns(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    _, artifact, run = trained(train_config(copied(inputs, tmp_path), tiny_target, *LATENT))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-2]["train/loss"] < lines[0]["train/loss"] - 0.2
    assert lines[-1]["validation/simulated_acceptance_length"] > 1.02
    shape = DrafterShape.from_plain(artifact.manifest()["shape"])
    assert (shape.attention, shape.head_dim, shape.num_key_value_heads) == ("mla", 12, shape.num_attention_heads)
    weights = load_file(artifact.folder / WEIGHTS)
    names = {name.removeprefix("midlayer.self_attn.") for name in weights if "self_attn" in name}
    assert names == {
        *("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight"),
        *("kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"),
    }


def test_dry_run_says_and_does_nothing(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    cfg = train_config(copied(inputs, tmp_path), tiny_target, "dry_run=true")
    metrics, run = run_stage("train", cfg)
    assert metrics == {}
    assert "12 optimizer steps" in (run.folder / "run.log").read_text()
    assert not list((tmp_path / "outputs/artifacts").glob("drafter/*"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layers.ids=[1,2,4]"], r"layers: .* holds layers \[1, 3, 4, 6\].*stage=extract 'layers\.ids=\[1,2,4\]'"),
        (["drafter.draft_vocab_size=401"], r"drafter\.draft_vocab_size: found 401, expected 2 to 400"),
        (["drafter.num_key_value_heads=3"], r"drafter\.num_key_value_heads: found 3 for 4 attention heads"),
        (["drafter.head_dim=7"], r"drafter\.head_dim: found 7, expected an even number"),
        (["drafter=mla"], r"drafter\.attention: found mla .*LlamaForCausalLM, which has no q_lora_rank, kv_lora_rank"),
        (["drafter.kv_lora_rank=8"], r"drafter\.kv_lora_rank: found 8 with drafter\.attention=dense.*drafter=mla"),
        (["drafter=mla", "drafter.head_dim=8"], r"drafter\.head_dim: found 8, expected null .*qk_nope_head_dim"),
        ([*LATENT, "drafter.qk_rope_head_dim=5"], r"drafter\.qk_rope_head_dim: found 5, expected an even number"),
        (["+drafter.losses.hinge=1"], r"drafter\.losses: found \['hinge'\]"),
        (["+trainer.lightning.max_steps=3"], r"trainer\.lightning\.max_steps: is decided by trainer\.max_steps"),
        (["drafter.warm_start=none-such"], r"drafter.*none-such"),
        (["trainer.module._target_=builtins.dict"], r"trainer\.module: found builtins\.dict, expected an eagle3"),
        (["trainer.module._target_=tests.test_train.anything"], r"trainer\.module: .*which made a dict, expected an"),
        (["trainer.datamodule._target_=tests.test_train.anything"], r"trainer\.datamodule: .*which made a dict, exp"),
        (["trainer.lightning._target_=tests.test_train.anything"], r"trainer\.lightning: .*which made a dict, exp"),
        (["+trainer.callbacks.x={_target_: os.getcwd}"], r"callbacks\.x: found os\.getcwd, which made a str, exp"),
        (["+trainer.callbacks.x=3"], r"trainer\.callbacks\.x: found 3, expected a lightning\.pytorch\.Callback; name"),
        (["drafter.module._target_=torch.nn.Identity"], r"drafter\.module: found torch\.nn\.Identity, expected an eag"),
        (["drafter.module._target_=tests.test_train.anything"], r"drafter\.module: .*which made a dict, expected an"),
    ],
)
def test_wrong_requests_are_refused_before_training(
    overrides: list[str], words: str, inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    cfg = train_config(copied(inputs, tmp_path), tiny_target, *overrides)
    with pytest.raises(RequestError, match=words):
        run_stage("train", cfg)


def test_s10_states_of_other_tokens_or_of_another_target_are_refused(
    inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = copied(inputs, tmp_path)
    (states,) = (folder / "outputs/artifacts/states").iterdir()
    given = f"inputs.states={states.name}"
    other = write_target(tmp_path / "other", seed=3)
    with pytest.raises(RequestError, match="another target"):
        run_stage("train", train_config(folder, other, given))
    (prepared,) = (folder / "outputs/artifacts/prepared").iterdir()
    ids = bytearray((prepared / "input_ids.bin").read_bytes())
    ids[400:404] = (int.from_bytes(ids[400:404], "little") ^ 1).to_bytes(4, "little")
    (prepared / "input_ids.bin").write_bytes(bytes(ids))
    with pytest.raises(RequestError, match=r"first difference at position \d+"):
        run_stage("train", train_config(folder, tiny_target, given))


def test_a_states_file_that_was_cut_short_is_named_before_training(
    inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """It was found at the first batch with its rows, behind any number of steps."""
    folder = copied(inputs, tmp_path)
    cfg = train_config(folder, tiny_target)
    shard = next((folder / "outputs/artifacts/states").glob("*/shard-00000"))
    for name in ("layer-003.safetensors", "final.safetensors"):
        whole = (shard / name).read_bytes()
        os.truncate(shard / name, len(whole) - 1)
        with pytest.raises(
            StoreError, match=rf"/{name}: found {len(whole) - 1} bytes, expected {len(whole)} .*extract"
        ):
            run_stage("train", cfg)
        (shard / name).write_bytes(whole)
    assert not list((folder / "outputs/artifacts").glob("drafter/*"))


def test_a_drafter_to_go_on_from_is_looked_into_before_the_pipeline(
    inputs: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """By the field that names it: a shape that differs was told as drafter.warm_start's, at the third stage."""
    folder = copied(inputs, tmp_path)
    _, first, _ = trained(train_config(folder, tiny_target, "trainer.max_steps=2"))
    for field in ("trainer.resume_from", "drafter.warm_start"):
        words = (
            rf"^{field}: {first.folder} has another shape \(layer_ids \(1, 3, 4\) there, \(1, 2, 4\) here\).*{field}"
        )
        cfg = train_config(folder, tiny_target, "layers.ids=[1,2,4]", f"{field}={first.id}")
        for stage in ("pipeline", "train"):
            with pytest.raises(RequestError, match=words if stage == "pipeline" else r"^layers: .* holds layers"):
                run_stage(stage, cfg)
    manifest = json.loads((first.folder / MANIFEST).read_text())
    (first.folder / MANIFEST).write_text(json.dumps({**manifest, "files": {}}))  # as earlier versions left it
    os.truncate(first.folder / WEIGHTS, 9000)
    for field in ("trainer.resume_from", "drafter.warm_start", "inputs.drafter"):
        with pytest.raises(StoreError, match=rf"^{first.folder / WEIGHTS}: expected a drafter's weights"):
            run_stage("pipeline", train_config(folder, tiny_target, f"{field}={first.id}", "trainer.max_steps=3"))


def test_without_states_the_command_that_makes_them_is_named(inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = copied(inputs, tmp_path)
    shutil.rmtree(folder / "outputs/artifacts/states")
    with pytest.raises(RequestError, match=r"expected a complete states artifact; run `eagle3 stage=extract`"):
        run_stage("train", train_config(folder, tiny_target))


class WholeSteps(PackedDataModule):
    """One rank that gets the documents of all ranks' batches of a plan for two."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "ranks": 2})

    def train_batch(self, index: int) -> PackedBatch:
        rows = self.train_rows[np.concatenate(self.plan.documents(index))]
        return self._pack(rows, self.supervised[self.plan.step_documents(index)].sum(axis=0))

    def validation_batches(self) -> list[Any]:
        return [self.validation_rows]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_t9_two_ranks_equal_one(strategy: str, inputs: Path, tiny_target: Path, tmp_path: Path) -> None:
    """T9, W3, C4: through the command. Batches so small that some rank's is empty; losses, validation and weights are
    those of one process that gets both batches at once; one run folder, one drafter."""
    assert_two_ranks_equal_one(
        inputs, tiny_target, tmp_path, "hardware.devices=2", f"hardware.training_strategy={strategy}"
    )


def assert_two_ranks_equal_one(
    inputs: Path, target: Path, folder: Path, *two: str, both: tuple[str, ...] = (), atol: float = 1e-5
) -> None:
    """`two` makes the second run's ranks; `both` runs have the other overrides; `atol` is for the weights."""
    overrides = (
        "trainer.batch_tokens=60",
        "trainer.max_steps=null",
        "trainer.max_epochs=1",
        "trainer.log_every_steps=1",
        *both,
    )
    alone = copied(inputs, folder / "alone")
    union = ("trainer.datamodule._target_=tests.test_train.WholeSteps", "trainer.accumulate=2")
    cfg = train_config(alone, target, *overrides, *union)
    metrics, one, run_alone = trained(cfg)

    pair = copied(inputs, folder / "pair")
    command = eagle3(*train_words(pair, target, *overrides, "trainer.accumulate=2", *two), "stage=train", cwd=pair)
    assert command.returncode == 0, command.stderr
    runs = [path for path in (pair / "outputs/runs").glob("*/*-train-*") if path.is_dir()]
    assert len(runs) == 1
    assert (runs[0] / "rank-1.log").is_file()
    (other,) = [path for path in (pair / "outputs/artifacts/drafter").iterdir() if path.is_dir()]
    for name, tensor in load_file(other / WEIGHTS).items():
        torch.testing.assert_close(tensor, load_file(one.folder / WEIGHTS)[name], rtol=1e-4, atol=atol)
    assert json.loads((other / "manifest.json").read_text())["metrics"]["tokens"] == pytest.approx(
        metrics["tokens"], rel=0.1
    )  # each rank counts its own, of like loads
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run_alone.folder, runs[0])
    ]
    assert len(lines[0]) == len(lines[1]) > 5
    for mine, theirs in zip(*lines, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"time"}:
            if not name.endswith(("_per_s", "_ms", "_bytes", "mfu")):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_training_without_validation_samples(tiny_target: Path, tmp_path: Path) -> None:
    """It is said once, the drafter is the last step's, and its last checkpoint is there to train longer from.

    W6: trackers that fail at their start, in the middle and at the end cost a warning each, and no step.
    """
    write_prompts(tmp_path / "rows.jsonl", 8)
    words = ("dataset.validation_samples=0", "dataset.max_new_tokens=8")
    fail = [
        f"+logger.loggers.{where}={{_target_: tests.test_trackers.Tracker, broken: {where}}}"
        for where in ("init", "log", "finish")
    ]
    cfg = train_config(tmp_path, tiny_target, *words, "trainer.max_steps=4", *fail)
    for stage in ("prepare", "extract"):
        run_stage(stage, cfg)
    metrics, artifact, run = trained(cfg)
    assert metrics["steps"] == 4
    assert metrics["best_step"] is None
    assert metrics["simulated_acceptance_length"] is None
    log = (run.folder / "run.log").read_text()
    assert log.count("no validation samples") == 1
    for where in ("init", "log", "finish"):
        assert log.count(f"logger.loggers.{where}: {where} failed (ConnectionError") == 1
    assert log.count("WARNING") == 3
    longer = train_config(tmp_path, tiny_target, *words, "trainer.max_steps=6", f"trainer.resume_from={artifact.id}")
    assert trained(longer)[0]["steps"] == 6
