"""Exported drafters in the real vLLM: texts, rounds and accepted drafts by position are those of our decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import InputsConfig
from eagle3.drafter import save_drafter
from eagle3.engines import Prompt
from eagle3.engines.vllm_serving import ServedTarget
from eagle3.export import export_drafter
from eagle3.prompts import Message
from eagle3.published import import_drafter
from eagle3.tokens import prompt_ids
from tests.stages import configure, run_stage
from tests.vllm.checkpoints import RECIPES, llama
from tests.vllm.drafters import NEW_TOKENS, PROMPTS, Fitted, acceptance, fit, write_prompts
from tests.vllm.engines import configured

# Shaken harder: the full vocabulary's drafter would accept nearly everything.
LATENT = {"attention": "mla", "shake": 1.0}
QUESTIONS = ["What is the capital of France?", "Write a story about a ship.", "one two three", "Who are you?"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


def assert_served_as_decoded(cfg: Any, target: Any, fitted: Fitted, exported: Path, tmp_path: Path, k: int = 3) -> None:
    """vLLM's texts and counters with the folder equal those of our decoder on Hugging Face's target."""
    ours = fitted.decoded(import_drafter(exported, target.embedding()), k)
    prompts = [Prompt(str(i), ids, NEW_TOKENS) for i, ids in enumerate(PROMPTS)]
    longest = max(map(len, PROMPTS)) + NEW_TOKENS
    with ServedTarget(cfg, target, tmp_path / "engine.log", longest=longest, drafter=exported, k=k) as server:
        served = server.decode(prompts, batch_size=1, temperature=0.0, seed=0, stop_ids=())
    assert [served.texts[str(i)].token_ids for i in range(len(PROMPTS))] == [text.token_ids for text in ours]
    counted = acceptance(ours, k)
    assert served.acceptance == counted
    # A drafter that accepts nothing, or everything, would prove nothing.
    assert 0.3 * counted.rounds < counted.reached[1]
    assert counted.reached[k] < counted.rounds


@pytest.mark.parametrize(
    ("family", "config", "engine", "layer_ids", "reduced", "settings"),
    [
        ("llama", {}, "vllm", (1, 3, 4), True, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
        ("llama", {"rope_scaling": LLAMA3}, "vllm", (2, 5), False, {"norm_before_fc": True}),
        ("llama", {}, "speculators", (1, 3, 4, 5), True, {}),
        ("deepseek_v3", {"rope_scaling": YARN}, "vllm", (1, 2, 4), True, {"attention": "mla", "norm_output": True}),
        ("kimi_k25", {}, "vllm", (1, 2, 4), False, {**LATENT, "norm_before_residual": True, "fc_norm": True}),
        # A dense drafter of a latent target needs a GPU: the CPU engine has no block size for both kinds of attention.
    ],
    ids=[
        "norms",
        "two layers, full vocabulary, scaled rope",
        "speculators, four layers",
        "latent, DeepSeek with YaRN",
        "latent, Kimi, full vocabulary",
    ],
)
def test_served_as_decoded(
    tmp_path: Path,
    family: str,
    config: dict[str, Any],
    engine: str,
    layer_ids: tuple[int, ...],
    reduced: bool,
    settings: dict[str, Any],
) -> None:
    made = tmp_path / "target"
    made.mkdir()
    cfg, target = configured(family, RECIPES[family](made, **config))
    known = target
    if family == "kimi_k25":
        # Its language model is DeepSeek V3, which is what Hugging Face loads.
        (tmp_path / "language").mkdir()
        _, known = configured("deepseek_v3", RECIPES["deepseek_v3"](tmp_path / "language"))
    fitted = fit(known, layer_ids, reduced=reduced, **settings)
    exported = tmp_path / "exported"
    exported.mkdir()
    export_drafter(fitted.drafter, target.shape, exported, torch.float32, engine, verifier=str(made))
    assert_served_as_decoded(cfg, target, fitted, exported, tmp_path)


def test_serve_check_in_one_command(folder: Path, tmp_path: Path) -> None:
    """A dense drafter with a reduced vocabulary, from its artifact to the verdict: export, then serve_check."""
    cfg, target = configured("llama", folder)
    tokenizer = target.tokenizer()
    asked = [prompt_ids(tokenizer, target.adapter, [Message("user", text)]) for text in QUESTIONS]
    fitted = fit(target, (1, 3, 4), asked)
    made = tmp_path / "drafter"
    made.mkdir()
    save_drafter(fitted.drafter, made)
    validation = {"simulated_acceptance_length/k_3": 2.5}
    manifest = {"kind": "drafter", "id": "fitted", "metrics": {"validation": validation}}
    (made / "manifest.json").write_text(json.dumps(manifest))
    cfg.output_dir = str(tmp_path / "outputs")
    cfg.inputs = InputsConfig(drafter=str(made))
    cfg.evaluate.sets = [str(write_prompts(tmp_path / "asked.jsonl", QUESTIONS))]
    cfg.evaluate.max_new_tokens = 40
    run_stage("export", cfg)

    metrics, run = run_stage("serve_check", cfg)
    assert (metrics["prompts"], metrics["identical"], metrics["apart"]) == (4, 4, 0)
    assert metrics["acceptance_length"] == metrics["acceptance_length_ours"] > 1.3
    assert metrics["forecast"] == 2.5
    assert metrics["sets"]["asked"]["rounds"][0] == metrics["rounds"][1]
    found = json.loads((run.folder / "serve_check.json").read_text())
    assert [record["key"] for record in found["records"]] == [f"asked:{i}" for i in range(4)]


def test_a_pipeline_with_vllm_ends_with_the_servers_numbers(folder: Path, tmp_path: Path) -> None:
    """One load for answers and states, one without the drafter, one with it; two batch sizes, two temperatures."""
    for name, texts in {"rows": [f"What is {i} plus {i * 7 % 13}?" for i in range(24)], "asked": QUESTIONS}.items():
        write_prompts(tmp_path / f"{name}.jsonl", texts)
    words = [
        *("model=llama", f"model.path={folder}", "hardware=cpu_vllm", "hardware.batch_tokens=512"),
        *("dataset=jsonl", f"dataset.sources.train.path={tmp_path / 'rows.jsonl'}", "dataset.max_length=256"),
        f"+dataset.sources.asked={{path: {tmp_path / 'asked.jsonl'}, role: heldout}}",
        *("dataset.max_new_tokens=24", "dataset.validation_samples=4", "layers.ids=[1,3,5]", "store.dtype=float32"),
        *("drafter.draft_vocab_size=300", "trainer.max_steps=4", "rehearse.before_load=false"),
        *("evaluate.sets=[heldout]", "evaluate.max_new_tokens=32", "evaluate.batch_sizes=[1,3]"),
        *("evaluate.also_temperatures=[0.7]", f"output_dir={tmp_path / 'outputs'}"),
    ]
    metrics, run = run_stage("pipeline", configure(*words))
    found = metrics["evaluate"]
    assert list(found["sets"]) == ["heldout"]
    assert [(p["temperature"], p["batch_size"]) for p in found["points"]] == [(0.0, 1), (0.0, 3), (0.7, 1), (0.7, 3)]
    for point in found["points"]:
        assert point["prompts"] == len(QUESTIONS)
        assert point["speedup"] == pytest.approx(point["tokens_per_s"] / point["tokens_per_s_plain"])
        assert 1 <= point["acceptance_length"] <= 4
        assert point["acceptance_length"] == pytest.approx(1 + sum(point["per_position_unconditional"]))
        assert point["lossless"] is (True if point["temperature"] == 0 else None)
    assert found["acceptance_length"] == found["points"][0]["acceptance_length"]
    written = json.loads((run.folder / "evaluation.json").read_text())
    assert written["setting"]["engine"]["name"] == "vllm"
    assert all(record["identical"] or record["difference"]["tie"] for record in written["records"])
    card = (Path(metrics["export"]["folder"]) / "README.md").read_text()
    assert f"| vllm {written['setting']['engine']['version']}, float32 | 4 of heldout | 3 | 0.0 |" in card
