"""The target's checkpoint folder: found, checked and read without loading the model (before step 1 of the walk).

Everything that can be wrong with a checkpoint and can be seen in its config, its index or the headers of its shards is
seen here, in a second, before an engine spends minutes on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle3.adapter import Adapter, TargetShape, families
from eagle3.config import Config, ModelConfig, build
from eagle3.errors import RequestError
from eagle3.hub import cached, fetch
from eagle3.weights import Weights, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
# Where a loader wrote itself into a config: true of the file, not of the model.
VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype")


class TargetHead(nn.Module):
    """The target's final norm and head, frozen: the teacher that turns a final state into logits.

    weight [V, H] and norm_weight [H] in the dtype they were read in; states [..., H] pre-norm.
    """

    weight: Tensor
    norm_weight: Tensor

    def __init__(self, adapter: Adapter, norm_weight: Tensor, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.adapter = adapter
        self.eps = eps
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.register_buffer("weight", weight, persistent=False)

    def normed(self, states: Tensor) -> Tensor:
        """final_norm(states) [..., H], in the dtype of `states`."""
        return self.adapter.final_norm(states, self.norm_weight, self.eps)

    def forward(self, states: Tensor) -> Tensor:
        """The target's logits [..., V] of pre-norm final states [..., H]."""
        return nn.functional.linear(self.normed(states).to(self.weight.dtype), self.weight)

    def rows(self, ids: Tensor) -> TargetHead:
        """The same teacher with the rows of some token ids [D] only: logits [..., D]."""
        return TargetHead(self.adapter, self.norm_weight, self.weight[ids], self.eps)


@dataclass
class Target:
    """A checked checkpoint folder with the adapter that answers for it."""

    model: ModelConfig
    folder: Path
    adapter: Adapter
    config: Any
    shape: TargetShape
    weights: Weights

    def tensor(self, name: str) -> Tensor:
        """One tensor out of the checkpoint, without loading the model. RequestError when it is absent."""
        return self.weights.tensor(name)

    def embedding(self) -> Tensor:
        """The input embedding [V, H] in the checkpoint's dtype."""
        return self.tensor(self.adapter.weight_names.embedding)

    def final_norm(self) -> Tensor:
        """The weight [H] of the norm before the head."""
        return self.tensor(self.adapter.weight_names.final_norm)

    def head(self) -> Tensor:
        """The head [V, H]; the embedding where the two are tied."""
        names = self.adapter.weight_names
        tied = self.shape.tie_word_embeddings and names.head not in self.weights
        return self.tensor(names.embedding if tied else names.head)

    def teacher_head(self, dtype: torch.dtype = torch.float32) -> TargetHead:
        """The frozen norm and head in `dtype`."""
        return TargetHead(self.adapter, self.final_norm().to(dtype), self.head().to(dtype), self.shape.rms_norm_eps)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of `model.tokenizer` or of the checkpoint, with the override of its chat template applied."""
        tokenizer = self.adapter.tokenizer(self.tokenizer_folder, self.model.trust_remote_code)
        if self.model.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    @cached_property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer lies: the checkpoint unless `model.tokenizer` says otherwise."""
        if self.model.tokenizer is None:
            return self.folder
        return _folder(self.model.tokenizer, None, "model.tokenizer", weights=False)

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja text of the chat template in force; None when the checkpoint has none."""
        given = self.model.chat_template
        if given is not None:
            if "{" in given:
                return given
            if Path(given).expanduser().is_file():
                return Path(given).expanduser().read_text(encoding="utf-8")
            raise RequestError(f"model.chat_template: no file {given}; expected a Jinja file or the template itself")
        file = self.tokenizer_folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = read_json(self.tokenizer_folder / "tokenizer_config.json", missing={}).get("chat_template")
        return template if template is None or isinstance(template, str) else json.dumps(template, sort_keys=True)

    @property
    def quantization(self) -> dict[str, Any] | str | None:
        """How the weights are quantized: `model.quantization`, else what the config says, else None."""
        text = self.adapter.text_config(self.config)
        found = getattr(self.config, "quantization_config", None) or getattr(text, "quantization_config", None)
        if self.model.quantization is not None:
            return self.model.quantization
        return found if found is None or isinstance(found, dict) else found.to_dict()

    def fingerprint(self) -> dict[str, Any]:
        """What the target's numbers depend on, wherever the folder lies; plain values for artifact identities.

        The weights enter by size, header and samples of their bytes: a fine-tune of the same shape is another target.
        """
        return dict(self._fingerprint)

    def differences(self, fingerprint: Mapping[str, Any]) -> str:
        """How another fingerprint differs from this target's, key by key; empty when it does not."""
        mine = self._fingerprint
        keys = [key for key in sorted({*mine, *fingerprint}) if mine.get(key) != fingerprint.get(key)]
        return ", ".join(f"{key} {fingerprint.get(key)!r} there, {mine.get(key)!r} here" for key in keys)

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        config = read_json(self.folder / "config.json")
        for key in VOLATILE_CONFIG_KEYS:
            config.pop(key, None)
        return {
            "adapter": self.adapter.name,
            "architecture": self.shape.architecture,
            "revision": self.model.revision,
            "quantization": self.quantization,
            "config": _hash(json.dumps(config, sort_keys=True).encode()),
            "weights": self.weights.digest(),
            "tokenizer": self.tokenizer_hash,
            "chat_template": _hash((self.chat_template or "").encode()),
        }

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer's files; the chat template is not part of it."""
        folder = self.tokenizer_folder
        settings = read_json(folder / "tokenizer_config.json", missing={})
        settings.pop("chat_template", None)
        files = [folder / name for name in TOKENIZER_FILES] + sorted(folder.glob("tokenization_*.py"))
        parts = [part for file in files if file.is_file() for part in (file.name.encode(), file.read_bytes())]
        return _hash(json.dumps(settings, sort_keys=True).encode(), *parts)


