"""The schema of every config group: plain dataclasses that refuse wrong types, unknown keys and impossible values.

Beside the walk: `cli` passes the composed config through `validation`, and every stage gets the `Config` tree.
Each field is explained where users set it, in `conf/`. Groups hold the user's interface; what is derived from the model
(layer count, hidden size) is worked out at run time and never a field here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from eagle3.errors import Eagle3Error, RequestError

# What every random generator in use (Python's, NumPy's, torch's) takes.
MAX_SEED = 2**32 - 1


def choice(default: str, *others: str) -> Any:
    """A field that takes one of these words."""
    return field(default=default, metadata={"choices": (default, *others)})


def number(default: Any, *, least: float | None = None, most: float | None = None, above: float | None = None) -> Any:
    """A numeric field with bounds: least and most are allowed values, `above` itself is not. Null is not checked."""
    return field(default=default, metadata={"least": least, "most": most, "above": above})


@dataclass
class ModelConfig:
    """The target model: where it lies, which adapter answers for its architecture, how it is loaded."""

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    quantization: str | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None
    chat_template: str | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None


@dataclass
class HardwareConfig:
    """The machine: which engine runs the target on it and how training is spread over it."""

    name: str = MISSING
    engine: str = choice("transformers", "vllm")
    accelerator: str = choice("cpu", "gpu")
    devices: int = number(1, least=1)
    threads: int | None = number(None, least=1)
    tensor_parallel_size: int = number(1, least=1)
    data_parallel_size: int = number(1, least=1)
    gpu_memory_gb: float | None = number(None, above=0)
    engine_options: dict[str, Any] = field(default_factory=dict)
    expected_backends: dict[str, Any] = field(default_factory=dict)
    on_backend_mismatch: str = choice("stop", "warn")
    batch_tokens: int = number(1024, least=1)
    generate_slots: int = number(128, least=1)
    training_strategy: str = "auto"
    precision: str = choice("32-true", "bf16-mixed")


@dataclass
class SourceConfig:
    """One source of prompts."""

    path: str = MISSING
    format: str = "auto"
    split: str | None = None
    limit: int | None = number(None, least=1)
    skip: int = number(0, least=0)
    turns: int | None = number(None, least=1)
    role: str = choice("train", "heldout")


@dataclass
class DatasetConfig:
    """What the drafter is trained on: sources, answers, lengths, splits."""

    name: str = MISSING
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    answers: str = choice("regenerate", "given")
    max_length: int = number(2048, least=2)
    max_new_tokens: int = number(512, least=1)
    temperature: float = number(0.0, least=0)
    on_bad_row: str = choice("skip", "stop")
    on_long: str = choice("truncate", "skip")
    validation_samples: int = number(64, least=0)
    seed: int = number(0, least=0, most=MAX_SEED)
    preserve_thinking: bool = False
    supervise_empty_thinking: bool = False


@dataclass
class LayersConfig:
    """Which of the target's layers the drafter reads: explicit ids, or fractions of the depth, or EAGLE's default."""

    name: str = MISSING
    ids: list[int] | None = None
    fractions: list[float] | None = None
    also: list[Any] = field(default_factory=list)


@dataclass
class StoreConfig:
    """How hidden states lie on disk."""

    dtype: str = choice("bfloat16", "float32")
    shard_bytes: int = number(1_500_000_000, least=1)
    shard_seconds: float = number(60.0, above=0)
    free_space_margin: float = number(0.05, least=0)
    max_failed_fraction: float = number(0.01, least=0, most=1)


@dataclass
class DrafterConfig:
    """The EAGLE-3 drafter: shape, vocabulary, unroll and loss. A null shape field means the target's."""

    name: str = MISSING
    module: dict[str, Any] = field(default_factory=dict)
    attention: str = choice("dense", "mla")
    draft_vocab_size: int | None = number(None, least=1)
    intermediate_size: int | None = number(None, least=1)
    num_attention_heads: int | None = number(None, least=1)
    num_key_value_heads: int | None = number(None, least=1)
    head_dim: int | None = number(None, least=2)
    q_lora_rank: int | None = number(None, least=1)
    kv_lora_rank: int | None = number(None, least=1)
    qk_nope_head_dim: int | None = number(None, least=1)
    qk_rope_head_dim: int | None = number(None, least=2)
    v_head_dim: int | None = number(None, least=1)
    max_position_embeddings: int | None = number(None, least=1)
    unroll_steps: int = number(7, least=1)
    step_decay: float = number(0.8, above=0, most=1)
    losses: dict[str, float] = field(default_factory=dict)
    oov: str = choice("mask", "keep")
    mask_alignment: str = choice("exact", "eagle", "speculators")
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    init_head: str = choice("target", "random")
    warm_start: str | None = None


