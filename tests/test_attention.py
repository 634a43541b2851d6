"""The unroll's attention against one explicit softmax over all that a query sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3.attention import Block, attention_blocks, unroll_attention


def explicit(query: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]], rows: Tensor, starts: Tensor):
    outputs = []
    group = query.shape[1] // key.shape[1]
    for r, t in enumerate(rows.tolist()):
        start = int(starts[t])
        heads = []
        for h in range(query.shape[1]):
            keys = torch.cat([key[start : t + 1, h // group], *[k[r, h // group][None] for k, _ in own]])
            values = torch.cat([value[start : t + 1, h // group], *[v[r, h // group][None] for _, v in own]])
            heads.append(torch.softmax(keys @ query[r, h] / query.shape[2] ** 0.5, 0) @ values)
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("columns", [0, 1, 3])
@pytest.mark.parametrize("block", [2, 100])
def test_output_and_gradients_equal_one_softmax(heads: int, kv_heads: int, columns: int, block: int) -> None:
    generator = torch.Generator().manual_seed(heads + columns)
    lengths, dim = [5, 1, 7, 3], 4
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, 5, 6, 13, 16])
    starts = torch.repeat_interleave(cu_seqlens[:-1], torch.tensor(lengths))
    rows = torch.tensor([1, 2, 4, 5, 8, 9, 12])  # scattered; none in the last document

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    wide = dim + heads % 2  # of values
    query, key, value = random(len(rows), heads, dim), random(total, kv_heads, dim), random(total, kv_heads, wide)
    own = [(random(len(rows), kv_heads, dim), random(len(rows), kv_heads, wide)) for _ in range(columns)]
    inputs = [query, key, value, *[k for k, _ in own], *[v for _, v in own]]
    blocks = attention_blocks(rows, cu_seqlens, block)
    found = unroll_attention(query, key, value, [k for k, _ in own], [v for _, v in own], rows, blocks)
    expected = explicit(query, key, value, own, rows, starts)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_blocks_stay_inside_documents_and_skip_later_keys() -> None:
    blocks = attention_blocks(torch.tensor([0, 3, 4, 6, 9]), torch.tensor([0, 5, 6, 10]), 2)
    assert blocks == (Block(0, 2, 0, 4), Block(2, 3, 0, 5), Block(3, 5, 6, 10))


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((2, 1, 4), 40.0, requires_grad=True)
    key = torch.cat([torch.full((1, 1, 4), 40.0), torch.full((1, 1, 4), -40.0)]).requires_grad_()
    value = torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 4).clone().requires_grad_()
    rows = torch.tensor([0, 1])
    own = torch.full((2, 1, 4), 40.0, requires_grad=True)
    found = unroll_attention(query, key, value, [own], [own], rows, attention_blocks(rows, torch.tensor([0, 2])))
    torch.testing.assert_close(found, torch.full((2, 1, 4), 20.5), rtol=1e-3, atol=0)
    found.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value, own) if x.grad is not None)


def test_no_query_leaves_zero_gradients() -> None:
    """T9: a batch without supervised rows still reaches every parameter, so that no rank waits for its gradient."""
    query = torch.zeros(0, 2, 4, requires_grad=True)
    key, value = torch.randn(3, 2, 4, requires_grad=True), torch.randn(3, 2, 4, requires_grad=True)
    rows = torch.zeros(0, dtype=torch.int64)
    unroll_attention(query, key, value, [], [], rows, attention_blocks(rows, torch.tensor([0, 3]))).sum().backward()
    for tensor in (key, value):
        assert tensor.grad is not None
        assert not tensor.grad.any()
