"""Kimi-K2: DeepSeek V3's layers with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from eagle3.errors import RequestError

from .deepseek_v3 import DeepseekV3Adapter


class KimiK2Adapter(DeepseekV3Adapter):
    """Kimi-K2 (Instruct, Thinking): checkpoints whose `model_type` is kimi_k2."""

    name = "kimi_k2"
    engines = ("vllm",)
    ran_on = ("vllm 0.32 CPU",)
    turn_ends = ("<|im_end|>", "[EOS]")
    inserted_texts = ("<think></think>",)
    # Tokens that must be one id each: these in any case, those of thinking where the chat template writes them.
    whole_tokens: ClassVar[tuple[str, ...]] = ("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
    thinking_tokens: ClassVar[tuple[str, ...]] = ("<think>", "</think>")

    def tokenizer(self, folder: Path, trust_remote_code: bool = False) -> Any:
        """The checkpoint's own tokenizer class, a slow one without offsets.

        RequestError when a special token is not one id: a generic loader may hand out another class, which splits
        `<think>` and so spoils every sample.
        """
        tokenizer = super().tokenizer(folder, trust_remote_code)
        template = str(tokenizer.chat_template)
        thinking = [token for token in self.thinking_tokens if token in template]
        for token in dict.fromkeys((*self.whole_tokens, *thinking)):
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1 or tokenizer.decode(ids) != token:
                raise RequestError(
                    f"{folder}: the tokenizer class {type(tokenizer).__name__} makes {len(ids)} ids of {token}, "
                    "expected one; the checkpoint's own class and tokenizer_config.json are needed: try "
                    "model.trust_remote_code=true, or fetch the checkpoint again"
                )
        return tokenizer
