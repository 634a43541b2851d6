"""Stage verify: reads all that was made and holds it against manifests, checksums and what it was made from."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from typing import Any

from eagle3.artifacts import Artifact, Artifacts
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config
from eagle3.errors import AbsentError, RequestError, StoreError
from eagle3.prepared import Prepared
from eagle3.progress import size_text
from eagle3.runs import Run
from eagle3.stages import export, extract, prepare, train
from eagle3.store import StatesStore

# Who finds an artifact of each kind, and the command that makes it. States come last: theirs are the most bytes.
KINDS: dict[str, tuple[Callable[[Config, Artifacts], Artifact], str]] = {
    "prepared": (lambda cfg, artifacts: _prepared(cfg, artifacts), prepare.MAKE),
    "drafter": (export.trained, train.MAKE),
    "export": (lambda cfg, artifacts: export.given(cfg, artifacts)[0], export.MAKE),
    "states": (train.source, extract.MAKE),
}


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Checks the artifacts that the config leads to, as far as they are made, and those that `inputs` names.

    Returns `artifacts, files, bytes`, and of states `shards, samples`. Raises StoreError that names damaged files,
    RequestError when there is nothing to check or when states belong to other samples or another target.
    """
    target = open_target(cfg)
    checks = _Checks(cfg, run, target)
    nothing: AbsentError | None = None
    for kind, (find, make) in KINDS.items():
        try:
            artifact = run.read(find(cfg, run.artifacts))
        except AbsentError as error:
            if getattr(cfg.inputs, kind) is not None:
                raise
            nothing = nothing or error
            run.log.info("verify: no %s to check (%s)", kind, error)
        except (RequestError, StoreError) as error:
            if isinstance(error, RequestError) and getattr(cfg.inputs, kind) is not None:
                raise
            checks.faults.append(str(error))
        else:
            checks.check(artifact, make)
    faults = list(dict.fromkeys(checks.faults))  # what leads to two artifacts is met twice
    for fault in faults:
        run.log.error("verify: %s", fault)
    if faults:
        more = f" ({len(faults)} faults in all, listed in run.log)" if len(faults) > 1 else ""
        raise StoreError(f"{faults[0]}{more}")
    if nothing is not None and not checks.metrics["artifacts"]:
        raise nothing
    return checks.metrics


def _prepared(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The prepared set: where states are named but no set, the one that they were made from."""
    if cfg.inputs.prepared is None and cfg.inputs.states is not None:
        made_from = train.source(cfg, artifacts).manifest()["prepared"]
        return artifacts.resolve("prepared", str(made_from), None, prepare.MAKE)
    return extract.source(cfg, artifacts)


class _Checks:
    """What was checked so far: `faults` that were found, each with what to do, and `metrics` of what is whole."""

    def __init__(self, cfg: Config, run: Run, target: Target) -> None:
        self.cfg, self.run, self.target = cfg, run, target
        self.faults: list[str] = []
        self.metrics: dict[str, Any] = {"artifacts": 0, "files": 0, "bytes": 0}
        self._prepared: Prepared | None = None

    def check(self, artifact: Artifact, make: str) -> None:
        """Checks one artifact's files, then what is in them where they are whole."""
        listed = artifact.manifest().get("files", {}) if artifact.complete else {}
        found = [f"{fault}; {artifact.remake(make)}" for fault in artifact.faults(contents=True)] if listed else []
        metrics: dict[str, int] = {"files": len(listed), "bytes": sum(facts["bytes"] for facts in listed.values())}
        if not found and artifact.kind == "prepared":
            self._prepared = Prepared.open(artifact.folder)
        elif not found and artifact.kind == "states":
            found, metrics = self._states(artifact)
        elif artifact.kind == "drafter":
            found += _checkpoint_faults(artifact)
        if found:
            self.faults += found
            return
        self.metrics["artifacts"] += 1
        for name, number in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0) + number
        if not metrics["files"]:
            self.run.log.warning(
                "verify: %s %s has no checksums (made elsewhere, or by an earlier version), so its contents were not "
                "checked",
                *(artifact.kind, artifact.folder),
            )
            return
        size = size_text(metrics.pop("bytes"))
        words = ", ".join(f"{number:,} {name}" for name, number in metrics.items())
        self.run.log.info("verify: %s %s is whole: %s, %s", artifact.kind, artifact.folder, words, size)

    def _states(self, artifact: Artifact) -> tuple[list[str], dict[str, int]]:
        """Reads all layer files of states, and compares them with the prepared set that they were made from."""
        if self._prepared is None:
            return [
                f"{artifact.folder}: was not checked, which takes the prepared set that it was made from, whole; run "
                f"`{prepare.MAKE}` with the same settings, or name it with inputs.prepared"
            ], {}
        manifest = artifact.manifest()
        capture = extract.plan_capture(self.cfg, self.target, self._prepared, artifact, manifest["layer_ids"])
        faults: list[str] = []
        with self.run.progress(len(capture.plans), "shards", "verify") as advance:
            for plan in capture.plans:
                again = f"delete what is named and run `{extract.MAKE}`, which makes only that again"
                faults += [f"{fault}; {again}" for fault in capture.faults(plan)]
                advance(1)
        if faults:
            return faults, {}
        store = StatesStore.open(artifact.folder)
        store.verify(self._prepared)
        store.check_target(self.target)
        return [], {
            "shards": len(capture.plans),
            "files": len(capture.plans) * (len(capture.layer_ids) + 1),
            "bytes": manifest["metrics"]["bytes"],
            "samples": len(store),
        }


def _checkpoint_faults(artifact: Artifact) -> list[str]:
    """What is wrong with a drafter's checkpoints: torch writes zip archives, with a checksum of each tensor."""
    faults = []
    for path in sorted(artifact.folder.glob("checkpoints/*/*.pt")):
        problem: object
        try:
            with zipfile.ZipFile(path) as archive:
                problem = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            problem = error
        if problem is not None:
            faults.append(f"{path}: is damaged ({problem}); delete {path.parent}, which only trainer.resume_from reads")
    return faults
