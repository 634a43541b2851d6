"""Kimi-K2.5: a vision wrapper around DeepSeek V3, its experts in 4-bit integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.adapters.deepseek_v3 import DeepseekV3Adapter

from eagle3.adapter import WeightNames
from eagle3.errors import RequestError

THINK_TOKENS = ("<think>", "</think>")


class KimiK25Adapter(DeepseekV3Adapter):
    """Kimi-K2.5 as published: INT4 experts (WNA16, group size 32), everything else in bfloat16."""

    name = "kimi_k25"
    architectures = ("KimiK25ForConditionalGeneration",)
    engines = ("vllm",)
    layers_path = "language_model.model.layers"
    weight_names = WeightNames(
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    )
    turn_ends = ("<|im_end|>", "[EOS]")
    inserted_texts = ("<think></think>",)

    def text_config(self, config: Any) -> Any:
        """The DeepSeek V3 config inside the wrapper's."""
        return config.text_config

    def tokenizer(self, folder: Path, trust_remote_code: bool = False) -> Any:
        """The checkpoint's own tokenizer class. Raises RequestError when a think token is not one id.

        A generic loader may hand out another class, which splits `<think>` and so spoils every sample.
        """
        tokenizer = super().tokenizer(folder, trust_remote_code)
        for token in THINK_TOKENS:
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1:
                raise RequestError(
                    f"{folder}: the tokenizer class {type(tokenizer).__name__} makes {len(ids)} ids of {token}, "
                    "expected one; the checkpoint's own class is needed: try model.trust_remote_code=true"
                )
        return tokenizer

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
