"""The arguments of a server: nothing of the capture is in them, and the drafter is in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.checkpoint import open_target
from eagle3.config import HardwareConfig
from eagle3.engines.vllm_serving import serving_arguments
from tests.conftest import target_config


def arguments(tiny_target: Path, drafter: Path | None = None, **options: Any) -> dict[str, Any]:
    hardware = HardwareConfig(name="cpu", batch_tokens=256, engine_options=options)
    cfg = target_config(tiny_target, hardware=hardware)
    return serving_arguments(cfg, open_target(cfg), longest=100, batch_size=8, drafter=drafter, k=3)


def test_a_server_is_not_the_engine_that_captures(tiny_target: Path) -> None:
    found = arguments(tiny_target)
    assert "worker_extension_cls" not in found
    assert "speculative_config" not in found
    assert "enable_chunked_prefill" not in found
    assert (found["disable_log_stats"], found["enable_prefix_caching"]) == (False, False)
    assert (found["max_num_seqs"], found["max_model_len"], found["enforce_eager"]) == (8, 104, True)


def test_the_drafter_and_its_drafts_a_round(tiny_target: Path) -> None:
    found = arguments(
        tiny_target, Path("/exported"), speculative_config={"draft_tensor_parallel_size": 1, "model": "x"}
    )
    assert found["speculative_config"] == {
        "method": "eagle3",
        "model": "/exported",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    }
    assert "speculative_config" not in arguments(tiny_target, speculative_config={"draft_tensor_parallel_size": 1})


def test_what_the_user_gives_wins(tiny_target: Path) -> None:
    found = arguments(tiny_target, enforce_eager=False, max_num_seqs=64, max_model_len=512, enable_chunked_prefill=True)
    assert (found["max_num_seqs"], found["max_model_len"], found["enforce_eager"]) == (64, 512, False)
    assert found["enable_chunked_prefill"] is True


def test_a_text_ends_at_the_targets_limit(tiny_target: Path) -> None:
    cfg = target_config(tiny_target)
    target = open_target(cfg)
    found = serving_arguments(cfg, target, longest=1023, batch_size=1, drafter=None, k=3)
    assert found["max_model_len"] == target.shape.max_position_embeddings == 1024
