# ruff: noqa: RUF001 - DeepSeek spells its tokens with fullwidth bars
"""Token ids and loss masks: six template families, with and without markers, offsets and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from eagle3.adapters.llama import LlamaAdapter
from eagle3.adapters.qwen import QwenAdapter
from eagle3.encoding import decode, encode
from eagle3.errors import Eagle3Error, RequestError
from eagle3.prompts import Message
from eagle3.rendering import Template, Unrenderable
from eagle3.tokens import Tokens, check_template, prompt_ids, sample_id, special_ids, stop_ids, tokenize
from tests.families import (
    CHATML,
    CHATML_MARKED,
    CHATML_THINKING,
    DEEPSEEK,
    FAMILIES,
    HARMONY,
    KIMI,
    SlowTokenizer,
    family_tokenizer,
    make_tokenizer,
)

IM = ("<|im_start|>", "<|im_end|>")
CHAT = (
    Message("system", "You are a helpful assistant."),
    Message("user", "Which of the oceans is the largest?"),
    Message("assistant", "The Pacific is the largest ocean."),
    Message("user", "What is two and two? 🙂"),
    Message("assistant", "It is four: 2 + 2 = 4 — Ä 🙂\n\n```\nprint(4)\n```"),
)
THOUGHTS = (
    Message("user", "What is two and two?"),
    Message("assistant", "It is four.", reasoning="I add the numbers. It is four."),
    Message("user", "And three and three?"),
    Message("assistant", "That makes six.", reasoning="Three and three, I think."),
)


def template_of(text: str, special: tuple[str, ...] = IM, adapter: Any = None, **options: bool) -> Template:
    return Template(make_tokenizer(text, special), adapter or LlamaAdapter(), **options)


def spans(tokenizer: Any, tokens: Tokens) -> list[str]:
    """The decoded text of each masked run."""
    found, start = [], 0
    for masked, run in groupby(tokens.loss_mask.tolist()):
        end = start + len(list(run))
        if masked:
            found.append(decode(tokenizer, tokens.input_ids[start:end].tolist()))
        start = end
    return found


def only(items: Sequence[Tokens]) -> Tokens:
    assert len(items) == 1
    return items[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_masked_text_is_the_answers_and_their_end(name: str) -> None:
    """D5: no family's markers are known to the rule."""
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    template = Template(tokenizer, LlamaAdapter())
    check_template(template, name)
    tokens = only(tokenize(template, CHAT))
    expected = [
        family.generated_before + message.content + end
        for message, end in zip((CHAT[2], CHAT[4]), family.ends, strict=True)
    ]
    assert spans(tokenizer, tokens) == expected
    assert tokens.input_ids.dtype == np.int32
    assert tokens.loss_mask.dtype == bool
    assert 0 < tokens.loss_mask.sum() < len(tokens.loss_mask)
    assert decode(tokenizer, tokens.input_ids.tolist()) == template.text(CHAT)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_template_and_begin_with_what_a_server_prefills(name: str) -> None:
    """D10: one BOS at most, and the prompt of each turn is what stands before its answer."""
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    tokens = only(tokenize(Template(tokenizer, LlamaAdapter()), CHAT))
    plain = [{"role": m.role, "content": m.content} for m in CHAT]
    assert tokens.input_ids.tolist() == tokenizer.apply_chat_template(plain)["input_ids"]
    if family.bos:
        assert tokens.input_ids[0] == tokenizer.bos_token_id
        assert (tokens.input_ids == tokenizer.bos_token_id).sum() == 1
    opener = "<think>\n" if name == "deepseek" else ""
    starts = np.flatnonzero(np.diff(tokens.loss_mask.astype(int), prepend=0) == 1)
    for turn, start in zip((2, 4), starts, strict=True):
        prefill = decode(tokenizer, prompt_ids(Template(tokenizer, LlamaAdapter()), CHAT[:turn]))
        before = decode(tokenizer, tokens.input_ids[:start].tolist())
        assert before == prefill.removesuffix(opener) + family.inserted_before


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tokenizer_without_offsets_gives_the_same_ids_and_mask(name: str) -> None:
    """D4, D6."""
    fast = family_tokenizer(name)
    slow = SlowTokenizer(fast)
    assert not slow.is_fast
    expected = only(tokenize(Template(fast, LlamaAdapter()), CHAT))
    found = only(tokenize(Template(slow, LlamaAdapter()), CHAT))
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}", "{%-generation-%}", "{%  generation  %}"])
def test_every_spelling_of_the_marker_agrees_with_the_library_mask(tag: str) -> None:
    """D4, against Hugging Face's own mask."""
    tokenizer = make_tokenizer(CHATML_MARKED.replace("{% generation %}", tag), IM)
    template = Template(tokenizer, LlamaAdapter())
    assert template.has_markers
    tokens = only(tokenize(template, CHAT))
    reference = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT], return_assistant_tokens_mask=True, return_dict=True
    )
    assert tokens.input_ids.tolist() == reference["input_ids"]
    assert tokens.loss_mask.tolist() == [bool(m) for m in reference["assistant_masks"]]


