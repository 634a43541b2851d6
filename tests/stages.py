"""Configurations composed and stages run in this process, as the command does it."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from hydra import compose, initialize_config_module

from eagle3 import launchers
from eagle3.config import Config, StageConfig, register_schema
from eagle3.runs import Run
from eagle3.validation import validate


def configure(*overrides: str) -> Config:
    """The configuration of a command line."""
    register_schema()
    launchers.register()
    with initialize_config_module("eagle3.conf", version_base="1.3"):
        return validate(compose("config", list(overrides)))


def run_stage(name: str, cfg: Config) -> tuple[dict[str, Any], Run]:
    """Runs one stage in a run folder of its own; returns its metrics and the closed run."""
    cfg = dataclasses.replace(cfg, stage=StageConfig(name))
    run = Run.start(cfg, [])
    status, code, metrics = "failed", 1, {}
    try:
        metrics = importlib.import_module(f"eagle3.stages.{name}").run(cfg, run)
        status, code = "done", 0
    finally:
        run.finish(status, code, metrics)
    return metrics, run
