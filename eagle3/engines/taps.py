"""Hooks that hand out the residual stream of a Hugging Face model at layer ids, for capture and for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from eagle3.adapter import Adapter


class AllCaught(Exception):
    """Leaves a forward pass behind the last layer that was asked for."""


class StateTaps:
    """While open, every forward of the model leaves its states, by layer id, in the dict that `with` gives out.

    Each state is what the layer handed on, [B, T, H]. With `leave_early` the forward ends behind the last tapped layer
    by raising AllCaught, since the layers after it are for nobody.
    """

    def __init__(
        self, layers: nn.ModuleList, adapter: Adapter, layer_ids: Sequence[int], *, leave_early: bool = False
    ) -> None:
        """`layers` are the decoder layers (`adapter.layers(model)`), `layer_ids` as in eagle3.layers."""
        self._layers, self._adapter = layers, adapter
        self._layer_ids = tuple(layer_ids)
        self._last = max(layer_ids) if leave_early else None
        self._caught: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> dict[int, Tensor]:
        self._caught = {}
        for k in self._layer_ids:
            # Id k is what layer k-1 hands on; only the embedding has no layer before it.
            if k == 0:
                self._handles.append(self._layers[0].register_forward_pre_hook(self._catch_embedding, with_kwargs=True))
            else:
                self._handles.append(self._layers[k - 1].register_forward_hook(self._catcher(k)))
        return self._caught

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _catch_embedding(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caught[0] = args[0] if args else kwargs["hidden_states"]
        if self._last == 0:
            raise AllCaught

    def _catcher(self, k: int) -> Any:
        def catch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._caught[k] = self._adapter.residual(output)
            if k == self._last:
                raise AllCaught

        return catch
