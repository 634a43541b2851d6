"""A drafter's folder in any form that is published → a drafter: exported here, by EAGLE, SpecForge or speculators.

For evaluation and for a warm start. Every tensor is read or refused; the vocabulary map is taken over bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eagle3.drafter import WEIGHTS as TRAINED
from eagle3.drafter import DrafterShape, Eagle3Drafter, load_drafter, read_shape
from eagle3.drafter_forms import EMBEDDING, VOCABULARY_MAP, recognise, shape_of
from eagle3.errors import RequestError
from eagle3.vocab import check_vocabulary_map

if TYPE_CHECKING:
    from eagle3.checkpoint import Target

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def import_drafter(
    folder: Path, embedding: Tensor, num_layers: int | None = None, layer_ids: Sequence[int] | None = None
) -> Eagle3Drafter:
    """Reads an exported or published folder into a drafter on the target's `embedding` [V, H]; weights become float32.

    For folders that do not say their layers as vLLM means them, `layer_ids` are they, or `num_layers` of the target
    decides between the two defaults in use. Raises RequestError, naming the file, when it is no such folder, when a
    tensor is missing, unknown or of another size, when the layer ids disagree, when the vocabulary map is broken, or
    when it brings an embedding that is not the target's.
    """
    shape = _shape(folder, embedding.shape, num_layers, layer_ids)
    tensors = _read_tensors(folder, shape, embedding)
    drafter = Eagle3Drafter(shape, embedding)
    expected = own_tensors(drafter)
    _check_sizes(tensors, expected, folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])
    return drafter


def look_into(folder: Path, target: Target, layer_ids: Sequence[int] | None) -> DrafterShape:
    """The shape of the drafter that `read_drafter` would read, found in a moment: no weights are read.

    Raises what it would raise for a config, for files that are not whole and for tensors of other names or sizes.
    """
    if not is_published(folder):
        return read_shape(folder)
    sizes = target.shape.vocab_size, target.shape.hidden_size
    shape = _shape(folder, sizes, target.shape.num_layers, layer_ids)
    path = folder / WEIGHTS
    with torch.device("meta"):
        expected = own_tensors(Eagle3Drafter(shape, torch.empty(sizes)))
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()  # not a mapping
                weights = {name: torch.empty(file.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise _no_weights(path, error) from error
    tensors = _own_names(weights, shape, path)
    for name in VOCABULARY_MAP:
        if name not in expected:
            tensors.pop(name, None)
    _check_sizes(tensors, expected, path)
    return shape


def _shape(
    folder: Path, embedding: Sequence[int], num_layers: int | None, layer_ids: Sequence[int] | None
) -> DrafterShape:
    """What config.json says. RequestError unless it is of a drafter on an embedding of this size [V, H]."""
    shape = shape_of(read_config(folder), folder / CONFIG, num_layers, layer_ids)
    if tuple(embedding) != (shape.vocab_size, shape.hidden_size):
        raise RequestError(
            f"{folder / CONFIG}: found a drafter on an embedding of {shape.vocab_size} x {shape.hidden_size}, but this "
            f"target's is {embedding[0]} x {embedding[1]}; choose the model it was trained for (model=)"
        )
    return shape


def _check_sizes(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """RequestError unless there are exactly the expected tensors, in their sizes."""
    wrong = [f"no {name}" for name in expected if name not in tensors]
    wrong += [f"unknown {name}" for name in tensors if name not in expected]
    wrong += [
        f"{name} {list(tensors[name].shape)} instead of {list(expected[name].shape)}"
        for name in expected
        if name in tensors and tensors[name].shape != expected[name].shape
    ]
    if wrong:
        raise RequestError(
            f"{path}: found {', '.join(wrong)}; expected exactly the tensors that {CONFIG} describes; "
            "export the drafter again with `eagle3 stage=export`"
        )


def is_published(folder: Path) -> bool:
    """Whether a folder holds a drafter in a published form, rather than one of `eagle3 stage=train`."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file() and not (folder / TRAINED).is_file()


