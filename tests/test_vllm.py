"""What the engine refuses or warns of when it has loaded, with a stub of vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.adapter import Adapter
from eagle3.engines.vllm import VllmEngine
from eagle3.errors import EngineError, RequestError
from tests.stub import Stub, changed, two_ranks
from tests.vllm.engines import EXPECT_NOTHING

# The stub says this one while it loads; the other is that of its model.
NOT_PREFILL = {**EXPECT_NOTHING, "prefill": "TRITON"}
NOT_ATTENTION = {**EXPECT_NOTHING, "attention_backend": "FLASH_ATTN"}


class ForTransformers(Adapter):
    name = "elsewhere"
    engines = ("transformers",)


@pytest.fixture
def opened(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    """Opens an engine that does `load` at first."""
    stub = Stub(tiny_target, tmp_path, monkeypatch)

    def act(load: str = "", folder: Path | None = None, **hardware: Any) -> VllmEngine:
        cfg, target = stub.configured(load=load, **hardware)
        return VllmEngine(cfg, target, folder=folder, log_file=tmp_path / "engine.log")

    return act


def test_an_adapter_that_does_not_know_vllm_is_refused_before_the_load(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, target = Stub(tiny_target, tmp_path, monkeypatch).configured()
    words = r"^hardware.engine: the adapter elsewhere runs with \['transformers'\], not with vllm; see"
    with pytest.raises(RequestError, match=words):
        VllmEngine(cfg, dataclasses.replace(target, adapter=ForTransformers()), log_file=tmp_path / "engine.log")
    assert not (tmp_path / "engine.log").exists()


def test_a_model_of_fewer_layers_than_its_config_says_is_refused(
    opened: Callable[..., VllmEngine], tiny_target: Path
) -> None:
    """But for a rehearsal, whose folder is another."""
    load = changed("eagle3_describe", "{**old(), 'num_layers': 5}")
    with pytest.raises(
        EngineError, match=r"config.json says 6 layers, vLLM loaded 5; is model.adapter=llama the right"
    ):
        opened(load)
    with opened(load, tiny_target) as engine:
        assert engine.info().num_layers == 5


def test_prefix_caching_that_is_on_all_the_same_is_refused(opened: Callable[..., VllmEngine]) -> None:
    """A reused prefix has no rows."""
    with pytest.raises(EngineError, match=r"^vllm: prefix caching is on although it was switched off"):
        opened(changed("eagle3_describe", "{**old(), 'prefix_caching': True}"))


@pytest.mark.parametrize("expected", [NOT_PREFILL, NOT_ATTENTION])
def test_other_backends_stop_a_load_or_are_warned_of(
    opened: Callable[..., VllmEngine], caplog: pytest.LogCaptureFixture, expected: dict[str, Any]
) -> None:
    with pytest.raises(EngineError, match=r"hardware\.on_backend_mismatch=warn"):
        opened(expected_backends=expected)
    with opened(expected_backends=expected, on_backend_mismatch="warn"):
        pass
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    name = next(name for name, value in expected.items() if value is not None)
    assert warning.startswith(f"hardware.expected_backends: rank 0 differs: {name}: expected {expected[name]}, found ")


def test_each_rank_has_its_backends_looked_at(opened: Callable[..., VllmEngine]) -> None:
    load = two_ranks(backends={"attention_backend": "TRITON_ATTN"})
    with pytest.raises(EngineError, match="rank 1 differs: attention_backend: expected CPU_ATTN, found TRITON_ATTN"):
        opened(load, expected_backends={**EXPECT_NOTHING, "attention_backend": "CPU_ATTN"})
