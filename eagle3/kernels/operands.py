"""How attention's Triton kernels are handed queries, keys and values: places, strides and widths."""

# Triton comes with torch on a GPU machine only.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import triton

from eagle3.head_rows import HeadRows


def operands(rows: HeadRows, queries: tuple[int, int], columns: int) -> tuple[Any, ...]:
    """Queries of rows [first, last), columns from a row on, and the strides of rows and heads."""
    first, last = queries
    return (
        rows.query[first:last],
        rows.key[columns:],
        rows.value[columns:],
        rows.shared[columns:],
        *rows.query.stride()[:2],
        *rows.key.stride()[:2],
        rows.shared.stride(0),
    )


def padded_widths(rows: HeadRows) -> dict[str, int]:
    """The widths (D, E, R) of a head's parts, each with the power of two that holds it; products want 16 at least."""
    named = dict(zip("DER", rows.widths, strict=True))
    padded = {f"{name}P": width and max(triton.next_power_of_2(width), 16) for name, width in named.items()}
    return {**named, **padded}
