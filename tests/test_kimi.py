"""Kimi's tokenizer: Python around byte ranks, without offsets, from the checkpoint's own code (D6, D7)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eagle3.adapters.kimi_k2 import KimiK2Adapter
from eagle3.adapters.kimi_k25 import KimiK25Adapter
from eagle3.checkpoint import open_target
from eagle3.encoding import decode
from eagle3.errors import RequestError
from eagle3.prompts import Message
from eagle3.rendering import Template
from eagle3.tokens import Tokens, tokenize
from tests.conftest import target_config, write_tokenizer
from tests.families import KIMI
from tests.vllm.checkpoints import kimi_k2

SPECIAL = ["[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
SPECIAL += ["<think>", "</think>"]
# A slow tokenizer of tiktoken's kind: ranks of byte strings, the pair of lowest rank is merged first.
CODE = '''
import base64
import regex
from transformers import PreTrainedTokenizer

PIECES = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+""")


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        with open(vocab_file) as file:
            lines = file.read().split("\\n")
        self.ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in lines if line)}
        self.parts = {rank: part for part, rank in self.ranks.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        names = {"".join(map(chr, part)): rank for part, rank in self.ranks.items()}
        return {**names, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        found = []
        for piece in PIECES.findall(text):
            parts = [bytes([b]) for b in piece.encode()]
            while len(parts) > 1:
                rank, at = min((self.ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
                if rank == 1 << 30:
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            found += ["".join(map(chr, part)) for part in parts]
        return found

    def _convert_token_to_id(self, token):
        return self.ranks[bytes(map(ord, token))]

    def _convert_id_to_token(self, index):
        return "".join(map(chr, self.parts[index]))

    def convert_tokens_to_string(self, tokens):
        return bytes(ord(c) for token in tokens for c in token).decode("utf-8", "replace")
'''


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The twin with offsets: the same merges in Hugging Face's own kind."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("fast")
    write_tokenizer(folder, chat_template=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = KIMI
    return tokenizer


@pytest.fixture(scope="module")
def checkpoint(fast: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Kimi's is: tiktoken.model, tokenization code, an auto_map."""
    import base64

    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    added = {str(token) for token in fast.added_tokens_encoder}
    vocabulary = {token: rank for token, rank in fast.get_vocab().items() if token not in added}
    folder = tmp_path_factory.mktemp("kimi")
    ranks = [(base64.b64encode(bytes(letters[c] for c in token)), rank) for token, rank in vocabulary.items()]
    (folder / "tiktoken.model").write_text("".join(f"{part.decode()} {rank}\n" for part, rank in ranks))
    (folder / "tokenization_kimi.py").write_text(CODE)
    decoder = {
        str(index): {"content": str(token), "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        for token, index in fast.added_tokens_encoder.items()
    }
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": decoder,
        "eos_token": "[EOS]",
        "chat_template": KIMI,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "architectures": []}))
    return folder


@pytest.fixture(scope="module")
def slow(checkpoint: Path) -> Any:
    """The checkpoint's own tokenizer, through the adapter."""
    return KimiK25Adapter().tokenizer(checkpoint, trust_remote_code=True)


CHAT = [
    Message("user", "What is the capital of France? Zwölf 東京"),
    Message("assistant", "The capital of France is Paris.", reasoning="I know it."),
    Message("user", "And of Germany?"),
    Message("assistant", "Berlin, of course — 東京 is not.", reasoning="The user asks again."),
]


def masked(tokenizer: Any, samples: list[Tokens]) -> list[tuple[list[int], list[bool]]]:
    return [(sample.input_ids.tolist(), sample.loss_mask.tolist()) for sample in samples]


def test_the_checkpoints_own_class_is_loaded(slow: Any) -> None:
    """D6: `<think>` is one id, and goes there and back."""
    assert type(slow).__name__ == "TikTokenTokenizer"
    assert not slow.is_fast
    for token in ("<think>", "</think>", "<|im_end|>"):
        (index,) = slow.encode(token, add_special_tokens=False)
        assert slow.decode([index]) == token
    text = "Zwölf 東京 <think>a b</think>  x\n\n"
    assert decode(slow, slow.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("preserve_thinking", [False, True])
def test_ids_and_mask_are_those_of_the_fast_twin(fast: Any, slow: Any, preserve_thinking: bool) -> None:
    """D6, D7: without offsets the mask comes from token counts; earlier reasoning is dropped, or kept."""
    adapter = KimiK25Adapter()
    found = [
        tokenize(Template(tokenizer, adapter, preserve_thinking=preserve_thinking), CHAT) for tokenizer in (slow, fast)
    ]
    assert masked(slow, found[0]) == masked(fast, found[1])
    assert sum(sample.loss_mask.sum() for sample in found[0]) > 20


def test_earlier_reasoning_is_not_in_a_turn_that_follows(slow: Any) -> None:
    """D7: each id sequence is one a server would see."""
    samples = tokenize(Template(slow, KimiK25Adapter()), CHAT)
    last = decode(slow, samples[-1].input_ids.tolist())
    assert "I know it." not in last
    assert "The user asks again." in last


def test_a_generic_class_is_refused_by_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match=r"the tokenizer class \w+ makes \d+ ids of <\|im_user\|>, expected one"):
        KimiK25Adapter().tokenizer(tmp_path)


def without(checkpoint: Path, folder: Path, part: str, chat_template: str = KIMI) -> Path:
    """The checkpoint without the tokens in whose names `part` is."""
    for file in checkpoint.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    decoder = settings["added_tokens_decoder"]
    settings["added_tokens_decoder"] = {k: v for k, v in decoder.items() if part not in v["content"]}
    settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_kimi_k2_needs_think_tokens_where_its_template_writes_them(checkpoint: Path, tmp_path: Path) -> None:
    """D6: K2-Thinking's template does, and its text would be split into pieces; K2-Instruct's does not."""
    folder = without(checkpoint, tmp_path, "think")
    with pytest.raises(RequestError, match=r"TikTokenTokenizer makes \d+ ids of <think>, expected one"):
        KimiK2Adapter().tokenizer(folder, trust_remote_code=True)
    without(checkpoint, tmp_path, "think", KIMI.replace("<think>", "").replace("</think>", ""))
    assert KimiK2Adapter().tokenizer(folder, trust_remote_code=True) is not None
    with pytest.raises(RequestError, match="<think>"):
        KimiK25Adapter().tokenizer(folder, trust_remote_code=True)


def test_a_marker_of_turns_that_is_absent_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"makes \d+ ids of <\|im_middle\|>, expected one"):
        KimiK2Adapter().tokenizer(without(checkpoint, tmp_path, "middle"), trust_remote_code=True)


def test_kimi_k2_as_deepseek_is_refused_with_its_own_name(tmp_path: Path) -> None:
    """The architecture is the same, and so went on without a word, with another turn's end."""
    folder = kimi_k2(tmp_path)
    words = r"config\.json: found model_type kimi_k2, .* the adapter 'deepseek_v3' does not know; try model=kimi_k2$"
    for adapter, refused in (("deepseek_v3.DeepseekV3Adapter", True), ("kimi_k2.KimiK2Adapter", False)):
        cfg = target_config(folder, adapter=adapter)
        cfg.model.trust_remote_code = True
        with pytest.raises(RequestError, match=words) if refused else nullcontext():
            assert open_target(cfg).adapter.name == "kimi_k2"
