"""What vLLM is started with: capture's needs win, wrong settings are refused before anything starts."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from eagle3.checkpoint import Target, open_target
from eagle3.config import Config, HardwareConfig, ModelConfig
from eagle3.engines import vllm_settings
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_seams import SEAMS, check_version, missing_seams
from eagle3.engines.vllm_settings import check_devices, engine_arguments, engine_environment
from eagle3.errors import RequestError
from tests.vllm.checkpoints import deepseek_v3


def configured(folder: Path, adapter: str = "llama.LlamaAdapter", **hardware: Any) -> tuple[Config, Target]:
    cfg = Config()
    cfg.model = ModelConfig(name="t", path=str(folder), adapter={"_target_": f"eagle3.adapters.{adapter}"})
    cfg.hardware = HardwareConfig(name="h", engine="vllm", **hardware)
    return cfg, open_target(cfg)


def arguments(cfg: Config, target: Target) -> dict[str, Any]:
    return engine_arguments(cfg, target, target.folder, "auto")


def test_prefix_caching_is_forced_off_and_said_once(tiny_target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """E2. An extraction asks for its engine's arguments several times."""
    vllm_settings._say_overruled.cache_clear()
    options = {"enable_prefix_caching": True, "gpu_memory_utilization": 0.8}
    cfg, target = configured(tiny_target, engine_options=options)
    found = arguments(cfg, target)
    assert found["enable_prefix_caching"] is False
    assert found["enforce_eager"] is True
    assert found["gpu_memory_utilization"] == 0.8
    cfg.hardware.engine_options["worker_extension_cls"] = ["another"]
    assert arguments(cfg, target) == found
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "hardware.engine_options.enable_prefix_caching=True is overruled",
        "hardware.engine_options.worker_extension_cls=['another'] is overruled",
    ]


def test_documents_are_split_only_where_the_longest_does_not_fit_a_batch(tiny_target: Path) -> None:
    cfg, target = configured(tiny_target, batch_tokens=512)
    cfg.dataset.max_length, cfg.dataset.max_new_tokens = 400, 100
    assert arguments(cfg, target)["max_model_len"] == 501
    assert arguments(cfg, target)["enable_chunked_prefill"] is False
    cfg.dataset.max_length = 600
    assert arguments(cfg, target)["enable_chunked_prefill"] is True
    cfg.dataset.max_length = 5000
    assert arguments(cfg, target)["max_model_len"] == target.shape.max_position_embeddings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: found 2, expected 1"),
        ({"model": "x"}, "set model.path instead"),
        ({"tensor_parallel_size": 2}, "set hardware.tensor_parallel_size instead"),
        ({"data_parallel_size": 2}, "set hardware.data_parallel_size instead"),
    ],
)
def test_options_that_cannot_work_are_refused(tiny_target: Path, options: dict[str, Any], words: str) -> None:
    cfg, target = configured(tiny_target, engine_options=options)
    with pytest.raises(RequestError, match=words):
        arguments(cfg, target)


def test_a_tensor_parallel_size_that_does_not_divide_is_refused(tiny_target: Path) -> None:
    cfg, target = configured(tiny_target, tensor_parallel_size=3)
    with pytest.raises(
        RequestError, match=r"3 does not divide the target's 4 attention heads; expected one of \[1, 2, 4\]"
    ):
        arguments(cfg, target)


def test_float16_is_refused_where_the_residual_stream_is_scaled(tmp_path: Path) -> None:
    cfg, target = configured(deepseek_v3(tmp_path), "deepseek_v3.DeepseekV3Adapter")
    cfg.model.dtype = target.model.dtype = "float16"
    with pytest.raises(RequestError, match="float16, in which vLLM scales the residual stream"):
        arguments(cfg, target)


def test_remote_code_must_be_allowed(tiny_target: Path) -> None:
    cfg, target = configured(tiny_target)

    class Remote(type(target.adapter)):
        def engine_arguments(self) -> dict[str, Any]:
            return {"trust_remote_code": True}

    target = dataclasses.replace(target, adapter=Remote())
    with pytest.raises(RequestError, match=r"model.trust_remote_code: false.*set model.trust_remote_code=true"):
        arguments(cfg, target)
    cfg.model.trust_remote_code = True
    assert arguments(cfg, target)["trust_remote_code"] is True


