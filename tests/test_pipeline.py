"""The whole walk by one command on a tiny model: prompts in, a drafter folder and a table out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3 import cli
from eagle3.adapters.llama import LlamaAdapter
from eagle3.blueprint import drafter_shape
from eagle3.checkpoint import open_target
from eagle3.drafter import Eagle3Drafter
from eagle3.export import export_drafter
from tests.stages import configure

STAGES = ("prepare", "extract", "train", "export", "evaluate")


def chats(path: Path, count: int, first: int = 0) -> Path:
    """A file of short questions with answers."""
    with open(path, "w", encoding="utf-8") as file:
        for i in range(first, first + count):
            turns = [("user", f"What is the capital of France, {i}?"), ("assistant", "The capital of France is Paris.")]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def smoke(monkeypatch: pytest.MonkeyPatch, target: Path, folder: Path, samples: int, *words: str) -> int:
    """The exit code of `+experiment=smoke` on a target and some conversations, started in a folder."""
    monkeypatch.chdir(folder)
    common = ["+experiment=smoke", "model=llama", f"model.path={target}", "dataset=jsonl"]
    source = f"dataset.sources.train.path={chats(Path('train.jsonl'), samples)}"
    monkeypatch.setattr(sys, "argv", ["eagle3", *common, source, *words])
    return cli.command()


def test_smoke_runs_every_stage_once(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`+experiment=smoke`: all stages in one run, linked to what they made; again, everything is a hit."""
    asked = f"+dataset.sources.asked={{path: {chats(tmp_path / 'asked.jsonl', 3, first=50)}, role: heldout}}"
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, "seed=3", asked) == 0
    (first,) = Path("outputs/runs").glob("*/*")
    result = json.loads((first / "result.json").read_text())
    assert tuple(result["metrics"]) == STAGES
    assert result["metrics"]["extract"]["samples"] == 12
    assert 1 <= result["metrics"]["evaluate"]["acceptance_length"] <= 4
    assert result["metrics"]["evaluate"]["lossless"] is True
    lineage = json.loads((first / "artifacts.json").read_text())
    assert [entry["kind"] for entry in lineage["wrote"]] == ["prepared", "states", "drafter", "export"]
    for entry in lineage["wrote"]:
        assert (first / entry["kind"] / "manifest.json").is_file()
    assert Path(result["metrics"]["export"]["folder"], "config.json").is_file()

    before = {path: path.stat().st_mtime_ns for path in Path("outputs/artifacts").rglob("*") if path.is_file()}
    assert cli.command() == 0
    (second,) = {*Path("outputs/runs").glob("*/*")} - {first}
    assert json.loads((second / "artifacts.json").read_text())["wrote"] == []
    assert {path: path.stat().st_mtime_ns for path in Path("outputs/artifacts").rglob("*") if path.is_file()} == before
    again = json.loads((second / "result.json").read_text())["metrics"]
    assert again["train"] == result["metrics"]["train"]


def test_without_sets_nothing_is_evaluated(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, "evaluate.sets=[]") == 0
    (folder,) = Path("outputs/runs").glob("*/*")
    assert tuple(json.loads((folder / "result.json").read_text())["metrics"]) == STAGES[:-1]
    assert "5/5 evaluate left out: evaluate.sets is empty" in (folder / "run.log").read_text()


def test_a_dry_run_says_what_would_be_done_and_makes_nothing(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = f"evaluate.sets=[{chats(tmp_path / 'asked.jsonl', 2)}]"
    assert smoke(monkeypatch, tiny_target, tmp_path, 4, "dry_run=true", sets) == 0
    assert "extract, train, export, evaluate would follow" in capsys.readouterr().err
    assert not list(Path("outputs").rglob("manifest.json"))


def test_a_dry_run_ends_where_layers_would_be_added(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """States of other layers are there, which the real run adds to: the dry run must not call that a wrong request."""
    words = ["evaluate.sets=[]", "layers.ids=[1,2,4]"]
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, *words) == 0
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, *words, "dry_run=true") == 0
    assert "4/5 export" in capsys.readouterr().err, "everything is a hit"
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, words[0], "layers.ids=[2,3,5]", "dry_run=true") == 0
    assert "train, export, evaluate would follow" in capsys.readouterr().err


