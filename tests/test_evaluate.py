"""The stages export and evaluate on a tiny target, with a drafter that nobody trained."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3 import cli
from eagle3.adapter import Adapter
from eagle3.adapters.llama import LlamaAdapter
from eagle3.checkpoint import open_target
from eagle3.config import Config
from eagle3.decoding import Decoded
from eagle3.drafter import DrafterShape, Eagle3Drafter, save_drafter
from eagle3.errors import RequestError, StageFailed
from eagle3.evaluation import OURS, Difference, PromptResult
from eagle3.runs import Run
from eagle3.stages.evaluate import _check_lossless, check_config
from tests.conftest import CHAT_TEMPLATE
from tests.stages import configure, run_stage
from tests.stub import Stub

QUESTIONS = ["What is the capital of France?", "Write a story.", "one two three", "Who are you?"]
METRICS = {
    *("acceptance_length", "accepted_drafts", "k", "temperature", "per_position", "lossless"),
    *("tokens_per_s", "tokens_per_s_plain", "speedup"),
}


def write_drafter(folder: Path, tiny_target: Path, **shape: Any) -> Path:
    """A drafter artifact with random weights that reads layers 1, 3 and 4 of the tiny target."""
    from transformers import AutoModelForCausalLM

    embedding = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).get_input_embeddings().weight
    vocab, hidden = embedding.shape
    sizes = {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "layer_ids": (1, 3, 4),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 1024,
    }
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    save_drafter(Eagle3Drafter(DrafterShape(**{**sizes, **shape}), embedding.detach()), folder)
    validation = {"simulated_acceptance_length/k_2": 1.4, "simulated_acceptance_length/k_3": 1.5}
    metrics = {"steps": 7000, "simulated_acceptance_length": 1.6, "validation": validation}
    manifest = {"kind": "drafter", "id": "abc", "metrics": metrics}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("artifacts") / "a-drafter", tiny_target)


@pytest.fixture
def cfg(tiny_target: Path, drafter: Path, tmp_path: Path) -> Config:
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return configure(
        "+experiment=smoke",
        "model=llama",
        f"model.path={tiny_target}",
        "dataset=jsonl",
        f"dataset.sources.train.path={tmp_path / 'asked.jsonl'}",
        f"inputs.drafter={drafter}",
        f"evaluate.sets=[{tmp_path / 'asked.jsonl'}]",
        "evaluate.prompts_per_set=3",
        "evaluate.baselines=[]",
        f"output_dir={tmp_path / 'outputs'}",
    )


def change(cfg: Config, group: str, **fields: Any) -> Config:
    return dataclasses.replace(cfg, **{group: dataclasses.replace(getattr(cfg, group), **fields)})


def test_export_writes_a_folder_with_card_and_manifest_once(cfg: Config, tiny_target: Path) -> None:
    metrics, run = run_stage("export", cfg)
    folder = Path(metrics["folder"])
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "manifest.json",
    }
    assert metrics["checks"]["logits_equal"]
    card = (folder / "README.md").read_text()
    for part in (
        f"vllm serve {tiny_target}",
        f'"model": "{folder}", "num_speculative_tokens": 3',
        "[1, 3, 4]",
        "7,000",
        "1.600",
    ):
        assert part in card
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["drafter"] == "abc"
    assert manifest["training"]["steps"] == 7000
    assert (run.folder / "export").resolve() == folder

    written = (folder / "model.safetensors").stat().st_mtime_ns
    again, _ = run_stage("export", cfg)
    assert again == metrics
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_the_cards_commands_run_from_any_folder(
    cfg: Config, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target named by a relative path, an output folder that Hydra and a shell read only in quotes."""
    monkeypatch.chdir(tiny_target.parent)
    cfg = dataclasses.replace(change(cfg, "model", path=tiny_target.name), output_dir=str(tmp_path / "my ö outputs"))
    folder = Path(run_stage("export", cfg)[0]["folder"])
    lines = (folder / "README.md").read_text().split("\n    ")
    serve = shlex.split(next(line for line in lines if line.startswith("vllm serve")))
    assert Path(serve[2]) == tiny_target
    assert json.loads(serve[4])["model"] == str(folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    measure = next(line for line in lines if line.startswith("eagle3 stage=evaluate"))
    words = [*shlex.split(measure), f"evaluate.sets=[{tmp_path / 'asked.jsonl'}]", "evaluate.max_new_tokens=4"]
    monkeypatch.setattr(sys, "argv", words)
    assert cli.command() == 0, capsys.readouterr().err
    assert "Texts with and without the drafter are identical" in capsys.readouterr().out


def test_an_evaluation_without_the_training_data_says_what_to_leave_out(cfg: Config) -> None:
    words = r"^prepared: found nothing.*eagle3 stage=prepare.*or leave out .*heldout in evaluate\.sets and bigram"
    with pytest.raises(RequestError, match=words):
        run_stage("evaluate", change(cfg, "evaluate", baselines=["bigram"]))


def test_texts_end_where_the_checkpoint_says(cfg: Config, tiny_target: Path, tmp_path: Path) -> None:
    """As prepare lets them end, and a server: generation_config.json may name ends that the tokenizer does not."""
    target = shutil.copytree(tiny_target, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3, 400))}))
    _, run = run_stage("evaluate", change(cfg, "model", path=str(target)))
    records = json.loads((run.folder / "evaluation.json").read_text())["records"]
    assert {(record["new_tokens"], record["finish"]) for record in records} == {(1, "stop")}


