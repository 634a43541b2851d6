"""Stage rehearse: the extraction on a few layers with random weights, before anything expensive starts (before step 3).

Whoever loads the target into the vllm engine comes here first, unless the same rehearsal has passed on this machine or
`rehearse.before_load=false`.
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from eagle3.artifacts import Artifact
from eagle3.checkpoint import Target, open_target
from eagle3.engines import Engine, engine_is_open, open_engine
from eagle3.engines.backends import expected_backends
from eagle3.errors import RequestError, StageFailed
from eagle3.prepared import Prepared
from eagle3.progress import duration
from eagle3.runs import Run

if TYPE_CHECKING:
    from eagle3.config import Config
    from eagle3.rehearsal import Rehearsal


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Rehearses and prints the verdict. Returns `passed` and what was measured; StageFailed when a check fails."""
    from eagle3.stages import extract

    if cfg.hardware.engine != "vllm":
        raise RequestError(
            f"hardware.engine: found {cfg.hardware.engine!r}, a rehearsal is for the vllm engine; try hardware=h200_x1"
        )
    target = open_target(cfg)
    lengths: Sequence[int] | None = None
    try:
        prepared = Prepared.open(extract.source(cfg, run.artifacts).folder)
        lengths = [int(length) for length in prepared.lengths]
    except RequestError as error:
        run.log.info("rehearse: without prepared samples, so disk and time are not forecast (%s)", error)
    if cfg.dry_run:
        run.log.info("rehearse: would start vllm on %s", target.shape.architecture)
        return {}
    return perform(cfg, run, target, lengths)


def open_rehearsed(
    cfg: Config, run: Run, target: Target, lengths: Sequence[int] | None = None
) -> AbstractContextManager[Engine]:
    """The target's engine; what vllm loads is rehearsed first. `lengths` are those of the samples to capture."""
    if cfg.hardware.engine != "vllm" and cfg.hardware.data_parallel_size > 1:
        raise RequestError(
            f"hardware.data_parallel_size: found {cfg.hardware.data_parallel_size}, but the {cfg.hardware.engine} "
            "engine is one process; leave it at 1, or set hardware.engine=vllm"
        )
    if cfg.hardware.engine == "vllm":
        numbers = forecast(cfg, run, target)
        if not numbers and cfg.rehearse.before_load and not engine_is_open(cfg, target):
            numbers = perform(cfg, run, target, lengths)
        # Also for an engine that is open already: whoever opened it for answers knew of no lengths.
        if numbers and lengths:
            speed, tokens = cfg.hardware.data_parallel_size * numbers["forecast_tokens_per_s"], sum(lengths)
            run.log.info("rehearse: passed; about %s for %s tokens", duration(tokens / speed), f"{tokens:,}")
    return open_engine(cfg, target, run.folder / "engine.log")


def forecast(cfg: Config, run: Run, target: Target) -> dict[str, Any]:
    """The numbers of a rehearsal of these settings that has passed on this machine; empty when there is none.

    Speeds are those of one engine, however many are to run side by side.
    """
    if cfg.hardware.engine != "vllm":
        return {}
    artifact = _artifact(cfg, run, target, _layer_ids(cfg, target))
    return run.read(artifact).manifest()["metrics"] if artifact.complete else {}


def perform(cfg: Config, run: Run, target: Target, lengths: Sequence[int] | None) -> dict[str, Any]:
    """Rehearses now, or waits for another run of these settings that does; keeps the outcome when it passed."""
    layer_ids = _layer_ids(cfg, target)
    artifact = _artifact(cfg, run, target, layer_ids)
    known = artifact.complete
    with run.artifacts.lock(artifact, wait=True):
        if artifact.complete and not known:
            return run.read(artifact).manifest()["metrics"]
        return _perform(cfg, run, target, artifact, layer_ids, lengths)


def _perform(
    cfg: Config,
    run: Run,
    target: Target,
    artifact: Artifact,
    layer_ids: Sequence[int],
    lengths: Sequence[int] | None,
) -> dict[str, Any]:
    from eagle3.rehearsal import Extraction, rehearse

    root = run.artifacts.root
    root.mkdir(parents=True, exist_ok=True)
    extraction = Extraction(tuple(layer_ids), None if lengths is None else tuple(lengths), shutil.disk_usage(root).free)
    outcome = rehearse(cfg, target, extraction, root / f"rehearsal-{artifact.id}.tmp", run.folder / "engine.log")
    run.show(_table(outcome, target))
    metrics = {"passed": outcome.passed, **outcome.numbers}
    if not outcome.passed:
        failed = "\n".join(f"{check.name}: {check.detail}" for check in outcome.checks if not check.passed)
        raise StageFailed(
            f"rehearse: {failed}\nnothing was loaded or extracted; correct this and run `eagle3 stage=rehearse` again"
        )
    manifest = {"checks": [dataclasses.asdict(check) for check in outcome.checks], "metrics": metrics}
    if artifact.complete:
        run.artifacts.amend(artifact, manifest)
    else:
        run.artifacts.begin(artifact)
        run.artifacts.commit(artifact, manifest)
    run.wrote(artifact)
    return metrics


def _layer_ids(cfg: Config, target: Target) -> tuple[int, ...]:
    from eagle3.stages import extract

    return extract.wanted_ids(cfg.layers, target.shape.num_layers)


def _artifact(cfg: Config, run: Run, target: Target, layer_ids: Sequence[int]) -> Artifact:
    """Everything that the outcome depends on, the machine and vLLM's version among it, but not the data set."""
    from eagle3.engines.vllm_settings import engine_arguments, installed_version

    expected = expected_backends(target.adapter.expected_backends(), cfg.hardware.expected_backends)
    identity = {
        "target": target.fingerprint(),
        "arguments": engine_arguments(cfg, target, Path(), "dummy"),
        # One that was told to warn has proved nothing about them.
        "expected_backends": expected if cfg.hardware.on_backend_mismatch == "stop" else {},
        "captured": len(layer_ids),
        "layers": cfg.rehearse.layers,
        "dtype": cfg.store.dtype,
        "vllm": installed_version(),
        "host": socket.gethostname(),
    }
    return run.artifacts.of("rehearsal", identity)


def _table(outcome: Rehearsal, target: Target) -> Table:
    verdict = "passed" if outcome.passed else "FAILED"
    seconds = outcome.numbers.get("seconds")
    took = f" in {seconds:.0f}s" if seconds else ""
    table = Table(title=f"rehearsal of {target.shape.architecture}: {verdict}{took}", title_justify="left")
    table.add_column("check")
    table.add_column("")
    table.add_column("found", overflow="fold")
    for check in outcome.checks:
        table.add_row(check.name, "ok" if check.passed else "FAILED", check.detail)
    return table
