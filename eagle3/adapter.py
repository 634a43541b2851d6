"""The questions that an architecture answers; `adapters/` holds the answers, one file per family.

An adapter never re-implements a forward pass. It says where things are in a loaded model and in a checkpoint, so that
engines, tokenisation, training and export need no knowledge of any architecture. What this base class says is true of
Llama and of everything shaped like it; a family overrides what differs.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eagle3.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from eagle3.prompts import Message
    from eagle3.rendering import Template


@dataclass(frozen=True)
class TargetShape:
    """The target's sizes as the drafter needs them, read from its text config."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    hidden_act: str
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class WeightNames:
    """Checkpoint names of the three target tensors that a drafter needs; `head` equals `embedding` when tied."""

    embedding: str
    final_norm: str
    head: str


class Adapter(ABC):
    """One architecture family. Subclasses set the class attributes and override what differs from Llama."""

    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]] = ("transformers",)
    # Where captured states of this family were compared with a reference, for `stage=adapters`.
    ran_on: ClassVar[tuple[str, ...]] = ()
    layers_path: ClassVar[str] = "model.layers"
    weight_names: ClassVar[WeightNames] = WeightNames(
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    )
    # Tokens that end an assistant turn beside the checkpoint's EOS; those that a tokenizer lacks are ignored.
    turn_ends: ClassVar[tuple[str, ...]] = ()
    # Whether engines scale the residual stream down in float16, so that states would not be the model's.
    scales_residual_in_float16: ClassVar[bool] = False
    # Tensors that every rank of a tensor-parallel engine holds whole (patterns of checkpoint names), for forecasts.
    replicated_weights: ClassVar[tuple[str, ...]] = (r"norm\.", r"\.gate\.", r"\.router\.")
    # Tensors of the checkpoint that the engine does not load for text.
    unloaded_weights: ClassVar[tuple[str, ...]] = ()
    # Text that the chat template puts into a turn without the model having generated it.
    inserted_texts: ClassVar[tuple[str, ...]] = ()

    def text_config(self, config: Any) -> Any:
        """The language model's config inside a (possibly multimodal) checkpoint config."""
        return config

    def check(self, config: Any, where: str) -> None:
        """Raises RequestError unless the checkpoint's architecture is one of this family."""
        found = list(getattr(config, "architectures", None) or [])
        if not set(found) & set(self.architectures):
            known = families()
            right = [name for name, family in sorted(known.items()) if set(found) & set(family.architectures)]
            hint = f"{right[0]} is the one for it" if right else f"none of {sorted(known)} answers for it"
            raise RequestError(
                f"{where}: found architectures {found}, expected one of {list(self.architectures)} for the adapter "
                f"'{self.name}'; {hint}: see `eagle3 stage=adapters` for the families and adapters/README.md to add one"
            )

    def shape(self, config: Any) -> TargetShape:
        """The target's sizes from its checkpoint config (a transformers config object)."""
        text = self.text_config(config)
        rope = dict(getattr(text, "rope_parameters", None) or {})
        eos = getattr(text, "eos_token_id", None)
        heads = text.num_attention_heads
        return TargetShape(
            architecture=next(name for name in config.architectures if name in self.architectures),
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            intermediate_size=text.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=self.head_dim(text),
            rms_norm_eps=text.rms_norm_eps,
            max_position_embeddings=text.max_position_embeddings,
            rope_theta=float(rope.pop("rope_theta", None) or getattr(text, "rope_theta", None) or 10000.0),
            rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
            hidden_act=text.hidden_act,
            tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
            bos_token_id=getattr(text, "bos_token_id", None),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        )

    def head_dim(self, text_config: Any) -> int:
        """The width of one attention head, as a dense drafter of this family would use it."""
        return getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers of a loaded model. Raises RequestError when the model has no such path."""
        found: Any = model
        for part in self.layers_path.split("."):
            found = getattr(found, part, None)
            if found is None:
                raise RequestError(
                    f"adapter {self.name}: no `{self.layers_path}` in {type(model).__name__}; "
                    f"is this checkpoint really of the family {list(self.architectures)}?"
                )
        return found

    def residual(self, output: Any) -> Tensor:
        """The residual stream after a layer, from what that layer's forward returned.

        vLLM's layers return (hidden, residual), whose sum is the stream; Hugging Face's return hidden or (hidden, ...).
        """
        if not isinstance(output, tuple):
            return output
        hidden, *others = output
        summand = others[0] if others else None
        return hidden + summand if getattr(summand, "shape", None) == hidden.shape else hidden

    def final_norm(self, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm between the final state and the head: RMSNorm, computed in float32 (LlamaRMSNorm).

        states [..., H] and weight [H] of any dtype; the result has the dtype of `states`.
        """
        wide = states.float()
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return weight.to(states.dtype) * wide.to(states.dtype)

    def tokenizer(self, folder: Path, trust_remote_code: bool = False) -> Any:
        """The checkpoint's tokenizer, of the class that this family needs."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)

    def answer_spans(self, template: Template, messages: Sequence[Message], text: str) -> list[tuple[int, int]] | None:
        """The family's own rule for which characters of `text`, the render of `messages`, the assistant generated.

        Only for a template that has no generation markers and on which the general rule of eagle3.rendering cannot be
        verified; None, the default, leaves it to those.
        """
        return None

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments that the target's engine needs for this family (multimodal towers skipped, ...)."""
        return {}

    def text_section(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of a checkpoint's config.json that describes the language model."""
        return config

    def rehearsal_layers(self, text: dict[str, Any]) -> int:
        """The fewest layers that show every kind of layer, from the text section of config.json."""
        return 4

    def shrink(self, config: dict[str, Any], num_layers: int) -> dict[str, Any]:
        """config.json of the same model with its first `num_layers` layers; lists with an entry a layer are cut."""
        shrunk = copy.deepcopy(config)
        text = self.text_section(shrunk)
        whole = text["num_hidden_layers"]
        for key, value in text.items():
            if isinstance(value, list) and len(value) == whole:
                text[key] = value[:num_layers]
        text["num_hidden_layers"] = num_layers
        return shrunk

    def key_value_bytes(self, shape: TargetShape, text: dict[str, Any], ranks: int, itemsize: int) -> int:
        """Bytes of keys and values that one GPU of `ranks` keeps for a token in all layers."""
        heads = max(shape.num_key_value_heads // ranks, 1)
        return 2 * heads * shape.head_dim * itemsize * shape.num_layers

    def expected_backends(self) -> dict[str, Any]:
        """Backends that a correct and fast load of this family ends up with; empty when nothing is expected."""
        return {}

    def drafter_defaults(self, shape: TargetShape) -> dict[str, Any]:
        """The default drafter shape for this target: fields of DrafterConfig by name."""
        return {
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
        }

    def describe(self) -> dict[str, Any]:
        """What `stage=adapters` prints."""
        return {
            "name": self.name,
            "architectures": list(self.architectures),
            "engines": list(self.engines),
            "ran_on": list(self.ran_on),
            "layers": self.layers_path,
            "weights": dataclasses.asdict(self.weight_names),
            "expected_backends": self.expected_backends(),
        }


def families() -> dict[str, type[Adapter]]:
    """The adapters that ship with eagle3 and those of plugins, by name; ours win."""
    import importlib
    import pkgutil

    from eagle3 import plugins

    # Imported by name: type checkers do not see where the wheel puts `adapters/`.
    ours = importlib.import_module("eagle3.adapters")
    found: dict[str, type[Adapter]] = {}
    for package in (*plugins.adapter_packages(), ours):
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            for member in vars(importlib.import_module(f"{package.__name__}.{module}")).values():
                if isinstance(member, type) and issubclass(member, Adapter) and "name" in vars(member):
                    found[member.name] = member
    return found