def test_a_generation_prompt_is_no_marker() -> None:
    """D4."""
    assert not template_of(CHATML).has_markers


def test_the_end_token_belongs_to_the_turn_wherever_the_markers_end() -> None:
    outside = CHATML_MARKED.replace(
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
    )
    behind = CHATML_MARKED.replace("m.content + '<|im_end|>' }}{% endgen", "m.content + '<|im_end|>\n' }}{% endgen")
    expected = only(tokenize(template_of(CHATML_MARKED), CHAT))
    for text in (outside, behind):
        assert text != CHATML_MARKED
        template = template_of(text)
        assert spans(template.tokenizer, only(tokenize(template, CHAT))) == spans(template.tokenizer, expected)


def test_no_markers_and_no_generation_prompt_is_refused_with_two_remedies() -> None:
    """D1."""
    bare = CHATML.replace("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")
    with pytest.raises(RequestError) as caught:
        check_template(template_of(bare), "/models/x")
    words = str(caught.value)
    assert words.startswith("/models/x: the chat template has no {% generation %} markers")
    assert "model.chat_template=FILE" in words
    assert "`answer_spans`" in words


def test_an_adapter_can_answer_for_its_template() -> None:
    """D1: the second remedy."""

    class Plain(LlamaAdapter):
        def answer_spans(self, template: Template, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
            ends = [text.index(m.content) + len(m.content) for m in messages if m.role == "assistant"]
            answers = [m.content for m in messages if m.role == "assistant"]
            return [(end - len(answer), end) for end, answer in zip(ends, answers, strict=True)]

    bare = CHATML.replace("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")
    template = template_of(bare, adapter=Plain())
    check_template(template, "here")
    assert spans(template.tokenizer, only(tokenize(template, CHAT)))[0] == CHAT[2].content + "<|im_end|>"


def test_no_template_at_all_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"^model.chat_template: .*has no chat template; set model.chat_template=FILE"
    ):
        template_of(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("marked", [CHATML, CHATML_MARKED])
def test_a_template_that_rewrites_text_is_refused(marked: str) -> None:
    """D5: never a guessed span."""
    shouting = marked.replace("m.content", "(m.content | upper if m.role == 'user' else m.content)")
    with pytest.raises(RequestError, match="rewrites or drops a user turn"):
        check_template(template_of(shouting), "here")
    changed = marked.replace("m.content", "(m.content | replace('Pacific', 'sea'))")
    with pytest.raises(RequestError, match="rewrites an answer"):
        check_template(template_of(changed), "here")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_spells_role_markers_is_masked_whole(name: str) -> None:
    """D5; the spelt markers become tokens, as in a server, and the conversation is counted for it."""
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    template = Template(tokenizer, LlamaAdapter())
    marker = f"{family.special[-1]}\n{family.special[0]}assistant\nIt is four."
    chat = (CHAT[1], Message("assistant", f"Write {marker} and stop."), CHAT[3], CHAT[4])
    found = spans(tokenizer, only(tokenize(template, chat)))
    assert found[0] == family.generated_before + chat[1].content + family.ends[0]
    assert found[1] == family.generated_before + chat[3].content + family.ends[1]
    assert template.spells_special_token(chat)
    assert not template.spells_special_token(CHAT)


def test_earlier_reasoning_is_dropped_with_the_template() -> None:
    """D7: ids of one full render; the mask marks what it shows of each answer."""
    template = template_of(CHATML_THINKING, adapter=QwenAdapter())
    tokens = only(tokenize(template, THOUGHTS))
    assert tokens.input_ids.tolist() == encode(template.tokenizer, template.text(THOUGHTS))
    assert spans(template.tokenizer, tokens) == [
        "It is four.<|im_end|>",
        "<think>\nThree and three, I think.\n</think>\n\nThat makes six.<|im_end|>",
    ]


def test_preserved_reasoning_splits_the_conversation_by_turn() -> None:
    """D7: each turn as the target wrote it, with what a server had in front of it."""
    template = template_of(CHATML_THINKING, adapter=QwenAdapter(), preserve_thinking=True)
    first, second = tokenize(template, THOUGHTS)
    assert first.input_ids.tolist() == encode(template.tokenizer, template.text(THOUGHTS[:2]))
    assert second.input_ids.tolist() == encode(template.tokenizer, template.text(THOUGHTS))
    thoughts = "<think>\nI add the numbers. It is four.\n</think>\n\nIt is four.<|im_end|>"
    assert spans(template.tokenizer, first) == [thoughts]
    assert spans(template.tokenizer, second) == [
        "<think>\nThree and three, I think.\n</think>\n\nThat makes six.<|im_end|>"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        Message("assistant", "It is four.", reasoning="Three and three, I think."),
        Message("assistant", "<think>\nI add.\n</think>\n\nIt is four."),
        Message("assistant", "I add.\n</think>\n\nIt is four."),
    ],
    ids=["as in the next turn", "inline", "inline, opened by the prompt"],
)
def test_reasoning_whose_words_stand_elsewhere_is_still_missed(answer: Message) -> None:
    """D7: what a template drops is told by the turn, not by the words."""
    later = (Message("user", "You said: I add."), *THOUGHTS[3:])
    cutting = CHATML_THINKING.replace("m.content +", "m.content.split('</think>')[-1].strip() +")
    template = template_of(cutting, adapter=QwenAdapter(), preserve_thinking=True)
    assert len(tokenize(template, (THOUGHTS[0], answer, *later))) == 2
    assert len(tokenize(template, (THOUGHTS[0], Message("assistant", "It is four."), *later))) == 1
    assert template_of(CHATML).drops_reasoning((THOUGHTS[0], Message("assistant", "It is four.", reasoning="four")))


