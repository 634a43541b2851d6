"""The schema of every config group: plain dataclasses that refuse wrong types and unknown keys.

Each field is explained where users set it, in `conf/`. Groups hold the user's interface; what is derived from the model
(layer count, hidden size) is worked out at run time and never a field here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
    engine: str = "transformers"
    accelerator: str = "cpu"
    devices: int = 1
    threads: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_gb: float | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    expected_backends: dict[str, Any] = field(default_factory=dict)
    on_backend_mismatch: str = "stop"
    batch_tokens: int = 4096
    generate_slots: int = 64
    training_strategy: str = "auto"
    precision: str = "32-true"


@dataclass
class SourceConfig:
    """One source of prompts."""

    path: str = MISSING
    format: str = "auto"
    split: str | None = None
    limit: int | None = None
    skip: int = 0
    turns: int | None = None
    role: str = "train"


@dataclass
class DatasetConfig:
    """What the drafter is trained on: sources, answers, lengths, splits."""

    name: str = MISSING
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    answers: str = "regenerate"
    max_length: int = 2048
    max_new_tokens: int = 512
    temperature: float = 0.0
    on_bad_row: str = "skip"
    on_long: str = "truncate"
    validation_samples: int = 64
    preserve_thinking: bool = False
    supervise_empty_thinking: bool = False


@dataclass
class LayersConfig:
    """Which of the target's layers the drafter reads: explicit ids, or fractions of the depth, or EAGLE's default."""

    name: str = MISSING
    ids: list[int] | None = None
    fractions: list[float] | None = None


@dataclass
class StoreConfig:
    """How hidden states lie on disk."""

    dtype: str = "bfloat16"
    shard_bytes: int = 1_500_000_000
    shard_seconds: float = 60.0
    read_mode: str = "mmap"
    free_space_margin: float = 0.05
    max_failed_fraction: float = 0.01


@dataclass
class DrafterConfig:
    """The EAGLE-3 drafter: its shape, its vocabulary, its unroll and its loss. A null shape field means the target's."""

    name: str = MISSING
    module: dict[str, Any] = field(default_factory=dict)
    attention: str = "dense"
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    unroll_steps: int = 7
    step_decay: float = 0.8
    losses: dict[str, float] = field(default_factory=dict)
    oov: str = "mask"
    mask_alignment: str = "exact"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    init_head: str = "target"
    warm_start: str | None = None


@dataclass
class TrainerConfig:
    """Optimisation, precision, checkpoints and the Lightning objects that run them."""

    name: str = MISSING
    max_epochs: int = 3
    max_steps: int | None = None
    batch_tokens: int = 4096
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_ratio: float = 0.015
    min_lr_ratio: float = 0.0
    clip_norm: float = 0.5
    validate_every_steps: int = 200
    checkpoint_every_steps: int = 200
    keep_checkpoints: int = 2
    log_every_steps: int = 10
    deterministic: bool = False
    resume: bool = True
    resume_from: str | None = None
    num_workers: int = 0
    compile: bool = False
    profile: bool = False
    lightning: dict[str, Any] = field(default_factory=dict)
    datamodule: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoggerConfig:
    """Trackers: each entry of `loggers` is instantiated; an outage of one never stops training."""

    name: str = MISSING
    mode: str = "offline"
    project: str = "eagle3"
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

    target: str = "vllm"
    engine_version: str | None = None


@dataclass
class EvaluateConfig:
    """Real speculative decoding: prompts, draft length, baselines."""

    sets: list[str] = field(default_factory=lambda: ["heldout", "mt_bench", "human_eval", "gsm8k"])
    prompts_per_set: int | None = 20
    k: int = 3
    temperature: float = 0.0
    max_new_tokens: int = 128
    baselines: list[str] = field(default_factory=lambda: ["untrained", "bigram"])


@dataclass
class InspectConfig:
    """Which prepared samples `stage=inspect` prints."""

    samples: int = 3
    split: str = "train"


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
    inspect: InspectConfig = field(default_factory=InspectConfig)
    inputs: InputsConfig = field(default_factory=InputsConfig)
    output_dir: str = "outputs"
    cache_dir: str | None = None
    seed: int = 0
    dry_run: bool = False
