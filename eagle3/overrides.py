"""Overrides written so that Hydra reads back any value: for the command line of a child, or for a shell (beside the
walk)."""

from __future__ import annotations

import re
import shlex


def quoted(value: object) -> str:
    r"""A value as an override takes it, whatever is in it.

    Hydra takes a backslash for itself only before a quote and at the end, OmegaConf only before `${`.
    """
    escaped = re.sub(r'(\\*)("|\$\{|\Z)', lambda found: found[1] * 2 + (found[2] and f"\\{found[2]}"), str(value))
    return f'"{escaped}"'


def override(field: str, value: str) -> str:
    """An override as one types it into a shell, quoted where that is needed."""
    if re.fullmatch(r"[\w./:@+-]+", value, re.ASCII):
        return f"{field}={value}"
    return shlex.quote(f"{field}={quoted(value)}")
