"""Stage verify: reads every byte of stored states and holds it against checksums, prepared ids and the target."""

from __future__ import annotations

from typing import Any

from eagle3.checkpoint import open_target
from eagle3.config import Config
from eagle3.errors import StoreError
from eagle3.prepared import Prepared
from eagle3.runs import Run
from eagle3.stages import extract, prepare
from eagle3.store import StatesStore


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Checks the states of `inputs.states`, or those that the config leads to. Returns `shards, files, bytes, samples`.

    Raises StoreError that names damaged files, RequestError when the states belong to other samples or another target.
    """
    states = run.artifacts.resolve(
        "states", cfg.inputs.states, lambda: extract.states(cfg, run.artifacts), extract.MAKE
    )
    artifact = run.read(states)
    manifest = artifact.manifest()
    prepared_id = cfg.inputs.prepared or str(manifest["prepared"])
    prepared_artifact = run.artifacts.resolve("prepared", prepared_id, None, prepare.MAKE)
    prepared = Prepared.open(run.read(prepared_artifact).folder)
    target = open_target(cfg)
    capture = extract.plan_capture(cfg, target, prepared, artifact, manifest["layer_ids"])
    faults: list[str] = []
    with run.progress(len(capture.plans), "shards", "verify") as advance:
        for plan in capture.plans:
            faults += capture.faults(plan)
            advance(1)
    if faults:
        for fault in faults:
            run.log.error("verify: %s", fault)
        raise StoreError(
            f"{faults[0]} ({len(faults)} faults in all, listed in run.log); delete what is named and run "
            f"`{extract.MAKE}`, which makes only that again"
        )
    store = StatesStore.open(artifact.folder)
    store.verify(prepared)
    store.check_target(target)
    metrics = {
        "shards": len(capture.plans),
        "files": len(capture.plans) * (len(capture.layer_ids) + 1),
        "bytes": manifest["metrics"]["bytes"],
        "samples": len(store),
    }
    run.log.info("verify: %s is whole: %s", artifact.folder, ", ".join(f"{n:,} {what}" for what, n in metrics.items()))
    return metrics
