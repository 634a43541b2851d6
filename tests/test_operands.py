"""How attention's kernels are handed heads: strides, and widths whose parts lie alike in shared memory."""

from __future__ import annotations

import pytest
import torch

from eagle3.head_rows import HeadRows
from eagle3.kernels.operands import SWIZZLE_BYTES, operands, padded_widths


def head_rows(widths: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> HeadRows:
    """Seven rows of two heads as the latent projections leave them: keys beside values, the shared part behind more."""
    d, e, r = widths
    query, columns, projected = (torch.zeros(7, n, dtype=dtype) for n in (2 * (d + r), 2 * (d + e), 5 + r))
    key, value = columns.unflatten(1, (2, -1)).split((d, e), dim=2)
    return HeadRows(query.unflatten(1, (2, -1)), key, value, projected[:, 5:], 1.0)


WIDTHS = [(128, 128, 0), (64, 64, 0), (6, 6, 0), (128, 128, 64), (32, 32, 16), (24, 20, 8), (64, 32, 16), (8, 12, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS)
def test_parts_of_a_head_take_rows_of_one_pattern(widths: tuple[int, int, int], dtype: torch.dtype) -> None:
    padded = padded_widths(head_rows(widths, dtype))
    assert tuple(padded[name] for name in "DER") == widths
    powers = [padded[name] for name in ("DP", "EP", "RP") if padded[name]]
    assert len(powers) == sum(width > 0 for width in widths)
    assert all(power & (power - 1) == 0 for power in powers)
    assert all(padded[name] >= padded[name[0]] for name in ("DP", "EP", "RP"))
    assert all(power * dtype.itemsize >= SWIZZLE_BYTES for power in powers)


def test_the_drafters_that_are_trained_are_padded_no_wider_than_products_need() -> None:
    padded = padded_widths(head_rows((128, 128, 64), torch.bfloat16))
    assert [padded[name] for name in ("DP", "EP", "RP")] == [128, 128, 64]
    assert padded_widths(head_rows((64, 64, 0), torch.bfloat16))["DP"] == 64


def test_places_and_strides_reach_every_element() -> None:
    rows = head_rows((6, 5, 4))
    query, key, value, shared, q_stride, q_head, kv_stride, kv_head, shared_stride = operands(rows, (2, 5), 3)
    assert (len(query), len(key), len(value), len(shared)) == (3, 4, 4, 4)
    assert (q_stride, q_head, kv_stride, kv_head, shared_stride) == (20, 10, 22, 11, 9)
    assert value.stride()[:2] == (kv_stride, kv_head)