def test_a_template_that_can_preserve_reasoning_is_asked_to() -> None:
    """D7: Kimi's template reads `preserve_thinking`, so the conversation stays whole."""
    template = template_of(KIMI, FAMILIES["kimi"].special, preserve_thinking=True)
    assert spans(template.tokenizer, only(tokenize(template, THOUGHTS))) == [
        "<think>I add the numbers. It is four.</think>It is four.<|im_end|>",
        "<think>Three and three, I think.</think>That makes six.<|im_end|>",
    ]


def test_channels_keep_reasoning_of_the_last_turn_only() -> None:
    """D7, D8: what stands behind a turn-end token that ends no turn (the analysis channel's) stays supervised."""
    template = template_of(HARMONY, FAMILIES["harmony"].special)
    assert spans(template.tokenizer, only(tokenize(template, THOUGHTS))) == [
        "<|channel|>final<|message|>It is four.<|end|>",
        "<|channel|>analysis<|message|>Three and three, I think.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>That makes six.<|return|>",
    ]


def test_inline_reasoning_that_the_template_cuts_out() -> None:
    """D7: DeepSeek's render has no reasoning although its prompt opens one."""
    template = template_of(DEEPSEEK, FAMILIES["deepseek"].special)
    chat = (THOUGHTS[0], Message("assistant", "<think>\nI add.\n</think>\n\nIt is four."), *THOUGHTS[2:])
    found = spans(template.tokenizer, only(tokenize(template, chat)))
    assert [text.strip() for text in found] == [
        "It is four.<｜end▁of▁sentence｜>",
        "That makes six.<｜end▁of▁sentence｜>",
    ]
    assert template.drops_reasoning(chat)


