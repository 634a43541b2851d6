"""Layer ids: selections, their refusals, conversions, and what an id means on a model that adds a known constant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle3 import layers
from eagle3.adapters.llama import LlamaAdapter
from eagle3.engines.taps import StateTaps
from eagle3.errors import RequestError


class AddingLayer(nn.Module):
    """A decoder layer that adds its own constant, and returns it as Hugging Face's layers do."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.constant


class AddingModel(nn.Module):
    """Layer k adds 10**k to an embedding of zeros, so that a state's digits tell which layers it has been through."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(AddingLayer(10.0**k) for k in range(num_layers))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.get_submodule("model.layers").children():
            hidden_states = layer(hidden_states)
        return hidden_states


def captured(num_layers: int, layer_ids: list[int]) -> dict[int, float]:
    adapter, model = LlamaAdapter(), AddingModel(num_layers)
    with StateTaps(adapter.layers(model), adapter, layer_ids) as states:
        model(torch.zeros(1, 2, 3, dtype=torch.float64))
        return {k: float(state.unique()) for k, state in states.items()}


def test_id_k_is_the_stream_that_enters_layer_k():
    """E7: id 0 is the embedding, id k has been through layers 0 ... k-1, id n through all of them."""
    found = captured(6, [0, 1, 2, 5, 6])
    assert found == {0: 0, 1: 1, 2: 11, 5: 11111, 6: 111111}


def test_changing_the_ids_changes_what_is_captured():
    """E7: no convention hides between the config and the data."""
    assert set(captured(6, [1, 2, 3]).values()).isdisjoint(captured(6, [4, 5]).values())


def test_other_convention_names_the_output_of_layer_i():
    """Id k here is the output of layer k-1 there; converting back gives the same ids."""
    ours = (2, 30, 58)
    theirs = layers.output_ids(ours)
    assert theirs == (1, 29, 57)
    assert layers.from_output_ids(theirs) == ours
    found = captured(6, [3])
    outputs: list[float] = []
    model = AddingModel(6)
    theirs_of_3 = layers.output_ids([3])[0]
    layer = model.get_submodule(f"model.layers.{theirs_of_3}")
    with_hook = layer.register_forward_hook(lambda module, args, output: outputs.append(float(output.unique())))
    model(torch.zeros(1, 1, 1, dtype=torch.float64))
    with_hook.remove()
    assert outputs == [found[3]]


def test_the_embedding_is_no_layers_output():
    with pytest.raises(RequestError, match="id 0"):
        layers.output_ids([0, 2])


def test_eagle_selection():
    assert layers.select(61) == (2, 30, 58)
    assert layers.select(30) == (2, 15, 27)


def test_default_ids_that_collapse_are_refused_with_the_explicit_setting():
    """E8: five layers give (2, 2, 2)."""
    with pytest.raises(RequestError, match=r"layers=eagle: .*repeats.*layers\.ids="):
        layers.select(5)
    assert layers.select(5, ids=[1, 2, 4]) == (1, 2, 4)


def test_fractions_round_half_up():
    assert layers.select(30, fractions=[0.25, 0.5, 0.75]) == (8, 15, 23)
    with pytest.raises(RequestError, match=r"layers\.fractions"):
        layers.select(4, fractions=[0.5, 0.55, 0.6])


def test_negative_ids_count_from_the_end():
    assert layers.select(30, ids=[2, 15, -3]) == (2, 15, 27)
    assert layers.select(30, ids=[0, 30]) == (0, 30)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([2, 31], "0 to 30"),
        ([-31, 2], "0 to 30"),
        ([2, 2, 5], "repeats"),
        ([3, -27], "repeats"),
        ([5, 2, 9], r"ascending.*'layers\.ids=\[2,5,9\]'"),
        ([], "at least one"),
    ],
)
def test_impossible_ids_are_refused(ids: list[int], reason: str):
    """E7: out of range, repeated, unsorted or no ids: the message says which and what to write instead."""
    with pytest.raises(RequestError, match=reason) as refusal:
        layers.select(30, ids=ids)
    assert str(refusal.value).startswith("layers.ids: ")
    assert refusal.value.exit_code == 2