def test_layers_that_the_model_lacks_are_refused_before_any_work(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=llama", f"model.path={tiny_target}", "layers.ids=[2,30,58]", "dataset=custom"]
    monkeypatch.setattr(sys, "argv", ["eagle3", *words])
    assert cli.command() == 2
    assert "layers.ids: found 30 in [2, 30, 58], expected ids of 0 to 6" in capsys.readouterr().err


def test_a_drafter_that_its_server_could_not_read_is_refused_before_any_work(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=llama", f"model.path={tiny_target}", "layers.ids=[1,3,4]", "dataset=custom"]
    words += ["export.target=sglang", "drafter.norm_before_residual=true"]
    monkeypatch.setattr(sys, "argv", ["eagle3", *words])
    assert cli.command() == 2
    assert "drafter.norm_before_residual: found true, but sglang" in capsys.readouterr().err
    assert not list(Path("outputs").rglob("manifest.json"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("evaluate.sets=[heldout]", "evaluate.sets: found ['heldout'], but no source of the dataset has role=heldout"),
        ("evaluate.sets=[nowhere.jsonl]", "evaluate.sets: found 'nowhere.jsonl', expected heldout, one of"),
        ("evaluate.temperature=0.5", "evaluate.temperature: found 0.5, expected 0.0"),
        ("evaluate.compare_with=nowhere", "nowhere: expected an evaluation.json"),
        ("drafter.warm_start=nowhere", "drafter.warm_start=nowhere: found nothing at "),
        ("inputs.states=nowhere", "inputs.states=nowhere: found nothing at "),
        ("inputs.drafter=nowhere", "inputs.drafter=nowhere: found nothing at "),
        ("evaluate.sets=[train.jsonl] inputs.export=nowhere", "inputs.export=nowhere: found nothing at "),
        ("trainer.resume_from=nowhere", "trainer.resume_from=nowhere: found nothing at "),
        ("+drafter.losses.hinge=1", "drafter.losses: found ['hinge']"),
        ("drafter.losses.soft_cross_entropy=0", "drafter.losses: found {'soft_cross_entropy': 0.0}, expected a weight"),
        ("drafter.losses.soft_cross_entropy=-1", "drafter.losses.soft_cross_entropy: found -1.0, expected a finite"),
        ("+trainer.lightning.max_steps=3", "trainer.lightning.max_steps: is decided by trainer.max_steps"),
        ("hardware.accelerator=gpu hardware.devices=99", "hardware.devices: found 99, but this machine has"),
        ("hardware.training_strategy=dpp", "found 'dpp', expected one of auto, ddp, ddp_find_unused_parameters_false"),
        ("hardware.training_strategy=FSDP2", "try hardware.training_strategy=fsdp2"),
        ("hardware.training_strategy=fsdp2 trainer.optimizer=muon", "trainer.optimizer: found muon with hardware."),
        ("trainer.datamodule._target_=torch.nn.Identity", "trainer.datamodule: found torch.nn.Identity, expected"),
        ("trainer.module._target_=torch.nn.Linear", "trainer.module: found torch.nn.Linear, expected an eagle3."),
        ("trainer.lightning._target_=torch.nn.Identity", "trainer.lightning: found torch.nn.Identity, expected"),
        ("drafter.module._target_=torch.nn.Identity", "drafter.module: found torch.nn.Identity, expected an eagle3."),
        ("+trainer.callbacks.x={_target_:torch.nn.Identity}", "trainer.callbacks.x: found torch.nn.Identity, expected"),
        ("+trainer.callbacks.x={how:3}", "trainer.callbacks.x: found {'how': 3}, expected a lightning.pytorch"),
    ],
)
def test_a_later_stage_that_could_not_be_done_is_refused_before_any_work(
    wrong: str,
    message: str,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert smoke(monkeypatch, tiny_target, tmp_path, 4, *wrong.split()) == 2
    assert message in capsys.readouterr().err
    assert not list(Path("outputs").rglob("manifest.json"))


@pytest.fixture
def published(tiny_target: Path, tmp_path: Path) -> Path:
    """A drafter's folder as others publish them, of layers that are not those of the smoke experiment."""
    cfg = configure("+experiment=smoke", "model=llama", f"model.path={tiny_target}")
    target, folder = open_target(cfg), tmp_path / "published"
    drafter = Eagle3Drafter(drafter_shape(cfg.drafter, target, (1, 2, 4), 100), target.embedding())
    drafter.initialise(seed=0)
    ids = torch.arange(100)
    drafter.set_vocabulary(3 * ids, torch.zeros(400).index_fill(0, 4 * ids, 1).bool())
    folder.mkdir()
    export_drafter(drafter, target.shape, folder, torch.float32)
    return folder


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("field", ["drafter.warm_start", "inputs.export"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 9000), "safetensors: expected the weights of an exp"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: expected the config.json of an expor"),
        (lambda folder: (folder / "config.json").unlink(), "{field}: found no config.json in {folder}, expected a dra"),
        (lambda folder: rewrite(folder / "model.safetensors", lambda t: t.pop("fc.weight")), "found no fc.weight; exp"),
        (lambda folder: rewrite(folder / "model.safetensors", lambda t: t.pop("d2t")), "found no d2t, expected both m"),
    ],
)
def test_a_drafter_folder_that_is_not_whole_is_refused_before_any_work(
    spoil: Callable[[Path], object],
    message: str,
    field: str,
    published: Path,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was found at the third stage or the fifth."""
    spoil(published)
    words = [f"{field}={published}", "layers.ids=[1,2,4]", "evaluate.sets=[train.jsonl]"]
    assert smoke(monkeypatch, tiny_target, tmp_path, 4, *words) == 2
    assert message.format(field=field, folder=published) in capsys.readouterr().err
    assert not list(Path("outputs").rglob("manifest.json"))


def test_a_warm_start_of_another_shape_is_refused_before_any_work(
    published: Path,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"drafter.warm_start={published}", "evaluate.sets=[]"]
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, *words, "layers.ids=[1,2,5]") == 2
    told = f"drafter.warm_start: {published} has another shape (layer_ids (1, 2, 4) there, (1, 2, 5) here), expected"
    assert told in capsys.readouterr().err
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, *words, "drafter.head_dim=8") == 2
    assert "(layer_ids (1, 2, 4) there, (1, 3, 5) here, head_dim 12 there, 8 here), exp" in capsys.readouterr().err
    assert not list(Path("outputs").rglob("manifest.json"))
    assert smoke(monkeypatch, tiny_target, tmp_path, 12, *words, "layers.ids=[1,2,4]") == 0


@pytest.mark.parametrize(
    ("engines", "words", "field", "wrong"),
    [
        (("vllm",), "evaluate.engine=transformers hardware.engine=vllm", "evaluate.engine", "transformers"),
        (("vllm",), "evaluate.engine=vllm", "hardware.engine", "transformers"),
        (("vllm",), "stage=evaluate", "hardware.engine", "transformers"),
        (("vllm",), "stage=extract", "hardware.engine", "transformers"),
        (("vllm",), "stage=prepare dataset.answers=regenerate", "hardware.engine", "transformers"),
        (("transformers",), "hardware.engine=vllm evaluate.engine=transformers", "hardware.engine", "vllm"),
    ],
)
def test_an_engine_that_does_not_run_the_family_is_refused_by_its_field(
    engines: tuple[str, ...],
    words: str,
    field: str,
    wrong: str,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As Kimi's, which vLLM alone runs: the evaluation's engine was looked at behind training and export."""
    monkeypatch.setattr(LlamaAdapter, "engines", engines)
    sets = f"evaluate.sets=[{chats(tmp_path / 'asked.jsonl', 2)}]"
    assert smoke(monkeypatch, tiny_target, tmp_path, 4, sets, *words.split()) == 2
    told = (
        f"eagle3: {field}: the adapter llama runs with {list(engines)}, not with {wrong}; see `eagle3 stage=adapters`"
    )
    assert told in capsys.readouterr().err
    assert not list(Path("outputs").rglob("manifest.json"))


def test_a_source_that_is_not_there_is_found_before_anything_is_fetched(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["dataset.sources.train.path=nope.jsonl", "evaluate.sets=[human_eval]", "cache_dir=cache"]
    assert smoke(monkeypatch, tiny_target, tmp_path, 4, *wrong) == 2
    assert "dataset.sources.train.path: found no file nope.jsonl" in capsys.readouterr().err
    assert not Path("cache").exists()
