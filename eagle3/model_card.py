"""README.md of an exported folder: what the drafter is, what made it, what it accepts, how to serve it (step 7).

Everything on the card comes from manifests: of the drafter, of the prepared set behind it, and of the export itself,
where evaluations leave what they measured. So a card can be written again when something more was measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3 import layers
from eagle3.artifacts import Artifact, Artifacts
from eagle3.drafter import DrafterShape
from eagle3.overrides import override
from eagle3.vocab import coverage_words

CARD = "README.md"
ROLES = ("train", "heldout")
SERVE = {
    "vllm": "vllm serve {model} --speculative-config {speculative}",
    "speculators": "vllm serve {model} --speculative-config {speculative}",
    "sglang": (
        "python -m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens {tokens}"
    ),
}

# Overrides of an evaluation that needs no prepared set: the one that a card's reader can run.
WITHOUT_DATA = "'evaluate.sets=[mt_bench,human_eval,gsm8k]' 'evaluate.baselines=[untrained]'"


def card_facts(
    drafter: Mapping[str, Any], prepared: Mapping[str, Any], shape: DrafterShape, rounding: float
) -> dict[str, str]:
    """The card's list, from the manifests of the drafter and of its prepared set (empty when it is gone)."""
    metrics = drafter.get("metrics", {})
    facts = {
        "Layers read": f"{list(shape.layer_ids)} ({layers.CONVENTION})",
        "Layer": {"dense": "dense (Llama's)", "mla": "latent attention (DeepSeek's)"}[shape.attention],
        "Draft vocabulary": f"{shape.draft_vocab_size} of {shape.vocab_size} tokens",
        "Longest text": f"{shape.max_position_embeddings} positions",
    }
    vocabulary = drafter.get("vocabulary", {})
    if vocabulary.get("coverage") is not None:
        words = coverage_words(vocabulary["coverage"], vocabulary.get("validation_coverage"))
        facts["Draft vocabulary"] += f"; {words}"
    sources = prepared.get("report", {}).get("sources", {})
    if sources:
        facts |= _data_facts(sources, prepared["metrics"])
    samples = drafter.get("samples")
    if samples:
        left_out = ", ".join(f"{count} with {why}" for why, count in drafter.get("left_out", {}).items() if count)
        facts["Trained on"] = f"{samples['train']:,} samples, {samples['validation']:,} more kept for validation"
        facts["Trained on"] += f"; left out: {left_out}" if left_out else ""
    for name, label in {
        "steps": "Optimizer steps",
        "tokens": "Tokens trained on",
        "simulated_acceptance_length": "Simulated acceptance length on validation data",
    }.items():
        value = metrics.get(name)
        if value is not None:
            facts[label] = f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
    facts["Rounding of logits by the stored dtype"] = f"{rounding:.2g}"
    return facts


def _data_facts(sources: Mapping[str, Mapping[str, Any]], counted: Mapping[str, Any]) -> dict[str, str]:
    """What was learned from, and apart from it the prompts that were kept out."""
    kept = {role: {name: s["kept"] for name, s in sources.items() if s.get("role", "train") == role} for role in ROLES}
    names = {role: ", ".join(f"{count:,} of {name}" for name, count in found.items()) for role, found in kept.items()}
    facts = {
        "Learned from": f"{sum(kept['train'].values()):,} conversations ({names['train']}): {counted['samples']:,} "
        f"samples of {counted['tokens']:,} tokens, {counted['supervised_tokens']:,} of them supervised"
    }
    if names["heldout"]:
        facts["Kept out for evaluation"] = f"prompts: {names['heldout']}"
    return facts


def model_card(manifest: Mapping[str, Any], folder: Path) -> str:
    """The text, from an export's manifest (`card`, `engine`, `measured`) and the folder where it will lie."""
    card, engine = manifest["card"], manifest["engine"]
    model, k = shlex.quote(card["model"]), card["k"]
    settings = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": k}
    speculative = json.dumps(settings, ensure_ascii=False)
    words = {"model": model, "folder": shlex.quote(str(folder)), "k": k, "tokens": k + 1}
    if engine in SERVE:
        command = SERVE[engine].format(**words, speculative=shlex.quote(speculative))
        serve = f"Serve it:\n\n    {command}"
    else:
        serve = "This layout is for trainers; export.target=vllm or sglang writes one for a server."
    embedding = (
        "It holds the target's embedding." if engine == "hf" else "It holds no embedding: servers share the target's."
    )
    facts = "\n".join(f"* {label}: {value}" for label, value in card["facts"].items())
    return f"""# EAGLE-3 drafter for {card["title"]}

A speculative-decoding drafter trained with eagle3. {embedding}

{facts}

{_measured(manifest.get("measured", []))}{serve}

Measure it with its target, on the CPU or a GPU:

    eagle3 stage=evaluate {card["choice"]} {override("inputs.export", str(folder))} {WITHOUT_DATA}
"""


def _measured(entries: list[dict[str, Any]]) -> str:
    """What evaluations found, as a table; nothing when there were none."""
    if not entries:
        return ""
    lines = ["| measured by | prompts | k | temperature | acceptance length |", "|---|---|---|---|---|"]
    for entry in entries:
        for name, found in entry["sets"].items():
            length = "-" if found["acceptance_length"] is None else f"{found['acceptance_length']:.3f}"
            setting = f"{entry['k']} | {entry['temperature']}"
            lines.append(f"| {entry['engine']} | {found['prompts']} of {name} | {setting} | {length} |")
    return "\n".join(lines) + "\n\n"


def add_measurement(
    artifacts: Artifacts,
    artifact: Artifact,
    engine: str,
    k: int,
    temperature: float,
    sets: Mapping[str, Mapping[str, Any]],
) -> None:
    """Notes in an export's manifest and on its card what was measured; the same measurement again replaces itself.

    Does nothing for a folder that was not exported here.
    """
    if not artifact.complete or "card" not in artifact.manifest():
        return
    kept = {name: {part: found[part] for part in ("prompts", "acceptance_length")} for name, found in sets.items()}
    entry = {"engine": engine, "k": k, "temperature": temperature, "sets": kept}
    same = ("engine", "k", "temperature")
    with artifacts.lock(artifact, wait=True):  # another process may be measuring it too
        manifest = artifact.manifest()
        others = [old for old in manifest.get("measured", []) if any(old[key] != entry[key] for key in same)]
        measured = sorted([*others, entry], key=lambda each: (each["engine"], each["k"], each["temperature"]))
        if measured != manifest.get("measured"):
            changed = {**manifest, "measured": measured}
            (artifact.folder / CARD).write_text(model_card(changed, artifact.folder), encoding="utf-8")
            artifacts.amend(artifact, changed)