def open_target(cfg: Config) -> Target:
    """Finds and checks the target of `cfg.model`; no weight is read but the three that a drafter needs, by header.

    A hub model is fetched, but not for a dry run or an estimate. Raises RequestError for a path that is no model, an
    architecture that the adapter does not know, missing or truncated shards, and sizes that contradict the config.
    """
    model = cfg.model
    adapter = adapter_of(model)
    asked = "dry_run=true" if cfg.dry_run else "stage=estimate" if cfg.stage.name == "estimate" else None
    folder = _folder(model.path, cfg.cache_dir, "model.path", weights=True, revision=model.revision, offline_for=asked)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise RequestError(
            f"model.path: {folder} is no model: found no config.json, expected a Hugging Face checkpoint folder; "
            "set model.path to one, or try model=smollm2_135m"
        )
    raw = read_json(config_file)
    config = _load_config(folder, raw, model.trust_remote_code)
    adapter.check(config, str(config_file))
    shape = _with_generation_eos(adapter.shape(config), folder)
    for name, found in (("num_hidden_layers", shape.num_layers), ("hidden_size", shape.hidden_size)):
        expected = getattr(model, name)
        if expected is not None and expected != found:
            raise RequestError(
                f"model.{name}: {expected} is configured, but {config_file} says {found}; correct one, or leave "
                f"model.{name}=null"
            )
    target = Target(model, folder, adapter, config, shape, Weights(folder))
    target.weights.check()
    _check_shapes(target)
    return target


def adapter_of(model: ModelConfig) -> Adapter:
    """The adapter that `model.adapter` names. RequestError when it names none."""
    if not model.adapter:
        names = sorted(families())
        raise RequestError(
            f"model.adapter: none chosen; expected one of {names}; "
            "try '+model.adapter._target_=eagle3.adapters.llama.LlamaAdapter' or model=llama"
        )
    adapter = build(model.adapter, "model.adapter")
    if not isinstance(adapter, Adapter):
        raise RequestError(
            f"model.adapter: {model.adapter.get('_target_')} made a {type(adapter).__name__}, expected an "
            "eagle3.adapter.Adapter; see `eagle3 stage=adapters`"
        )
    return adapter


def _folder(
    path: str,
    cache_dir: str | None,
    where: str,
    *,
    weights: bool,
    revision: str | None = None,
    offline_for: str | None = None,
) -> Path:
    """The local folder behind a path, an `asset:` name or a hub id; `offline_for` is what must not download."""
    if path.startswith("asset:"):
        from eagle3.assets import asset_path, cache_folder

        return asset_path(path.removeprefix("asset:"), cache_folder(cache_dir))
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise RequestError(
            f"{where}: {path} is no folder; expected a checkpoint folder, asset:<name> or a hub id such as org/name"
        )
    patterns = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"] + (["*.safetensors"] if weights else [])
    if offline_for is None:
        return fetch(path, revision, patterns, where)
    folder = cached(path, revision, patterns)
    if folder is None:
        raise RequestError(
            f"{where}: {path} is no local folder and not in the hub cache; {offline_for} downloads no weights, on "
            f"which ids of artifacts depend; run `hf download {path}` first, if that is its hub id"
        )
    return folder


def _load_config(folder: Path, raw: dict[str, Any], trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if not raw.get("architectures"):
        raise RequestError(
            f"{folder / 'config.json'}: names no `architectures`, expected for example ['LlamaForCausalLM']; "
            "is this the folder of a whole model?"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{folder / 'config.json'}: transformers cannot read it ({type(error).__name__}: {error}); "
            "try a newer transformers, or model.trust_remote_code=true for a model that brings its own code"
        ) from error


def _with_generation_eos(shape: TargetShape, folder: Path) -> TargetShape:
    """Adds the end tokens of generation_config.json, where chat models keep their end-of-turn token."""
    eos = read_json(folder / "generation_config.json", missing={}).get("eos_token_id")
    more = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return dataclasses.replace(shape, eos_token_ids=tuple(dict.fromkeys(shape.eos_token_ids + more)))


def _check_shapes(target: Target) -> None:
    """RequestError unless the tensors that a drafter needs are there in the sizes that the config gives."""
    names, rows, width = target.adapter.weight_names, target.shape.vocab_size, target.shape.hidden_size
    expected_shapes = {names.embedding: [rows, width], names.final_norm: [width]}
    if not target.shape.tie_word_embeddings or names.head in target.weights:
        expected_shapes[names.head] = [rows, width]
    for name, expected in expected_shapes.items():
        found = target.weights.shape(name)
        if found != expected:
            raise RequestError(
                f"{target.folder}: {name} has shape {found}, config.json says {expected}; "
                "config and weights belong to different models"
            )


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
