"""Step 2 of the walk, its middle: a rendered text → token ids, and where in them a character position falls.

The ids are those that a server has for the same text: it is tokenized whole, and the text alone decides about a BOS.
A special token spelled out in somebody's message therefore becomes that token, as it does in a server; `prepare` counts
such rows, and no mask changes for it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from eagle3.errors import Eagle3Error


class Straddled(Exception):
    """A token crosses a position: a model that was given the text before it never writes that token."""


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a rendered text, which brings its own special tokens."""
    return _flat(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer)


def decode(tokenizer: Any, input_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """The text of token ids, with nothing prettified."""
    options: dict[str, Any] = {} if tokenizer.is_fast else {"spaces_between_special_tokens": False}
    return tokenizer.decode(
        list(input_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False, **options
    )


def encode_with_edges(
    tokenizer: Any, text: str, edges: Sequence[int], special_ids: Collection[int]
) -> tuple[list[int], dict[int, int]]:
    """Token ids of a text and, for character positions in it, the number of tokens before each.

    Raises Straddled when a token crosses a position. A tokenizer without offsets takes another way to the same numbers.
    """
    counts: dict[int, int] = {}
    if not tokenizer.is_fast:  # no offsets: the ids of the text up to an edge must begin the ids of the whole
        input_ids = encode(tokenizer, text)
        for edge in edges:
            prefix = encode(tokenizer, text[:edge]) if edge else []
            if input_ids[: len(prefix)] != prefix:
                raise Straddled
            counts[edge] = len(prefix)
        return input_ids, counts
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids = _flat(encoded["input_ids"], tokenizer)
    # A token begins where those before it ended: some tokenizers leave a leading space out of a token's offsets, and
    # the several tokens of one character all end with it.
    ends = np.maximum.accumulate([end for _, end in encoded["offset_mapping"]])
    for edge in edges:
        count = int(np.searchsorted(ends, edge, side="right"))
        if edge and (count == 0 or ends[count - 1] != edge):
            # A special token may swallow the whitespace behind it; then it ends where its own text does.
            crossing = min(count, len(ends) - 1)
            if input_ids[crossing] not in special_ids or text[edge : ends[crossing]].strip():
                raise Straddled
            count += 1
        counts[edge] = count
    return input_ids, counts


def _flat(input_ids: Any, tokenizer: Any) -> list[int]:
    """A list of ints. Raises Eagle3Error for anything else: libraries have returned mappings and nested lists."""
    if not isinstance(input_ids, list) or not all(type(i) is int for i in input_ids):
        raise Eagle3Error(
            f"{type(tokenizer).__name__}: returned {type(input_ids).__name__} for one text, expected a flat list of "
            "ints; is this version of transformers supported? try the newest"
        )
    return input_ids


def same_text(decoded: str, text: str) -> bool:
    """Equal but for Unicode composition and outer whitespace, which some tokenizers normalise."""
    return unicodedata.normalize("NFC", decoded).strip() == unicodedata.normalize("NFC", text).strip()
