"""`stage=pipeline`: prepare, extract, train, export and evaluate in turn, skipping what is complete already.

The whole walk in one run folder. Every stage finds the one before it through its artifact.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from eagle3 import benchmarks, layers
from eagle3.checkpoint import open_target
from eagle3.config import Config, StageConfig
from eagle3.drafter import read_shape
from eagle3.engines import keep_engine
from eagle3.published import look_into
from eagle3.runs import Run
from eagle3.stages import evaluate, export, extract, prepare, train
from eagle3.validation import known_depth

STAGES = ("prepare", "extract", "train", "export", "evaluate")


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Runs the five stages, the last only for some `evaluate.sets`; returns the metrics of each under its name.

    RequestError before the first, which may take hours, when the target is known to lack a layer that the second needs
    or does not run in an engine that is asked for, when the drafter to go on from, a named input or a source of prompts
    is not there or does not fit, when the server that the drafter is for could not read it, or when the last could not
    ask its prompts; StoreError when what is named is there but not whole.
    """
    if (depth := known_depth(cfg.model)) is not None:
        layers.select(depth, cfg.layers.ids, cfg.layers.fractions)
    extract.check_config(cfg)
    train.check_config(cfg)
    export.check_config(cfg)
    _check_inputs(cfg, run)
    if cfg.evaluate.sets:
        evaluate.check_config(cfg)
        benchmarks.check_sets(cfg)
    metrics: dict[str, Any] = {}
    with ExitStack() as loaded:
        # The target is loaded once for its answers and its states.
        loaded.enter_context(keep_engine())
        _run_stages(cfg, run, metrics, loaded)
    return metrics


def _check_inputs(cfg: Config, run: Run) -> None:
    """Looks into what `inputs` names, and for every source of prompts when no prepared set is named."""
    (prepare.prepared if cfg.inputs.prepared is None else extract.source)(cfg, run.artifacts)
    if cfg.inputs.states is not None:
        train.source(cfg, run.artifacts)
    if cfg.inputs.drafter is not None:
        read_shape(export.trained(cfg, run.artifacts).folder)
    if cfg.inputs.export is not None and cfg.evaluate.sets:
        exported, _ = export.given(cfg, run.artifacts)
        if evaluate.engine_name(cfg) != "vllm":  # which reads more forms than we do
            look_into(exported.folder, open_target(cfg), cfg.layers.ids)


def _run_stages(cfg: Config, run: Run, metrics: dict[str, Any], loaded: ExitStack) -> None:
    for number, name in enumerate(STAGES, 1):
        if name == "evaluate" and not cfg.evaluate.sets:
            run.log.info("%d/%d %s left out: evaluate.sets is empty", number, len(STAGES), name)
            break
        stage = importlib.import_module(f"eagle3.stages.{name}")
        run.log.info("%d/%d %s", number, len(STAGES), name)
        staged = replace(cfg, stage=StageConfig(name=name))
        if name not in ("prepare", "extract"):
            loaded.close()  # training needs the memory
        with run.timed(name):
            metrics[name] = stage.run(staged, run)
        if name == "evaluate":
            _tell_trackers(run, metrics)
        if run.rank > 0 and name == "train":
            # A helper rank was started for training only; what follows is rank 0's.
            break
        if cfg.dry_run and not metrics[name] and name != "evaluate":
            # What is not there, or lacks a layer, has no metrics; what reads it cannot tell what it would do.
            rest = ", ".join(STAGES[number:])
            run.log.info("dry run: %s would follow, from artifacts that do not exist yet", rest)
            break


def _tell_trackers(run: Run, metrics: dict[str, Any]) -> None:
    """What was decoded joins the curves of the training that it judges, at its last step."""
    measured = metrics["evaluate"]
    flat = {f"evaluate/{name}": value for name, value in measured.items() if isinstance(value, int | float)}
    rates = enumerate(measured.get("per_position") or [], 1)
    flat |= {f"evaluate/accepted_at/{position}": rate for position, rate in rates if rate is not None}
    for tracker in run.trackers:
        tracker.log_metrics({name: float(value) for name, value in flat.items()}, metrics["train"].get("steps"))
