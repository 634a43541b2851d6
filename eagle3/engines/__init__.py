"""The target model behind one interface; `open_engine` builds the one that `hardware.engine` names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3.adapter import Adapter
    from eagle3.checkpoint import Target
    from eagle3.config import Config, HardwareConfig
    from eagle3.tokens import Sample

DTYPES = ("float32", "bfloat16", "float16")
CPU_FLOPS_PER_THREAD = 5e10


@dataclass(frozen=True)
class EngineInfo:
    """What runs: recorded in provenance and in every shard."""

    name: str
    version: str
    model_class: str
    dtype: str
    device: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    details: dict[str, Any]


@dataclass(frozen=True)
class CapturedStates:
    """One sample's states: `states[layer_id]` is [T, H] in the engine's dtype, rows in the order of its input_ids."""

    sample_id: str
    states: dict[int, Tensor]


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue; `key` names the prompt in results and in the seed."""

    key: str
    input_ids: Sequence[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Generation:
    """A finished continuation: new ids only, the stop token included when `finish` is "stop" (else "length")."""

    key: str
    token_ids: list[int]
    finish: str


class Engine(Protocol):
    """The target model, opened once for any number of layers, samples and prompts."""

    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    def capture(self, samples: Sequence[Sample], layer_ids: Sequence[int]) -> Iterator[CapturedStates]:
        """Yields each sample's states at the given layer ids, in any order; ids of layers as in eagle3.layers."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], *, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[Generation]:
        """Yields finished continuations in any order; greedy at temperature 0; reproducible for a seed and key."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...

    def __enter__(self) -> Engine:
        """Opens nothing: the engine is open once it exists."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Closes it."""
        ...


def open_engine(cfg: Config, target: Target, log_file: Path | None = None) -> AbstractContextManager[Engine]:
    """The target in the engine that `hardware.engine` names: loaded now, or one that `keep_engine` has kept.

    An engine with processes of its own writes their output to `log_file`. RequestError for a wrong setting, EngineError
    when it does not come up.
    """
    if _keeper is not None:
        return nullcontext(_keeper.open(cfg, target, log_file))
    return _load(cfg, target, log_file)


def _load(cfg: Config, target: Target, log_file: Path | None) -> Engine:
    if cfg.hardware.engine == "vllm" and cfg.hardware.data_parallel_size > 1:
        from eagle3.engines.vllm_group import VllmEngines

        return VllmEngines(cfg, target, log_file=log_file)
    if cfg.hardware.engine == "vllm":
        from eagle3.engines.vllm import VllmEngine

        return VllmEngine(cfg, target, log_file=log_file)
    from eagle3.engines.transformers import TransformersEngine

    return TransformersEngine(target, cfg.hardware)


def engine_is_open(cfg: Config, target: Target) -> bool:
    """Whether `open_engine` would load nothing."""
    return _keeper is not None and _keeper.holds(cfg, target)


@contextmanager
def keep_engine() -> Iterator[None]:
    """Within it, an engine that is closed stays loaded for whoever opens the same one next; one load for two stages."""
    global _keeper
    before, _keeper = _keeper, _Keeper()
    keeper = _keeper
    try:
        yield
    finally:
        _keeper = before
        keeper.release()


class _Keeper:
    """Holds the one engine that is loaded, with the settings that it was loaded for."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.settings = ""

    def holds(self, cfg: Config, target: Target) -> bool:
        return self.engine is not None and self.settings == self._settings(cfg, target)

    def open(self, cfg: Config, target: Target, log_file: Path | None) -> Engine:
        if self.engine is None or not self.holds(cfg, target):
            self.release()
            self.engine, self.settings = _load(cfg, target, log_file), self._settings(cfg, target)
        return self.engine

    def release(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    @staticmethod
    def _settings(cfg: Config, target: Target) -> str:
        lengths = (cfg.dataset.max_length, cfg.dataset.max_new_tokens)
        return repr((target.folder, cfg.model, cfg.hardware, lengths, cfg.seed))


_keeper: _Keeper | None = None


def compute_dtype(hardware: HardwareConfig, target: Target) -> str:
    """The dtype the target runs in: `model.dtype`; for auto the checkpoint's, but float32 on a CPU.

    Few CPUs multiply bfloat16 fast, and the states of a float32 forward are the better ones.
    """
    given = target.model.dtype
    if given == "auto":
        text = target.adapter.text_config(target.config)
        stored = getattr(text, "dtype", None) or getattr(target.config, "dtype", None) or "bfloat16"
        given = "float32" if hardware.accelerator == "cpu" else str(stored).removeprefix("torch.")
    if given not in DTYPES:
        raise RequestError(f"model.dtype: found {given!r}, expected auto or one of {list(DTYPES)}")
    return given


def check_engine(adapter: Adapter, engine: str, asked_by: str = "hardware.engine") -> None:
    """RequestError, in the name of the setting that asks for it, when the target's family does not run in `engine`."""
    if engine not in adapter.engines:
        raise RequestError(
            f"{asked_by}: the adapter {adapter.name} runs with {list(adapter.engines)}, not with {engine}; see "
            "`eagle3 stage=adapters`"
        )


def attention_window(target: Target) -> int:
    """The most tokens that each of the target's tokens attends to: its positions, or less with a sliding window."""
    window = getattr(target.adapter.text_config(target.config), "sliding_window", None)
    return min(target.shape.max_position_embeddings, window or target.shape.max_position_embeddings)


def expected_tokens_per_s(hardware: HardwareConfig, target: Target) -> float | None:
    """A cautious guess at the prefill speed on a CPU, from the model's size alone; None where nothing is known.

    It cuts shards and feeds estimates, so it must not depend on how busy the machine is.
    """
    if hardware.accelerator != "cpu":
        return None
    import torch

    names = target.adapter.weight_names
    table = target.shape.vocab_size * target.shape.hidden_size
    tables = sum(name in target.weights for name in {names.embedding, names.head})
    multiplied = max(target.weights.num_parameters - tables * table, 1)
    return (hardware.threads or torch.get_num_threads()) * CPU_FLOPS_PER_THREAD / (2 * multiplied)
