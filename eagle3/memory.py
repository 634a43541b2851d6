"""How much of each GPU a target will need, from the checkpoint's index and a rehearsal, before anything is loaded.

Beside the walk: `rehearsal` asks. Weights are counted from the headers of the shards: a tensor-parallel rank holds its
part of every matrix and the whole of a few small tensors, which the adapter names.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3.weights import read_json

if TYPE_CHECKING:
    from eagle3.checkpoint import Target

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2}
LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Footprint:
    """Bytes that one GPU needs, by use."""

    weights: int
    key_values: int
    working: int
    """Activations and states of one batch and the engine's room for them, measured by a rehearsal."""
    context: int
    """What the driver, the libraries and the communication take, measured by a rehearsal."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.key_values + self.working + self.context

    def describe(self) -> str:
        """In words, in GB."""
        parts = {"weights": self.weights, "keys and values": self.key_values, "a batch": self.working}
        return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in {**parts, "context": self.context}.items())

    def verdict(self, room: int) -> tuple[bool, str]:
        """Whether it fits into `room` bytes of a GPU, and in words: how much is missing, which settings change it."""
        detail = f"{self.total / 1e9:.1f} of {room / 1e9:.1f} GB a GPU ({self.describe()})"
        if self.total > room:
            detail += (
                f"; {(self.total - room) / 1e9:.1f} GB too much: raise hardware.tensor_parallel_size or "
                "hardware.engine_options.gpu_memory_utilization, or lower hardware.batch_tokens"
            )
        return self.total <= room, detail


def weight_bytes(target: Target, ranks: int, num_layers: int | None = None) -> int:
    """Bytes of the weights on one of `ranks` GPUs; of the first `num_layers` layers only when that is given.

    Layers behind the model's last (which predict further tokens) and tensors that the engine leaves out do not count.
    """
    adapter = target.adapter
    whole = re.compile("|".join(adapter.replicated_weights) or r"(?!)")
    unloaded = re.compile("|".join(adapter.unloaded_weights) or r"(?!)")
    depth = num_layers if num_layers is not None else target.shape.num_layers
    shared, divided = 0, 0
    for header, _ in target.weights.headers.values():
        for name, entry in header.items():
            layer = LAYER.search(name)
            if unloaded.search(name) or (layer and int(layer.group(1)) >= depth):
                continue
            size = math.prod(entry["shape"]) * BYTES.get(entry["dtype"], 1)
            if whole.search(name):
                shared += size
            else:
                divided += size
    return shared + divided // ranks


def key_value_bytes(target: Target, ranks: int, itemsize: int = 2) -> int:
    """Bytes of keys and values of one token on one of `ranks` GPUs."""
    text: dict[str, Any] = target.adapter.text_section(read_json(target.folder / "config.json"))
    return target.adapter.key_value_bytes(target.shape, text, ranks, itemsize)