def test_ranks_on_a_cpu_have_a_core_each(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    cfg, _ = configured(tiny_target, tensor_parallel_size=2, threads=1)
    found = engine_environment(cfg)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert found["OMP_NUM_THREADS"] == "1"


def test_vllm_waits_for_slow_disks_and_long_loads_unless_the_user_says_how_long(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, _ = configured(tiny_target)
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "30")
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)
    found = engine_environment(cfg)
    assert found["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "30"
    assert int(found["VLLM_ENGINE_READY_TIMEOUT_S"]) >= 3600


def test_engines_side_by_side_have_gpus_and_ports_of_their_own(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, _ = configured(tiny_target, accelerator="gpu", tensor_parallel_size=2, data_parallel_size=2)
    monkeypatch.delenv("VLLM_PORT", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f,0,7,1")
    found = [engine_environment(cfg, number) for number in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["3,GPU-5f", "0,7"]
    assert "VLLM_PORT" not in found[1]
    monkeypatch.setenv("VLLM_PORT", "5000")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = [engine_environment(cfg, number) for number in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1", "2,3"]
    assert [each["VLLM_PORT"] for each in found] == ["5000", "5100"]
    cfg.hardware.data_parallel_size = 1
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment(cfg)


def test_engines_side_by_side_on_a_cpu_have_cores_of_their_own(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2, 5, 6, 7})
    cfg, _ = configured(tiny_target, tensor_parallel_size=2, data_parallel_size=3)
    found = [engine_environment(cfg, number)["VLLM_CPU_OMP_THREADS_BIND"] for number in range(3)]
    assert found == ["2|5", "6|7", "2|5"]
    cfg, _ = configured(tiny_target)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environment(cfg)


def test_too_few_gpus_are_said(tiny_target: Path) -> None:
    cfg, _ = configured(tiny_target, accelerator="gpu", tensor_parallel_size=4096)
    with pytest.raises(RequestError, match=r"tensor_parallel_size: 4096, but this machine has \d+ GPUs; try another"):
        check_devices(cfg)


@pytest.mark.parametrize(("gpus", "hint"), [(5, "hardware.data_parallel_size=2"), (1, "another hardware=")])
def test_too_few_gpus_for_several_copies_are_said(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, hint: str
) -> None:
    cfg, _ = configured(tiny_target, accelerator="gpu", tensor_parallel_size=2, data_parallel_size=3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    words = (
        r"hardware.data_parallel_size: 3 copies of the target on 2 GPUs each need 6, but this machine has "
        rf"{gpus} GPUs; try {hint}, or look"
    )
    with pytest.raises(RequestError, match=words):
        check_devices(cfg, 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    check_devices(cfg, 3)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_vllm_that_is_not_installed_names_the_extra(tiny_target: Path, tmp_path: Path) -> None:
    cfg, target = configured(tiny_target)
    with pytest.raises(RequestError, match=r"vllm is not installed; try `pip install 'eagle3\[vllm\]'`"):
        VllmEngine(cfg, target, log_file=tmp_path / "engine.log")


def test_versions_are_judged() -> None:
    assert check_version("0.32.0") == (True, "0.32.0, within the tested range 0.26 to 0.32")
    assert check_version("0.26.1")[0]


def test_a_version_out_of_range_has_its_seams_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a vllm of our own, which lacks one parameter; a whole one is only warned of."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "v1" / "worker").mkdir(parents=True)
    for package in ("engine", "v1", "v1/worker"):
        (tmp_path / "vllm" / package / "__init__.py").touch()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "class LLM:\n    def collective_rpc(self, method, args): ...\n"
        "class LLMEngine:\n"
        "    def add_request(self, request_id, prompt, params): ...\n"
        "    def step(self): ...\n    def has_unfinished_requests(self): ...\n"
        "class SamplingParams:\n    def __init__(self, **values): ...\n"
    )
    (tmp_path / "vllm" / "inputs.py").write_text("def tokens_input(prompt_token_ids): ...\n")
    fields = "worker_extension_cls, enable_prefix_caching, enforce_eager, skip_tokenizer_init, load_format"
    arg_utils = tmp_path / "vllm" / "engine" / "arg_utils.py"
    arg_utils.write_text(f"class EngineArgs:\n    def __init__(self, {fields}): ...\n")
    worker = "class Worker:\n    def get_model(self): ...\n"
    (tmp_path / "vllm" / "v1" / "worker" / "gpu_worker.py").write_text(worker)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[1]}")
    passed, detail = check_version("0.99.0")
    assert passed
    assert detail.startswith("warning: 0.99.0 is outside the tested range")
    assert all(f"{module}.{name}" in detail for module, name, _ in SEAMS)
    arg_utils.write_text("class EngineArgs:\n    def __init__(self, load_format): ...\n")
    passed, detail = check_version("0.99.0")
    assert not passed
    assert "vllm.engine.arg_utils.EngineArgs takes no worker_extension_cls" in detail


def test_missing_seams_are_named_when_vllm_is_absent_or_whole() -> None:
    found = missing_seams() if importlib.util.find_spec("vllm") is None else None
    assert found is None or len(found) == len(SEAMS)
