"""The questions that an architecture answers; `adapters/` holds the answers, one file per family.

An adapter never re-implements a forward pass. It says where things are in a loaded model and in a checkpoint, so that
engines, tokenisation, training and export need no knowledge of any architecture.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from eagle3.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    layers_path: ClassVar[str] = "model.layers"
    weight_names: ClassVar[WeightNames] = WeightNames("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")

    def text_config(self, config: Any) -> Any:
        """The language model's config inside a (possibly multimodal) checkpoint config."""
        return config

    def check(self, config: Any, where: str) -> None:
        """Raises RequestError unless the checkpoint's architecture is one of this family."""
        found = list(getattr(config, "architectures", None) or [])
        if not set(found) & set(self.architectures):
            raise RequestError(
                f"{where}: found architectures {found}, expected one of {list(self.architectures)} for the adapter "
                f"'{self.name}'; see `eagle3 stage=adapters` for the families and adapters/README.md to add one"
            )

    def shape(self, config: Any) -> TargetShape:
        """The target's sizes from its checkpoint config."""
        raise NotImplementedError

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers of a loaded model."""
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
        if isinstance(output, tuple):
            if len(output) > 1 and output[1] is not None and hasattr(output[1], "shape"):
                return output[0] + output[1] if output[1].shape == output[0].shape else output[0]
            return output[0]
        return output

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments that the target's engine needs for this family (multimodal towers skipped, ...)."""
        return {}

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
        return {"name": self.name, "architectures": list(self.architectures), "weights": dataclasses.asdict(self.weight_names)}