def test_an_empty_think_block_is_not_supervised_unless_asked() -> None:
    """D8."""
    chat = (Message("user", "What is two and two?"), Message("assistant", "It is four."))
    opened = CHATML_THINKING.replace(
        "{{ '<|im_start|>assistant\n' }}{% endif %}", "{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    for text, block in ((CHATML_THINKING, "<think>\n\n</think>\n\n"), (opened, "\n</think>\n\n")):
        template = template_of(text)
        found = only(tokenize(template, chat))
        assert "<think>\n\n</think>\n\nIt is four." in template.text(chat)
        assert spans(template.tokenizer, found) == ["It is four.<|im_end|>"]
        asked = template_of(text, supervise_empty_thinking=True)
        assert spans(asked.tokenizer, only(tokenize(asked, chat))) == [f"{block}It is four.<|im_end|>"]


def test_the_answer_is_found_behind_reasoning_that_quotes_it() -> None:
    chat = (
        Message("user", "What is two and two?"),
        Message("assistant", "4", reasoning="2 + 2 = 4<|im_end|>\n4<|im_end|>"),
    )
    template = template_of(CHATML_THINKING, adapter=QwenAdapter())
    text = "<think>\n2 + 2 = 4<|im_end|>\n4<|im_end|>\n</think>\n\n4<|im_end|>"
    assert spans(template.tokenizer, only(tokenize(template, chat))) == [text]


def test_a_special_token_that_swallows_whitespace_ends_the_span() -> None:
    """Phi: the end token takes the line break behind it, and the whole render ends with one more token."""
    from tokenizers import AddedToken

    text = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
    )
    tokenizer = make_tokenizer(text, ("<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", rstrip=True, normalized=False)]})
    template = Template(tokenizer, LlamaAdapter())
    tokens = only(tokenize(template, CHAT))
    assert spans(tokenizer, tokens) == [m.content + "<|end|>" for m in (CHAT[2], CHAT[4])]
    assert tokens.input_ids[-1] == tokenizer.eos_token_id
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert stop_ids(tokenizer, LlamaAdapter()) == sorted([end, tokenizer.eos_token_id])


def test_plain_text_markers_have_no_end_token_to_learn() -> None:
    text = (
        "{% for m in messages %}{{ m.role.upper() + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
    )
    template = template_of(text.replace("': '", "':\n'").replace("'ASSISTANT: '", "'ASSISTANT:\n'"))
    assert spans(template.tokenizer, only(tokenize(template, CHAT))) == [CHAT[2].content, CHAT[4].content]


@pytest.mark.parametrize("slow", [False, True])
def test_a_token_across_the_edge_of_an_answer_is_refused(slow: bool) -> None:
    """A server that was given the prompt's ids never sees such a token."""
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    )
    tokenizer: Any = make_tokenizer(text, IM)
    tokenizer = SlowTokenizer(tokenizer) if slow else tokenizer
    assert "Ġthe" in tokenizer.get_vocab()
    chat = (CHAT[1], Message("assistant", "the largest"))
    with pytest.raises(Unrenderable, match="a token crosses the edge of an answer"):
        tokenize(Template(tokenizer, LlamaAdapter()), chat)


def test_what_a_template_refuses_is_a_reason_in_its_own_words() -> None:
    text = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
    template = template_of(text)
    check_template(template, "here")
    with pytest.raises(Unrenderable, match=r"^the chat template refuses it: System role not supported$"):
        tokenize(template, CHAT)


def test_two_bos_tokens_are_refused() -> None:
    """D10."""
    family = FAMILIES["llama3"]
    tokenizer = make_tokenizer("{{ bos_token }}" + family.template, family.special, bos=True)
    with pytest.raises(RequestError, match=r"^here: the chat template renders two BOS tokens"):
        check_template(Template(tokenizer, LlamaAdapter()), "here")


@pytest.mark.parametrize("result", [{"a": 1}, [[1, 2]], np.array([1, 2]), ["1"]])
def test_ids_that_are_no_flat_list_are_an_error(result: Any) -> None:
    """D11."""

    class Odd(PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return {"input_ids": result}

    odd = Odd(tokenizer_object=make_tokenizer(CHATML, IM).backend_tokenizer)
    with pytest.raises(Eagle3Error, match="expected a flat list of ints"):
        encode(odd, "text")


def test_stop_and_special_ids() -> None:
    tokenizer = family_tokenizer("llama3")
    assert stop_ids(tokenizer, LlamaAdapter()) == [tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    assert set(stop_ids(tokenizer, LlamaAdapter(), [7])) == {7, *stop_ids(tokenizer, LlamaAdapter())}
    wanted = tokenizer.convert_tokens_to_ids(list(FAMILIES["llama3"].special))
    assert special_ids(tokenizer, LlamaAdapter()) == sorted(wanted)
    kimi = family_tokenizer("kimi")
    kimi.add_special_tokens({"additional_special_tokens": ["<|reserved_7|>"]})
    ids = special_ids(kimi, LlamaAdapter())
    assert set(kimi.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>", "<|im_user|>"])) <= set(ids)
    assert kimi.convert_tokens_to_ids("<|reserved_7|>") not in ids


def test_a_sample_id_stands_for_the_ids() -> None:
    ids = np.array([1, 2, 3], dtype=np.int32)
    assert sample_id(ids) == sample_id(np.array([1, 2, 3], dtype=np.int64))
    assert sample_id(ids) != sample_id(ids[::-1])
    assert len(sample_id(ids)) == 16