def refuse_half(folder: Path, where: str) -> None:
    """RequestError, naming `where` it was given, for a folder with only one of a published drafter's two files."""
    absent = [name for name in (WEIGHTS, CONFIG) if not (folder / name).is_file()]
    if len(absent) == 1:
        raise RequestError(
            f"{where}: found no {absent[0]} in {folder}, expected a drafter's {WEIGHTS} and {CONFIG} side by side; "
            f"get the {absent[0]} that belongs to it, or name another folder"
        )


def read_drafter(folder: Path, target: Target, layer_ids: Sequence[int] | None) -> Eagle3Drafter:
    """The drafter in a folder of either kind, on the target's embedding; `layer_ids` as in `import_drafter`."""
    if is_published(folder):
        return import_drafter(folder, target.embedding(), target.shape.num_layers, layer_ids)
    return load_drafter(folder, target.embedding())


def own_tensors(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """What a folder holds of a drafter: all but the embedding, and no map for a full vocabulary."""
    full = drafter.shape.draft_vocab_size == drafter.shape.vocab_size
    return {
        name: tensor
        for name, tensor in drafter.state_dict().items()
        if not name.startswith("embed") and not (full and name in VOCABULARY_MAP)
    }


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; RequestError when it is none."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path}: expected the config.json of an exported drafter, found {type(error).__name__}: {error}; "
            "make one with `eagle3 stage=export`"
        ) from error
    if not isinstance(config, dict):
        raise RequestError(f"{path}: found a {type(config).__name__}, expected an object; try another inputs.export=")
    return config


def _read_tensors(folder: Path, shape: DrafterShape, embedding: Tensor) -> dict[str, Tensor]:
    """The folder's tensors under our names, its embedding compared and its map checked."""
    path = folder / WEIGHTS
    try:
        weights: Mapping[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _no_weights(path, error) from error
    if EMBEDDING in weights:
        _check_embedding(weights[EMBEDDING], embedding, path)
    tensors = _own_names(weights, shape, path)
    if shape.draft_vocab_size == shape.vocab_size:
        # Trainers keep a map that says nothing; servers expect none.
        offsets = tensors.pop("d2t", torch.zeros(1))
        tensors.pop("t2d", None)
        if offsets.any():
            raise RequestError(f"{path}: found a d2t with offsets, expected none for a draft vocabulary of all tokens")
        return tensors
    check_vocabulary_map(tensors["d2t"], tensors["t2d"], shape.vocab_size, str(path))
    return tensors


def _own_names(weights: Mapping[str, Tensor], shape: DrafterShape, path: Path) -> dict[str, Tensor]:
    """The tensors but for the embedding, under our names; with the map where the vocabularies differ."""
    tensors = recognise({name: tensor for name, tensor in weights.items() if name != EMBEDDING}, str(path))
    missing = [name for name in VOCABULARY_MAP if name not in tensors]
    if missing and shape.draft_vocab_size != shape.vocab_size:
        raise RequestError(
            f"{path}: found no {' or '.join(missing)}, expected both maps since the draft vocabulary "
            f"({shape.draft_vocab_size}) is smaller than the target's ({shape.vocab_size}); export it again"
        )
    return tensors


def _no_weights(path: Path, error: Exception) -> RequestError:
    return RequestError(
        f"{path}: expected the weights of an exported drafter, found {type(error).__name__}: {error}; "
        "delete the folder and make it again with `eagle3 stage=export`, or save a published drafter's weights as "
        "safetensors"
    )


def _check_embedding(found: Tensor, embedding: Tensor, path: Path) -> None:
    """RequestError unless the folder's embedding is the target's, up to the coarser of the two number formats."""
    coarser = min(found.dtype, embedding.dtype, key=lambda dtype: -torch.finfo(dtype).eps)
    if found.shape != embedding.shape or not torch.equal(found.to(coarser), embedding.to(coarser)):
        raise RequestError(
            f"{path}: brings an {EMBEDDING} of {list(found.shape)} that is not the target's, expected the target's, "
            "which eagle3's drafters share; choose the model it was trained for (model=)"
        )