@dataclass
class TrainerConfig:
    """Optimisation, precision, checkpoints and the Lightning objects that run them."""

    name: str = MISSING
    max_epochs: int = number(3, least=1)
    max_steps: int | None = number(None, least=1)
    batch_tokens: int = number(4096, least=1)
    accumulate: int = number(1, least=1)
    optimizer: str = choice("adamw", "muon")
    lr: float = number(1e-4, above=0)
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.95], metadata={"count": 2, "each": {"least": 0, "below": 1}}
    )
    weight_decay: float = number(0.0, least=0)
    warmup_ratio: float = number(0.015, least=0, most=1)
    min_lr_ratio: float = number(0.0, least=0, most=1)
    clip_norm: float = number(0.5, above=0)
    validate_every_steps: int = number(200, least=1)
    checkpoint_every_steps: int = number(200, least=1)
    keep_checkpoints: int = number(2, least=1)
    log_every_steps: int = number(10, least=1)
    deterministic: bool = False
    resume: bool = True
    resume_from: str | None = None
    num_workers: int = number(0, least=0)
    checkpoint_activations: bool = False
    profile: bool = False
    lightning: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    datamodule: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoggerConfig:
    """Trackers: each entry of `loggers` is instantiated; an outage of one never stops training."""

    name: str = MISSING
    mode: str = choice("auto", "offline", "online")
    project: str = "eagle3"
    gradients: bool = False
    loggers: dict[str, Any] = field(default_factory=dict)


@dataclass
class StageConfig:
    """What to do."""

    name: str = MISSING


@dataclass
class InputsConfig:
    """Artifacts to read, each by id or folder; null means the one that this config leads to."""

    prepared: str | None = None
    states: str | None = None
    drafter: str | None = None
    export: str | None = None


@dataclass
class ExportConfig:
    """For which server the drafter is written."""

    target: str = choice("vllm", "sglang", "speculators", "hf")
    engine_version: str | None = None
    dtype: str = choice("auto", "float32", "bfloat16", "float16")


@dataclass
class EvaluateConfig:
    """Real speculative decoding: engine, prompts, draft lengths, baselines."""

    engine: str | None = field(default=None, metadata={"choices": ("transformers", "vllm")})
    sets: list[str] = field(default_factory=lambda: ["heldout", "mt_bench", "human_eval", "gsm8k"])
    prompts_per_set: int | None = number(20, least=1)
    k: int = number(3, least=1)
    temperature: float = number(0.0, least=0)
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    also_k: list[int] = field(default_factory=list)
    also_temperatures: list[float] = field(default_factory=list)
    max_new_tokens: int = number(128, least=1)
    baselines: list[str] = field(default_factory=lambda: ["untrained", "bigram"])
    compare_with: str | None = None


@dataclass
class RehearseConfig:
    """The dress rehearsal before vLLM loads the whole target."""

    before_load: bool = True
    batches: int = number(8, least=1)
    layers: int | None = number(None, least=1)


@dataclass
class InspectConfig:
    """Which prepared samples `stage=inspect` prints."""

    samples: int = number(3, least=1)
    split: str = choice("train", "validation")


@dataclass
class RunsConfig:
    """How much `stage=runs` lists."""

    limit: int = number(30, least=1)


@dataclass
class GcConfig:
    """What `stage=gc` may delete."""

    delete: bool = False
    older_than_days: float = number(7.0, least=0)


@dataclass
class ReportConfig:
    """Which sweep or run `stage=report` shows."""

    folder: str | None = None


