"""Llama 2 and 3, Mistral, SmolLM: the plain decoder that the adapter's defaults describe."""

from __future__ import annotations

from eagle3.adapter import Adapter


class LlamaAdapter(Adapter):
    """Dense Llama-shaped targets."""

    name = "llama"
    architectures = ("LlamaForCausalLM", "MistralForCausalLM")
    engines = ("transformers", "vllm")
    ran_on = ("transformers 5.24 CPU", "vllm 0.32 CPU", "vllm 0.26 H200")
    turn_ends = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
