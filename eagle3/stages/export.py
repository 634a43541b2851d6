"""Stage export: the trained drafter → a folder that a server loads, with its model card (step 7 of the walk)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3 import layers, servers
from eagle3.artifacts import MANIFEST, Artifact, Artifacts
from eagle3.blueprint import drafter_shape
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config
from eagle3.drafter import DrafterShape, load_drafter
from eagle3.drafter_forms import SPECULATORS
from eagle3.errors import RequestError
from eagle3.export import export_drafter
from eagle3.model_card import CARD, card_facts, model_card
from eagle3.overrides import override
from eagle3.published import CONFIG, refuse_half
from eagle3.runs import Run
from eagle3.stages import train
from eagle3.weights import read_json

MAKE = "eagle3 stage=export"
# Raised when the same drafter would be written otherwise than before.
FORMAT = 2
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def exported(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The export artifact that this config leads to. RequestError when there is no drafter."""
    return _exported(cfg, artifacts, trained(cfg, artifacts))


def given(cfg: Config, artifacts: Artifacts) -> tuple[Artifact, dict[str, Any]]:
    """The exported folder to read, and its manifest; a published drafter's folder is taken too and has none."""
    named = cfg.inputs.export
    if named is not None:
        folder = Path(named).expanduser().resolve()
        if not (folder / MANIFEST).is_file():
            if (folder / CONFIG).is_file():
                return Artifact("export", folder.name, folder), {}
            refuse_half(folder, "inputs.export")
    artifact = artifacts.resolve("export", named, lambda: exported(cfg, artifacts), MAKE)
    return artifact, artifact.manifest()


def trained(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The drafter artifact to export."""
    return artifacts.resolve("drafter", cfg.inputs.drafter, lambda: train.drafter(cfg, artifacts), train.MAKE)


def check_config(cfg: Config) -> None:
    """RequestError when the server of `export.target` could not read the drafter that this config trains."""
    target = open_target(cfg)
    size = min(cfg.drafter.draft_vocab_size or target.shape.vocab_size, target.shape.vocab_size)
    shape = drafter_shape(cfg.drafter, target, train.layer_ids(cfg, target), size)
    servers.check(cfg.export.target, cfg.export.engine_version, shape, target.shape)


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Exports, reads back, compares. Returns `folder` and `checks`."""
    source, target = trained(cfg, run.artifacts), open_target(cfg)
    _check_target(source, target)
    artifact = _exported(cfg, run.artifacts, source)
    if artifact.complete or not (cfg.dry_run or run.artifacts.claim(artifact)):
        artifact.check_sizes(MAKE)
        run.log.info("export: hit, %s is complete", artifact.folder)
        run.wrote(artifact)
        return artifact.manifest()["metrics"]
    if cfg.dry_run:
        run.log.info("export: would write drafter %s as %s for %s", source.id, artifact.folder, cfg.export.target)
        return {}

    run.read(source)
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
    servers.check(cfg.export.target, cfg.export.engine_version, drafter.shape, target.shape)
    folder = run.artifacts.begin(artifact)
    checks = export_drafter(
        drafter,
        target.shape,
        folder,
        dtype,
        cfg.export.target,
        cfg.export.engine_version,
        verifier=_served(target),
        k=cfg.evaluate.k,
    )
    metrics = {"folder": str(artifact.folder), "checks": checks}
    manifest = {
        "metrics": metrics,
        "target": target.fingerprint(),
        "drafter": _id(source),
        "training": source.manifest().get("metrics", {}),
        "engine": cfg.export.target,
        "engine_version": cfg.export.engine_version,
        "layer_ids": list(drafter.shape.layer_ids),
        "layer_convention": layers.CONVENTION,
        "dtype": str(dtype).removeprefix("torch."),
        "card": _card(cfg, target, drafter.shape, source, run.artifacts, checks),
    }
    (folder / CARD).write_text(model_card(manifest, artifact.folder), encoding="utf-8")
    run.artifacts.commit(artifact, manifest)
    run.wrote(artifact)
    run.log.info("export: %s, logits equal before and after", artifact.folder)
    return metrics


def _check_target(source: Artifact, target: Target) -> None:
    """RequestError when the drafter was trained for another target, as whose drafter it would be written here."""
    differing = target.differences(source.manifest().get("target", target.fingerprint()))
    if differing:
        raise RequestError(
            f"{source.folder}: this drafter was trained for another target than model.path={target.model.path}: "
            f"{differing}; give the model that it belongs to"
        )


def _exported(cfg: Config, artifacts: Artifacts, source: Artifact) -> Artifact:
    identity = {
        "format": FORMAT,
        "drafter": _id(source),
        "target": cfg.export.target,
        "engine_version": cfg.export.engine_version,
        "dtype": cfg.export.dtype,
    }
    if cfg.export.target == SPECULATORS:
        # Its config.json names the target's checkpoint and a number of drafts.
        identity |= {"verifier": _anywhere(cfg.model.path), "k": cfg.evaluate.k}
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


def _card(
    cfg: Config, target: Target, shape: DrafterShape, source: Artifact, artifacts: Artifacts, checks: dict[str, Any]
) -> dict[str, Any]:
    """What the model card is written from, as plain values."""
    manifest = source.manifest()
    revision = cfg.model.revision
    lineage = [str(name) for name in manifest.get("made_from", [])]
    prepared = next((artifacts.root / name / MANIFEST for name in lineage if name.startswith("prepared/")), None)
    facts = {
        "Target": f"{cfg.model.path} ({target.shape.architecture})" + (f", revision {revision}" if revision else ""),
        "Written for": f"{cfg.export.target} {cfg.export.engine_version or ''}".strip() + f", by {checks['rules']}",
        "Made from": ", ".join([f"drafter {source.id}", *lineage]),
        **card_facts(
            manifest,
            read_json(prepared, missing={}) if prepared is not None else {},
            shape,
            checks["rounding"],
        ),
    }
    model = cfg.model
    packaged = model.path.startswith("asset:")
    settings = {
        "path": None if packaged else _anywhere(model.path),
        "revision": revision,
        "tokenizer": model.tokenizer and _anywhere(model.tokenizer),
        "chat_template": model.chat_template and _anywhere(model.chat_template),
    }
    words = [override(f"model.{name}", value) for name, value in settings.items() if value]
    choice = " ".join([f"model={model.name}", *words])
    return {"title": model.name, "model": _served(target), "choice": choice, "k": cfg.evaluate.k, "facts": facts}


def _served(target: Target) -> str:
    """The target as a server takes it: its hub id, or the folder of its checkpoint."""
    path = target.model.path
    return str(target.folder) if path.startswith("asset:") else _anywhere(path)


def _anywhere(path: str) -> str:
    """A file or folder as it is found from any working directory; a hub id or `asset:` name as it is."""
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path
