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
from eagle3.rendering import Template
from eagle3.tokens import prompt_ids
from tests.stages import run_stage
from tests.vllm.checkpoints import RECIPES, llama
from tests.vllm.drafters import NEW_TOKENS, PROMPTS, QUESTIONS, Fitted, acceptance, fit, write_prompts
from tests.vllm.engines import configured

# Shaken harder: the full vocabulary's drafter would accept nearly everything.
LATENT = {"attention": "mla", "shake": 1.0}
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
        ("llama", {"rope_scaling": LLAMA3}, "vllm", (2, 5), False, {"norm_before_fc": True}),
        ("llama", {}, "speculators", (1, 3, 4, 5), True, {}),
        ("deepseek_v3", {"rope_scaling": YARN}, "vllm", (1, 2, 4), True, {"attention": "mla", "norm_output": True}),
        ("kimi_k25", {}, "vllm", (1, 2, 4), False, {**LATENT, "norm_before_residual": True, "fc_norm": True}),
        # A dense drafter of a latent target needs a GPU: the CPU engine has no block size for both kinds of attention.
    ],
    ids=[
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
    """A dense drafter, its vocabulary reduced and its norms elsewhere than usual, from its artifact to the verdict."""
    cfg, target = configured("llama", folder)
    tokenizer = target.tokenizer()
    template = Template(tokenizer, target.adapter)
    asked = [prompt_ids(template, [Message("user", text)]) for text in QUESTIONS]
    fitted = fit(target, (1, 3, 4), asked, norm_before_residual=True, fc_norm=True, norm_output=True)
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
    # A drafter that accepts nothing, or everything, would prove nothing.
    assert 1.3 < metrics["acceptance_length"] == metrics["acceptance_length_ours"] < 4
    assert metrics["forecast"] == 2.5
    assert metrics["sets"]["asked"]["rounds"][0] == metrics["rounds"][1]
    found = json.loads((run.folder / "serve_check.json").read_text())
    assert [record["key"] for record in found["records"]] == [f"asked:{i}" for i in range(4)]