def test_s8_a_half_written_drafter_is_refused(cfg: Config, tmp_path: Path) -> None:
    (tmp_path / "drafters" / "x.partial").mkdir(parents=True)
    with pytest.raises(RequestError, match=r"half-written.*eagle3 stage=train"):
        run_stage("export", change(cfg, "inputs", drafter=str(tmp_path / "drafters" / "x")))


def test_another_server_is_refused_naming_those_that_are_supported(cfg: Config) -> None:
    with pytest.raises(RequestError, match=r"export\.target.*vllm or sglang or speculators or hf"):
        configure("export.target=tensorrt")


def test_x6_a_server_that_cannot_read_the_drafter_is_refused_before_anything_is_written(cfg: Config) -> None:
    with pytest.raises(RequestError, match=r"export\.engine_version: found '0\.9\.0'"):
        run_stage("export", change(cfg, "export", engine_version="0.9.0"))
    assert not list(Path(cfg.output_dir).rglob("model.safetensors"))


@pytest.mark.parametrize("target", ["sglang", "speculators", "hf"])
def test_every_export_target_is_read_back_and_measured(cfg: Config, target: str) -> None:
    metrics, _ = run_stage("export", change(cfg, "export", target=target))
    folder = Path(metrics["folder"])
    assert metrics["checks"]["logits_equal"]
    assert metrics["checks"]["rules"].startswith(target)
    evaluated, _ = run_stage("evaluate", change(cfg, "inputs", drafter=None, export=str(folder)))
    assert evaluated["acceptance_length_all"] >= 1
    card = (folder / "README.md").read_text()
    length = evaluated["sets"]["asked"]["acceptance_length"]
    shown = "-" if length is None else f"{length:.3f}"
    assert f"| eagle3's decoder, float32 | 3 of asked | 3 | 0.0 | {shown} |" in card


def test_a_short_drafter_warns(cfg: Config, tiny_target: Path, tmp_path: Path, caplog: Any) -> None:
    short = write_drafter(tmp_path / "short", tiny_target, max_position_embeddings=64)
    with caplog.at_level(logging.WARNING, logger="eagle3"):
        run_stage("export", change(cfg, "inputs", drafter=str(short)))
    assert "max_position_embeddings=64" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_dtype_is_the_users_choice(cfg: Config, dtype: str) -> None:
    metrics, _ = run_stage("export", change(cfg, "export", dtype=dtype))
    assert json.loads((Path(metrics["folder"]) / "config.json").read_text())["dtype"] == dtype


