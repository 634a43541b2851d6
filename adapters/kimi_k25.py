"""Kimi-K2.5: a vision wrapper around DeepSeek V3, its experts in 4-bit integers."""

from __future__ import annotations

from typing import Any

from eagle3.adapter import WeightNames

from .kimi_k2 import KimiK2Adapter


class KimiK25Adapter(KimiK2Adapter):
    """Kimi-K2.5 as published: INT4 experts (WNA16, group size 32), everything else in bfloat16."""

    name = "kimi_k25"
    architectures = ("KimiK25ForConditionalGeneration",)
    layers_path = "language_model.model.layers"
    ran_on = ("vllm 0.32 CPU",)
    weight_names = WeightNames(
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    )
    # The vision tower and what leads from it to the language model.
    unloaded_weights = (r"^vision_tower\.", r"^mm_projector\.")
    whole_tokens = (*KimiK2Adapter.whole_tokens, *KimiK2Adapter.thinking_tokens)

    def text_config(self, config: Any) -> Any:
        """The DeepSeek V3 config inside the wrapper's."""
        return config.text_config

    def text_section(self, config: dict[str, Any]) -> dict[str, Any]:
        """The same in config.json."""
        return config["text_config"]

    def engine_arguments(self) -> dict[str, Any]:
        """The vision tower is not loaded: training data is text."""
        return {"language_model_only": True, "trust_remote_code": True}

    def expected_backends(self) -> dict[str, Any]:
        """What the published INT4 checkpoint must end up with; anything else is slow or wrong."""
        return {
            **super().expected_backends(),
            "quantization": "compressed-tensors",
            "moe": "MARLIN_WNA16",
            "moe_bits": 4,
            "moe_group_size": 32,
        }
