"""How attention's Triton kernels are handed queries, keys and values: places, strides and widths."""

from __future__ import annotations

from typing import Any

from eagle3.head_rows import HeadRows

SWIZZLE_BYTES = 128  # of a matrix's row in shared memory, at most, over which one pattern goes in Hopper's products


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
    """The widths (D, E, R) of a head's parts, each with the power of two that it is padded to; 0 stays 0.

    A padded row takes `SWIZZLE_BYTES` at least, so that all operands lie in one pattern. Where they did not, ptxas 12.8
    (Triton 3.6) addressed some products' operands in fp32 by a register that held something else, which ended in an
    illegal memory access at widths of 32 + 16.
    """
    least = SWIZZLE_BYTES // rows.query.element_size()
    padded = [width and max(1 << (width - 1).bit_length(), least) for width in rows.widths]
    return {**dict(zip("DER", rows.widths, strict=True)), **dict(zip(("DP", "EP", "RP"), padded, strict=True))}
