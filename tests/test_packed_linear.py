"""Packed linear layers compute what torch's own do, for any number of rows, and replace them in a model in place."""

import pytest
import torch
from torch import nn

from eagle3.engines.packed_linear import PackedLinear, pack_linears, packable

pytestmark = pytest.mark.skipif(not packable(torch.float32), reason="this torch or CPU cannot pack weights")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (4,), (128,), (3, 5), (0,)])
def test_equals_float64(rows, bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    inputs = torch.randn(*rows, 48)
    with torch.no_grad():
        expected = linear.double()(inputs.double())
        found = PackedLinear(linear.float())(inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_reads_strided_inputs():
    torch.manual_seed(0)
    linear = nn.Linear(16, 24, bias=False)
    inputs = torch.randn(6, 32)[:, ::2]
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs))


def test_replaces_plain_linears_and_leaves_their_subclasses_and_other_dtypes():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU()), Own(4, 4), nn.Linear(4, 2).double()
    )
    assert pack_linears(model) == 2
    assert isinstance(model[0], PackedLinear)
    assert isinstance(model[1][0], PackedLinear)
    assert type(model[2]) is Own
    assert type(model[3]) is nn.Linear


def test_a_tied_embedding_stays_as_it_was():
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["embedding"].weight
    before = model["embedding"].weight.clone()
    pack_linears(model)
    assert torch.equal(model["embedding"].weight, before)
    with torch.no_grad():
        torch.testing.assert_close(model["head"](before), before @ before.T)