def test_evaluate_reports_every_set_and_prompt(cfg: Config) -> None:
    metrics, run = run_stage("evaluate", cfg)
    assert metrics["sets"].keys() == {"asked"}
    for summary in (metrics, metrics["sets"]["asked"]):
        assert set(summary) >= METRICS
        assert (summary["k"], summary["temperature"], summary["lossless"]) == (3, 0.0, True)
    assert metrics["simulated_acceptance_length"] == 1.5
    assert (metrics["prompts"], metrics["skipped"]) == (3, 0)

    found = json.loads((run.folder / "evaluation.json").read_text())
    setting = found["setting"]
    assert setting["engine"]["name"] == "transformers"
    assert set(setting) >= {"k", "temperature", "max_new_tokens", "target", "prompts", "drafter"}
    assert setting["target"]["chat_template"]
    assert [record["key"] for record in found["records"]] == ["asked:0", "asked:1", "asked:2"]
    for record in found["records"]:
        assert record["identical"] or record["difference"]["tie"]
        assert record["new_tokens"] <= 16
        assert record["accepted_by_round"]
    assert "acceptance length" in (run.folder / "run.log").read_text()


def test_v3_an_evaluation_is_shown_beside_an_earlier_one_with_what_differs(
    cfg: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """V3: template and prompts count by their content, the engine by its version; the drafter may differ."""
    cfg = change(cfg, "evaluate", prompts_per_set=1, max_new_tokens=4)
    _, first = run_stage("evaluate", cfg)
    cfg = change(cfg, "evaluate", compare_with=str(first.folder))
    with caplog.at_level(logging.WARNING, logger="eagle3"):
        _, again = run_stage("evaluate", cfg)
    assert "measured differently" not in caplog.text
    shown = rf"evaluate: asked: acceptance length (\d\.\d+), \1 in {first.folder}"
    assert re.search(shown, (again.folder / "run.log").read_text())
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "Another one?"}) + "\n")
    path = first.folder / "evaluation.json"
    path.write_text(path.read_text().replace('"version": "', '"version": "0.'))
    other = change(cfg, "model", chat_template=CHAT_TEMPLATE + "{# another #}")
    with caplog.at_level(logging.WARNING, logger="eagle3"):
        run_stage("evaluate", change(other, "evaluate", k=2))
    (warning,) = [record.getMessage() for record in caplog.records if "measured differently" in record.getMessage()]
    for name in ("engine.version: 0.", "k: 3, 2", "prompts.asked: ", "target.chat_template: "):
        assert name in warning
    assert warning.count(";") == 4
    with pytest.raises(RequestError, match=r"nowhere: expected an evaluation\.json"):
        run_stage("evaluate", change(cfg, "evaluate", compare_with=str(tmp_path / "nowhere")))


def test_evaluate_takes_the_exported_folder(cfg: Config) -> None:
    direct, _ = run_stage("evaluate", cfg)
    exported, _ = run_stage("export", cfg)
    by_lineage, run = run_stage("evaluate", cfg)
    named, _ = run_stage("evaluate", change(cfg, "inputs", drafter=None, export=exported["folder"]))
    assert by_lineage["drafter"] == named["drafter"] == exported["folder"] != direct["drafter"]
    assert json.loads((run.folder / "artifacts.json").read_text())["read"][0]["kind"] == "export"
    for metrics in (by_lineage, named):
        assert metrics["acceptance_length_all"] == direct["acceptance_length_all"]
        assert metrics["simulated_acceptance_length"] == 1.5


