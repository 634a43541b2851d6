"""Stage export: the trained drafter → a folder that a server loads, with its model card (step 7 of the walk)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from eagle3 import layers
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config
from eagle3.drafter import DrafterShape, load_drafter
from eagle3.export import CONFIG, export_drafter
from eagle3.runs import MANIFEST, Artifact, Artifacts, Run
from eagle3.stages import train

MAKE = "eagle3 stage=export"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def exported(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The export artifact that this config leads to. RequestError when there is no drafter."""
    return _exported(cfg, artifacts, trained(cfg, artifacts))


def given(cfg: Config, artifacts: Artifacts) -> tuple[Artifact, dict[str, Any]]:
    """The exported folder to read, and its manifest; a published drafter's folder is taken too and has none."""
    named = cfg.inputs.export
    if named is not None:
        folder = Path(named).expanduser().resolve()
        if (folder / CONFIG).is_file() and not (folder / MANIFEST).is_file():
            return Artifact("export", folder.name, folder), {}
    expected = exported(cfg, artifacts) if named is None else Artifact("export", named, artifacts.root)
    artifact = artifacts.resolve("export", named, expected, MAKE)
    return artifact, artifact.manifest()


def trained(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The drafter artifact to export."""
    given = cfg.inputs.drafter
    expected = train.drafter(cfg, artifacts) if given is None else Artifact("drafter", given, artifacts.root)
    return artifacts.resolve("drafter", given, expected, "eagle3 stage=train")


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Exports, reads back, compares. Returns `folder` and `checks`."""
    source = trained(cfg, run.artifacts)
    artifact = _exported(cfg, run.artifacts, source)
    if artifact.complete:
        run.log.info("export: hit, %s is complete", artifact.folder)
        run.wrote(artifact)
        return artifact.manifest()["metrics"]
    if cfg.dry_run:
        run.log.info("export: would write drafter %s as %s for %s", source.id, artifact.folder, cfg.export.target)
        return {}

    run.read(source)
    target = open_target(cfg)
    drafter = load_drafter(source.folder, target.embedding())
    dtype = _dtype(cfg, target)
    needed = target.shape.max_position_embeddings
    if drafter.shape.max_position_embeddings < needed:
        run.log.warning(
            "drafter.max_position_embeddings=%d: a server drafts for texts up to that length, the target reads %d; "
            "leave it null to cover them",
            drafter.shape.max_position_embeddings,
            needed,
        )
    folder = run.artifacts.begin(artifact)
    checks = export_drafter(drafter, target.shape, folder, dtype)
    metrics = {"folder": str(artifact.folder), "checks": checks}
    card = _model_card(cfg, target, drafter.shape, source, artifact, checks)
    (folder / "README.md").write_text(card, encoding="utf-8")
    run.artifacts.commit(
        artifact,
        {
            "metrics": metrics,
            "target": target.fingerprint(),
            "drafter": _id(source),
            "training": source.manifest().get("metrics", {}),
            "engine": cfg.export.target,
            "engine_version": cfg.export.engine_version,
            "layer_ids": list(drafter.shape.layer_ids),
            "layer_convention": layers.CONVENTION,
            "dtype": str(dtype).removeprefix("torch."),
        },
    )
    run.wrote(artifact)
    run.log.info("export: %s, logits equal before and after", artifact.folder)
    return metrics


def _exported(cfg: Config, artifacts: Artifacts, source: Artifact) -> Artifact:
    identity = {
        "drafter": _id(source),
        "target": cfg.export.target,
        "engine_version": cfg.export.engine_version,
        "dtype": cfg.export.dtype,
    }
    return artifacts.of("export", identity)


def _id(artifact: Artifact) -> str:
    """The id that it was made under; its folder can have any name."""
    return artifact.manifest().get("id", artifact.id)


def _dtype(cfg: Config, target: Target) -> torch.dtype:
    """What the weights are stored in: `auto` is the target checkpoint's own dtype, in which a server will run both."""
    if cfg.export.dtype != "auto":
        return _DTYPES[cfg.export.dtype]
    found = getattr(target.adapter.text_config(target.config), "dtype", None) or getattr(target.config, "dtype", None)
    return found if isinstance(found, torch.dtype) and found in _DTYPES.values() else torch.bfloat16


def _model_card(
    cfg: Config, target: Target, shape: DrafterShape, source: Artifact, artifact: Artifact, checks: dict[str, Any]
) -> str:
    manifest = source.manifest()
    metrics = manifest.get("metrics", {})
    speculative = f'{{"method": "eagle3", "model": "{artifact.folder}", "num_speculative_tokens": {cfg.evaluate.k}}}'
    packaged = cfg.model.path.startswith("asset:")
    model, revision = target.folder if packaged else cfg.model.path, cfg.model.revision
    choice = f"model={cfg.model.name}" + ("" if packaged else f" model.path={shlex.quote(cfg.model.path)}")
    facts = {
        "Target": f"{cfg.model.path} ({target.shape.architecture})" + (f", revision {revision}" if revision else ""),
        "Layers read": f"{list(shape.layer_ids)} ({layers.CONVENTION})",
        "Draft vocabulary": f"{shape.draft_vocab_size} of {shape.vocab_size} tokens",
        "Longest text": f"{shape.max_position_embeddings} positions",
        "Written for": f"{cfg.export.target} {cfg.export.engine_version or ''}".strip(),
        "Made from": f"drafter {source.id}" + "".join(f", {name}" for name in manifest.get("made_from", [])),
    }
    for name, label in {
        "steps": "Optimizer steps",
        "tokens": "Tokens trained on",
        "simulated_acceptance_length": "Simulated acceptance length on validation data",
    }.items():
        value = metrics.get(name)
        if value is not None:
            facts[label] = f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
    facts["Rounding of logits by the stored dtype"] = f"{checks['rounding']:.2g}"
    return f"""# EAGLE-3 drafter for {cfg.model.name}

A speculative-decoding drafter trained with eagle3. It holds no embedding: the server shares the target's.

{chr(10).join(f"* {label}: {value}" for label, value in facts.items())}

Serve it with vLLM:

    vllm serve {shlex.quote(str(model))} --speculative-config {shlex.quote(speculative)}

Measure it with its target, on the CPU or a GPU:

    eagle3 stage=evaluate {choice} inputs.export={shlex.quote(str(artifact.folder))}
"""