@dataclass
class Config:
    """The whole application."""

    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    layers: LayersConfig = field(default_factory=LayersConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    rehearse: RehearseConfig = field(default_factory=RehearseConfig)
    inspect: InspectConfig = field(default_factory=InspectConfig)
    runs: RunsConfig = field(default_factory=RunsConfig)
    gc: GcConfig = field(default_factory=GcConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    inputs: InputsConfig = field(default_factory=InputsConfig)
    output_dir: str = "outputs"
    cache_dir: str | None = None
    seed: int = number(0, least=0, most=MAX_SEED)
    dry_run: bool = False


@dataclass
class OpenDatasetConfig(DatasetConfig):
    """The data as Hydra composes it: it takes no new entry of a typed dict from the command line, so that sources get
    their type later, in `validation`."""

    sources: dict[str, Any] = field(default_factory=dict)  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass
class ComposedConfig(Config):
    """The schema that Hydra composes into."""

    dataset: DatasetConfig = field(default_factory=OpenDatasetConfig)


def register_schema() -> None:
    """Makes `eagle3_schema`, which conf/application.yaml lists first, known to Hydra."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="eagle3_schema", node=ComposedConfig, provider="eagle3")


def locate(node: dict[str, Any], where: str) -> Any:
    """The class or function that a node's `_target_` names; RequestError with the root cause when there is none."""
    target = str(node.get("_target_"))
    try:
        found = _import(target)
    except Exception as error:
        raise RequestError(
            f"{where}._target_: found {target!r}, which cannot be imported ({root_cause(error)}), expected the full "
            f"name of a class or function, package first; correct {where}._target_"
        ) from error
    if not callable(found):
        raise RequestError(f"{where}._target_: found {target!r}, a {type(found).__name__}, expected something callable")
    return found


def _import(target: str) -> Any:
    parts = target.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 1):
        if not hasattr(found, part) and inspect.ismodule(found) and hasattr(found, "__path__"):
            importlib.import_module(".".join(parts[: i + 1]))
        found = getattr(found, part)
    return found


def check_nodes(value: Any, where: str = "") -> None:
    """Checks every node with a `_target_` below `value` without building it: it can be located and takes these fields.

    RequestError names all faults at once. Fields that the builder passes later are not missed.
    """
    faults: list[str] = []
    _check_nodes(value, where, faults)
    if faults:
        raise RequestError("\n".join(faults))


def _check_nodes(value: Any, where: str, faults: list[str]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        if "_target_" in value:
            given = {k: v for k, v in value.items() if not (k.startswith("_") and k.endswith("_"))}
            try:
                inspect.signature(locate(value, where)).bind_partial(*value.get("_args_", ()), **given)
            except RequestError as error:
                faults.append(str(error))
            except TypeError as error:
                faults.append(
                    f"{where}: {value['_target_']} does not take these fields ({error}); found {sorted(given)}"
                )
            except ValueError:  # a callable written in C tells no signature
                pass
        for key, item in value.items():
            _check_nodes(item, f"{where}.{key}".lstrip("."), faults)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_nodes(item, f"{where}[{i}]", faults)


def _targets(value: Any) -> list[str]:
    """Every `_target_` below a value: what a configuration names is what its user wants to run."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [str(value["_target_"])] if isinstance(value, dict) and "_target_" in value else []
    return own + [target for item in inner for target in _targets(item)]


def root_cause(error: BaseException) -> str:
    """The innermost cause of an exception, type first."""
    while (inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"


def build(node: dict[str, Any], _where_: str = "", **kwargs: Any) -> Any:
    """Builds the object that a node's `_target_` describes: the one place that calls Hydra's instantiate.

    Nested nodes are built first; `kwargs` reach the outermost callable untouched and win over the node's fields.
    Errors of eagle3's own types pass through; any other becomes a RequestError with the root cause, naming `_where_`.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    where = _where_ or str(node.get("_target_"))
    locate(node, where)
    try:
        options: dict[str, Any] = {"_partial_": True, "_convert_": "all"}
        if "_execution_whitelist_" in inspect.signature(instantiate).parameters:  # Hydra 1.4 wants to be told
            return instantiate(node, **options, _execution_whitelist_=_targets(node))(**kwargs)
        return instantiate({**node, **options})(**kwargs)
    except Eagle3Error:
        raise
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, Eagle3Error):
                raise cause from error
            cause = cause.__cause__
        raise RequestError(f"{where}: {node['_target_']} cannot be built: {root_cause(error)}") from error
    except (TypeError, ValueError) as error:
        given = sorted({*node, *kwargs} - {"_target_"})
        raise RequestError(
            f"{where}: {node['_target_']} refused its fields {given}: {root_cause(error)}; see its signature"
        ) from error
