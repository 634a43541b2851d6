# ruff: noqa: RUF001 - DeepSeek spells its tokens with fullwidth bars
"""Chat templates of six families, shortened from the published ones, each with a tokenizer that has its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

_TEXTS = [
    "Which of the oceans is the largest? The Pacific is the largest ocean. It is the Arctic Ocean, by far.",
    "What is two and two? I add the numbers. It is four. And three and three? That makes six, of course.",
    "You are a helpful assistant. Let me think about it step by step. Write a poem about the sea.",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen 3: reasoning of earlier turns is dropped; a last turn without reasoning gets an empty block.
CHATML_THINKING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# DeepSeek R1: the prompt opens the reasoning, and every rendered turn is without it.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% else %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# Kimi K2 thinking: each answer begins with a think block, empty where there is no reasoning (always so earlier).
KIMI = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' }}"
    "{% if loop.index0 > last.user or preserve_thinking %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}"
    "{% else %}{{ '<think></think>' }}{% endif %}{% else %}"
    "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
# Mistral: no generation prompt; the answer follows the user's turn at once.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% elif m.role == 'user' %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
# gpt-oss: the answer comes in channels, the last turn ends with another token than earlier ones.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its special tokens (the first is BOS where `bos`, the last ends a turn) and what it inserts."""

    template: str
    special: tuple[str, ...]
    bos: bool = False
    inserted_before: str = ""
    generated_before: str = ""
    ends: tuple[str, str] = ("", "")


FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>"), ends=("<|im_end|>", "<|im_end|>")),
    "chatml_marked": Family(CHATML_MARKED, ("<|im_start|>", "<|im_end|>"), ends=("<|im_end|>", "<|im_end|>")),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos=True,
        ends=("<|eot_id|>", "<|eot_id|>"),
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        bos=True,
        ends=("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ),
    "kimi": Family(
        KIMI,
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        inserted_before="<think></think>",
        ends=("<|im_end|>", "<|im_end|>"),
    ),
    "mistral": Family(
        MISTRAL,
        ("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "</s>"),
        bos=True,
        ends=("</s>", "</s>"),
    ),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        generated_before="<|channel|>final<|message|>",
        ends=("<|end|>", "<|return|>"),
    ),
}


def make_tokenizer(template: str | None, special: tuple[str, ...], bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 350 ids with these special tokens; `<think>` and `</think>` are one id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0] if bos else None,
        eos_token=special[-1],
        pad_token=special[-1],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family."""
    family = FAMILIES[name]
    return make_tokenizer(family.template, family.special, family.bos)


class SlowTokenizer(PreTrainedTokenizer):
    """A tokenizer without offsets, as Kimi's own: Python around the ids of a fast one."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self.fast = fast
        super().__init__(
            bos_token=fast.bos_token,
            eos_token=fast.eos_token,
            pad_token=fast.pad_token,
            added_tokens_decoder=dict(fast.added_tokens_decoder),
            clean_up_tokenization_spaces=False,
        )
        self.chat_template = fast.chat_template

    @property
    def vocab_size(self) -> int:
        return self.fast.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return self.fast.get_vocab()

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return self.fast.backend_tokenizer.encode(text, add_special_tokens=False).tokens

    def _convert_token_to_id(self, token: str) -> int:
        return self.fast.get_vocab()[token]

    def _convert_id_to_token(self, index: int) -> str:
        token = self.fast.backend_tokenizer.id_to_token(index)
        assert token is not None
        return token

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.fast.backend_tokenizer.decoder.decode(tokens)
