"""Qwen 2, 2.5 and 3."""

from __future__ import annotations

from eagle3.adapter import Adapter


class QwenAdapter(Adapter):
    """Dense and mixture-of-experts Qwen targets; ChatML turns, an empty think block when Qwen 3 does not think."""

    name = "qwen"
    architectures = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    engines = ("transformers", "vllm")
    ran_on = ("transformers 5.24 CPU", "vllm 0.32 CPU")
    turn_ends = ("<|im_end|>", "<|endoftext|>")
    inserted_texts = ("<think>\n\n</think>\n\n",)
