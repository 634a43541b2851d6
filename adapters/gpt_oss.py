"""gpt-oss: attention sinks, sliding windows, experts in MXFP4, the harmony format."""

from __future__ import annotations

from eagle3.adapter import Adapter


class GptOssAdapter(Adapter):
    """OpenAI's open-weight models."""

    name = "gpt_oss"
    architectures = ("GptOssForCausalLM",)
    engines = ("transformers", "vllm")
    ran_on = ("transformers 5.24 CPU", "vllm 0.32 CPU")
    turn_ends = ("<|return|>", "<|call|>", "<|end|>")
