"""As in vLLM."""

from __future__ import annotations


def tokens_input(ids: list[int]) -> list[int]:
    return ids
