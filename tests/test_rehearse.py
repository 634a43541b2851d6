"""The stage around a rehearsal: what counts for what, and whom its forecast reaches; with a stub of vLLM."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.checkpoint import Target
from eagle3.config import Config, LayersConfig, RehearseConfig, StoreConfig
from eagle3.engines import keep_engine
from eagle3.errors import StageFailed
from eagle3.runs import Run
from eagle3.stages import rehearse
from tests.conftest import random_samples, write_prepared
from tests.stages import run_stage
from tests.stub import Stub, changed
from tests.vllm.engines import EXPECT_NOTHING

LENGTHS = [20] * 30
MISSED = {**EXPECT_NOTHING, "attention_backend": "FLASH_ATTN"}


@pytest.fixture
def configured(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A config and its target, for a version of vLLM that does `load` at first."""

    def act(version: str = "0.32.0", load: str = "", engines: int = 1, **hardware: Any) -> tuple[Config, Target]:
        cfg, target = Stub(tiny_target, tmp_path, monkeypatch, version).configured(engines, load, **hardware)
        cfg.output_dir, cfg.layers = str(tmp_path / "outputs"), LayersConfig(name="ids", ids=[1, 3, 5])
        cfg.store, cfg.rehearse = StoreConfig(dtype="float32"), RehearseConfig(layers=6)
        return cfg, target

    return act


def kept(cfg: Config) -> int:
    """Rehearsals that have passed."""
    return len(list(Path(cfg.output_dir).glob("artifacts/rehearsal/*/manifest.json")))


def test_a_rehearsal_that_fails_is_an_error_and_is_not_kept(configured: Callable[..., Any]) -> None:
    cfg, target = configured(load=changed("eagle3_describe", "{**old(), 'num_layers': 5}"))
    run = Run.start(cfg, [])
    with pytest.raises(StageFailed, match=r"^rehearse: layers: 5 of 6 x Layer\nnothing was loaded or extracted; corr"):
        rehearse.perform(cfg, run, target, LENGTHS)
    run.finish("failed", 1)
    assert "rehearsal of LlamaForCausalLM: FAILED" in run.log_file.read_text()
    assert kept(cfg) == 0
    assert rehearse.forecast(cfg, run, target) == {}


def test_a_rehearsal_told_to_warn_of_backends_does_not_count_for_one_told_to_stop(
    configured: Callable[..., Any],
) -> None:
    cfg, target = configured(expected_backends=MISSED, on_backend_mismatch="warn")
    run = Run.start(cfg, [])
    with rehearse.open_rehearsed(cfg, run, target, LENGTHS) as engine:
        assert engine.info().model_class == "Stub"
    assert kept(cfg) == 1
    cfg.hardware.on_backend_mismatch = "stop"
    with pytest.raises(StageFailed, match=r"^rehearse: engine: hardware.expected_backends: rank 0 differs: attention"):
        rehearse.open_rehearsed(cfg, run, target, LENGTHS)
    run.finish("failed", 1)
    assert kept(cfg) == 1


def test_what_a_rehearsal_counts_for(configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for another machine, version, number of states, dtype or expectation; for any number of engines."""

    def identity(**settings: Any) -> str:
        cfg, target = configured(**{"expected_backends": MISSED, **settings})
        run = Run.start(cfg, [])
        found = rehearse._artifact(cfg, run, target, rehearse._layer_ids(cfg, target)).id
        run.finish("done", 0)
        return found

    mine = identity()
    assert {identity(), identity(engines=2)} == {mine}
    warned = identity(on_backend_mismatch="warn")
    assert identity(on_backend_mismatch="warn", expected_backends=EXPECT_NOTHING) == warned
    others = [warned, identity(expected_backends=EXPECT_NOTHING), identity(version="0.31.0"), identity(batch_tokens=64)]
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    others.append(identity())
    assert mine not in others
    assert len({*others}) == len(others) - 1  # who is told to warn, and who expects nothing


def test_an_extraction_is_foretold_in_an_engine_that_is_open_already(configured: Callable[..., Any]) -> None:
    """A pipeline's first stage opens it for answers and knows of no lengths."""
    cfg, target = configured()
    run = Run.start(cfg, [])
    with keep_engine():
        with rehearse.open_rehearsed(cfg, run, target):
            pass
        assert "rehearse: passed" not in run.log_file.read_text()
        with rehearse.open_rehearsed(cfg, run, target, LENGTHS):
            pass
    run.finish("done", 0)
    seconds = 600 / rehearse.forecast(cfg, run, target)["forecast_tokens_per_s"]
    assert f"rehearse: passed; about {seconds:.1f}s for 600 tokens" in run.log_file.read_text()
    assert kept(cfg) == 1


def test_nothing_is_rehearsed_that_is_not_to_be_or_when_nothing_loads(configured: Callable[..., Any]) -> None:
    cfg, target = configured()
    run = Run.start(cfg, [])
    with keep_engine():
        for cfg.rehearse.before_load in (False, True):
            with rehearse.open_rehearsed(cfg, run, target, LENGTHS):
                pass
    run.finish("done", 0)
    assert kept(cfg) == 0


def test_an_estimate_takes_the_speed_of_a_rehearsal(configured: Callable[..., Any], tmp_path: Path) -> None:
    cfg, _ = configured(engines=2)
    cfg.inputs.prepared = str(write_prepared(tmp_path / "prepared", random_samples(LENGTHS)))
    before, run = run_stage("estimate", cfg)
    assert "a cautious guess" in run.log_file.read_text()
    foretold, _ = run_stage("rehearse", cfg)
    after, run = run_stage("estimate", cfg)
    assert "as a rehearsal foretold" in run.log_file.read_text()
    assert after["seconds"] == pytest.approx(600 / foretold["forecast_tokens_per_s"] / 2, abs=0.06)
    assert (before["bytes"], before["tokens"]) == (after["bytes"], after["tokens"])


@pytest.mark.parametrize("missing", [True, False])
def test_an_estimate_needs_no_vllm_and_no_settings_that_it_would_take(
    configured: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    cfg, _ = configured()
    cfg.inputs.prepared = str(write_prepared(tmp_path / "prepared", random_samples(LENGTHS)))
    if missing:
        monkeypatch.undo()
    else:
        cfg.hardware.engine_options = {"pipeline_parallel_size": 2}
    found, run = run_stage("estimate", cfg)
    assert found["tokens"] == 600
    assert "a cautious guess" in run.log_file.read_text()
