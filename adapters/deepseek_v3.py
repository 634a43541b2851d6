"""DeepSeek V2, V3 and R1: multi-head latent attention and a mixture of experts."""

from __future__ import annotations

from typing import Any

from eagle3.adapter import Adapter, TargetShape
from eagle3.errors import RequestError


class DeepseekV3Adapter(Adapter):
    """Targets of the DeepseekV2 and DeepseekV3 architectures, which differ in how experts are chosen."""

    name = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")
    engines = ("transformers", "vllm")
    ran_on = ("transformers 5.24 CPU", "vllm 0.32 CPU")
    scales_residual_in_float16 = True
    replicated_weights = (*Adapter.replicated_weights, r"_a_proj")
    turn_ends = ("<｜end▁of▁sentence｜>",)  # noqa: RUF001 - this is how the token is spelt
    inserted_texts = ("<think>\n\n</think>\n\n",)

    def check(self, config: Any, where: str) -> None:
        """Refuses Kimi-K2, which is of this architecture: only its own adapter knows its tokenizer and its turns."""
        super().check(config, where)
        if getattr(config, "model_type", None) == "kimi_k2" and self.name == DeepseekV3Adapter.name:
            raise RequestError(
                f"{where}: found model_type kimi_k2, whose tokenizer and turns the adapter '{self.name}' does not "
                "know; try model=kimi_k2"
            )

    def head_dim(self, text_config: Any) -> int:
        """The value heads' width: the config's own `head_dim` is only the rotary part of a key."""
        return text_config.v_head_dim

    def rehearsal_layers(self, text: dict[str, Any]) -> int:
        """All dense layers and two with experts."""
        return text.get("first_k_dense_replace", 1) + 2

    def shrink(self, config: dict[str, Any], num_layers: int) -> dict[str, Any]:
        """Without the layers that predict further tokens, which engines leave out too."""
        shrunk = super().shrink(config, num_layers)
        self.text_section(shrunk)["num_nextn_predict_layers"] = 0
        return shrunk

    def key_value_bytes(self, shape: TargetShape, text: dict[str, Any], ranks: int, itemsize: int) -> int:
        """The latent and the rotary part, which every rank keeps whole."""
        return (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * itemsize * shape.num_layers

    def expected_backends(self) -> dict[str, Any]:
        """Latent attention prefilled with FlashAttention."""
        return {"attention": "MLA", "prefill": "FLASH_ATTN"}

    def drafter_defaults(self, shape: TargetShape) -> dict[str, Any]:
        """A dense drafter with as many key and value heads as query heads: latent attention has no groups to copy."""
        return {**super().drafter_defaults(shape), "num_key_value_heads": shape.num_attention_heads}