def test_nothing_exported_names_the_command_that_does(cfg: Config) -> None:
    with pytest.raises(RequestError, match=r"eagle3 stage=export"):
        run_stage("evaluate", change(cfg, "inputs", drafter=None, export="0123456789abcdef"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.7}, r"evaluate\.temperature: found 0\.7, expected 0\.0.*evaluate\.engine=vllm"),
        ({"batch_sizes": [1, 8]}, r"evaluate\.batch_sizes: found \[1, 8\], expected \[1\]"),
        ({"also_k": [5]}, r"evaluate\.also_k: found \[5\], expected \[\]"),
        ({"baselines": ["trigram"]}, r"evaluate\.baselines: found \['trigram'\].*untrained.*bigram"),
        ({"sets": []}, r"evaluate\.sets"),
        ({"sets": ["nowhere.jsonl"]}, r"evaluate\.sets: found 'nowhere\.jsonl'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_loads(cfg: Config, fields: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run_stage("evaluate", change(cfg, "evaluate", **fields))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (
            "evaluate",
            r"^evaluate\.engine: vllm is not installed; try .*, or evaluate\.engine=transformers for",
        ),
        ("serve_check", "^stage=serve_check: vllm is not installed; try `pip install.*CPU$"),
    ],
)
def test_a_missing_engine_is_named_before_anything_loads(cfg: Config, stage: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run_stage(stage, change(cfg, "evaluate", engine="vllm"))


def test_a_server_may_be_asked_for_a_family_whose_states_only_the_transformers_engine_gives(
    cfg: Config, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every adapter has it that says nothing of engines: serving needs none of its hooks."""
    Stub(tiny_target, tmp_path, monkeypatch)
    monkeypatch.setattr(LlamaAdapter, "engines", Adapter.engines)
    check_config(change(cfg, "evaluate", engine="vllm"))


def test_a_prompt_that_leaves_no_room_is_skipped_and_counted(cfg: Config, tmp_path: Path) -> None:
    rows = [{"prompt": "word " * 2000}, {"prompt": "short"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics, _ = run_stage("evaluate", change(cfg, "evaluate", sets=[str(tmp_path / "long.jsonl")]))
    assert (metrics["prompts"], metrics["skipped"]) == (1, 1)


def test_e13_a_drafter_of_another_target_warns(cfg: Config, tmp_path: Path, caplog: Any) -> None:
    exported, _ = run_stage("export", cfg)
    path = Path(exported["folder"]) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["target"]["quantization"] = "fp8"
    path.write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING, logger="eagle3"):
        run_stage("evaluate", cfg)
    assert "made for another target: quantization: fp8, None" in caplog.text


def test_e13_a_drafter_is_exported_for_its_own_target_only(cfg: Config, tiny_target: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", tiny_target)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["target"] = {**open_target(cfg).fingerprint(), "quantization": "fp8"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match=r"another target than model\.path=.*: quantization 'fp8' there, None here"):
        run_stage("export", change(cfg, "inputs", drafter=str(folder)))
    assert not list(Path(cfg.output_dir).rglob("model.safetensors"))


def test_s9_a_link_that_leads_nowhere_is_named_with_where_it_led(cfg: Config, tmp_path: Path) -> None:
    """S9: also which artifacts are there; a run folder's links lead nowhere once an artifact is deleted."""
    run_stage("export", cfg)
    (exported,) = [path.parent for path in Path(cfg.output_dir).glob("artifacts/export/*/manifest.json")]
    (tmp_path / "export").symlink_to(tmp_path / "gone")
    words = rf"^inputs\.export={tmp_path}/export: found nothing at {tmp_path}/gone, .*\(there: {exported.name}\)"
    with pytest.raises(RequestError, match=words):
        run_stage("evaluate", change(cfg, "inputs", export=str(tmp_path / "export")))


def test_a_text_that_the_drafter_changed_fails_the_stage(cfg: Config) -> None:
    run = Run.start(cfg, [])
    plain, speculative = Decoded([1, 2], "length", 0, (), 1.0), Decoded([1, 3], "length", 3, (0,), 1.0)
    acceptance = {OURS: speculative.acceptance}

    def result(margin: float) -> PromptResult:
        difference = Difference(1, 2, 3, margin=margin, tolerance=1e-4)
        return PromptResult("own:4", 9, plain, speculative, difference, acceptance, "")

    _check_lossless(run, {"own": [result(1e-6)]})
    with pytest.raises(StageFailed, match=r"1 outputs.*own own:4: at new token 1 .* 2 plainly, 3 .*0\.25 above"):
        _check_lossless(run, {"own": [result(1e-6), result(0.25)]})
    run.finish("done", 0)
