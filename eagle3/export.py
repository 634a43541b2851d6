"""Drafter → a folder that a server loads: safetensors and config.json in vLLM's EAGLE form, and back again.

`export_drafter` writes and `import_drafter` reads with the same two tables, so that a folder read back is the drafter
that was written. The embedding is not in the folder: the server shares the target's, which the drafter was trained on.
Source of the form: vLLM's `llama_eagle3.py` and its `eagle_config`; layer ids are written as vLLM means them, which is
eagle3.layers' own meaning.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.adapter import TargetShape
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.errors import RequestError, StageFailed
from eagle3.layers import check_ids

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS, CONFIG = "model.safetensors", "config.json"

# The drafter's tensors and the server's: name or prefix here, name or prefix there. vLLM reads `midlayer.` as layer 0.
TENSORS = {
    "midlayer.": "midlayer.",
    "input_norm.": "input_norm.",
    "fc_norm.": "fc_norm.",
    "fc.": "fc.",
    "norm.": "norm.",
    "lm_head.": "lm_head.",
    "d2t": "d2t",
    "t2d": "t2d",
}
# The drafter's shape and the server's config, field by field; rope and layer ids have more than one spelling there.
FIELDS = {
    "hidden_size": "hidden_size",
    "target_hidden_size": "target_hidden_size",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_act": "hidden_act",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
}
_VOCABULARY_MAP = ("d2t", "t2d")


def export_drafter(drafter: Eagle3Drafter, target: TargetShape, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Writes the drafter's weights in `dtype` and its config.json, reads both back, and compares.

    Returns the checks that held, for the manifest. Raises StageFailed when a written drafter does not equal the given
    one, and RequestError for a drafter that the form cannot hold.
    """
    shape = drafter.shape
    if shape.attention != "dense":
        raise RequestError(
            f"drafter.attention: found '{shape.attention}', expected 'dense', the only form that "
            f"export.target=vllm writes today; train with drafter.attention=dense"
        )
    weights = _rename(_tensors(drafter), TENSORS, str(folder))
    weights = {name: (w.to(dtype) if w.is_floating_point() else w).contiguous() for name, w in weights.items()}
    if shape.draft_vocab_size < shape.vocab_size:
        check_vocabulary_map(weights["d2t"], weights["t2d"], shape.vocab_size, str(folder / WEIGHTS))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(server_config(shape, target, dtype), indent=2) + "\n")
    return _check_written(drafter, folder, dtype)


def server_config(shape: DrafterShape, target: TargetShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as vLLM and transformers read it, with rope and layer ids in every spelling in use."""
    dtype_name = str(dtype).removeprefix("torch.")
    layer_ids = list(shape.layer_ids)
    rope = shape.rope_scaling or {"rope_type": "default"}
    eos = target.eos_token_ids
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{theirs: getattr(shape, ours) for ours, theirs in FIELDS.items()},
        # transformers 4 reads the first pair, transformers 5 the second form.
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        # vLLM's V2 runner reads the ids at the top, its V1 runner and others the nested ones; fc is sized by the count.
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "num_aux_hidden_states": len(layer_ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def import_drafter(folder: Path, embedding: Tensor) -> Eagle3Drafter:
    """Reads an exported folder into a drafter on the target's `embedding` [V, H]; weights become float32.

    Raises RequestError, naming the file, when it is no such folder, when a tensor is missing, unknown or of another
    size, when the layer ids disagree, or when the vocabulary map is broken.
    """
    config = _read_config(folder)
    shape = _read_shape(config, folder / CONFIG)
    if tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        raise RequestError(
            f"{folder / CONFIG}: found a drafter on an embedding of {shape.vocab_size} x {shape.hidden_size}, but this "
            f"target's is {embedding.shape[0]} x {embedding.shape[1]}; choose the model it was trained for (model=)"
        )
    weights = _read_weights(folder / WEIGHTS)
    if shape.draft_vocab_size < shape.vocab_size:
        missing = [name for name in _VOCABULARY_MAP if name not in weights]
        if missing:
            raise RequestError(
                f"{folder / WEIGHTS}: found no {' or '.join(missing)}, expected both maps since the draft vocabulary "
                f"({shape.draft_vocab_size}) is smaller than the target's ({shape.vocab_size}); export it again"
            )
        check_vocabulary_map(weights["d2t"], weights["t2d"], shape.vocab_size, str(folder / WEIGHTS))

    drafter = Eagle3Drafter(shape, embedding)
    tensors = _rename(weights, {theirs: ours for ours, theirs in TENSORS.items()}, str(folder / WEIGHTS))
    expected = _tensors(drafter)
    wrong = [f"no {name}" for name in expected if name not in tensors]
    wrong += [f"unknown {name}" for name in tensors if name not in expected]
    wrong += [
        f"{name} {list(tensors[name].shape)} instead of {list(expected[name].shape)}"
        for name in expected
        if name in tensors and tensors[name].shape != expected[name].shape
    ]
    if wrong:
        raise RequestError(
            f"{folder / WEIGHTS}: found {', '.join(wrong)}; expected exactly the tensors that {CONFIG} describes; "
            "export the drafter again with `eagle3 stage=export`"
        )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])
    return drafter


def check_vocabulary_map(d2t: Tensor, t2d: Tensor, vocab_size: int, where: str) -> None:
    """Raises RequestError, naming `where`, unless `d2t` (int64 offsets [D]) and `t2d` (bool [V]) are one valid map."""
    draft_size = len(d2t)
    faults: list[str] = []
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        faults.append(f"types {d2t.dtype} and {t2d.dtype} instead of int64 and bool")
    if len(t2d) != vocab_size:
        faults.append(f"t2d of {len(t2d)} entries instead of the target's {vocab_size}")
    target_ids = torch.arange(draft_size) + d2t.cpu().long()
    outside = target_ids[(target_ids < 0) | (target_ids >= vocab_size)]
    if len(outside):
        faults.append(f"{len(outside)} target ids out of range, such as {int(outside[0])}")
    elif len(target_ids.unique()) != draft_size:
        faults.append(f"{draft_size - len(target_ids.unique())} repeated target ids")
    elif not faults and (int(t2d.sum()) != draft_size or not bool(t2d.cpu()[target_ids].all())):
        faults.append(f"a t2d that marks {int(t2d.sum())} ids, not the {draft_size} that d2t leads to")
    if not faults and draft_size < vocab_size and not d2t.any():
        faults.append(f"an all-zero d2t, which would map the drafts to the target's first {draft_size} ids")
    if faults:
        raise RequestError(
            f"{where}: the vocabulary map has {'; '.join(faults)}; expected every i + d2t[i] distinct, below "
            f"{vocab_size} and set in t2d; train the drafter again or choose another with inputs.drafter="
        )


def _tensors(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """What the folder holds of a drafter: all but the embedding, and no map for a full vocabulary."""
    full = drafter.shape.draft_vocab_size == drafter.shape.vocab_size
    return {
        name: tensor
        for name, tensor in drafter.state_dict().items()
        if not name.startswith("embed") and not (full and name in _VOCABULARY_MAP)
    }


def _rename(tensors: Mapping[str, Tensor], names: Mapping[str, str], where: str) -> dict[str, Tensor]:
    """Renames by the longest prefix in `names`."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = next((p for p in names if name == p or (p.endswith(".") and name.startswith(p))), None)
        if prefix is None:
            raise RequestError(
                f"{where}: found a tensor '{name}', expected names of an EAGLE-3 drafter ({', '.join(names)}); "
                "export the drafter again with `eagle3 stage=export`"
            )
        renamed[names[prefix] + name.removeprefix(prefix)] = tensor
    return renamed


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path}: expected the config.json of an exported drafter, found {type(error).__name__}: {error}; "
            "make one with `eagle3 stage=export`"
        ) from error
    found = config.get("architectures") if isinstance(config, dict) else None
    if found != [ARCHITECTURE]:
        raise RequestError(
            f"{path}: found architectures {found}, expected {[ARCHITECTURE]}; try another inputs.export="
        )
    return config


def _read_shape(config: Mapping[str, Any], path: Path) -> DrafterShape:
    missing = [theirs for theirs in FIELDS.values() if theirs not in config]
    rope = dict(config.get("rope_parameters") or {})
    if missing or "rope_theta" not in rope:
        missing += [] if "rope_theta" in rope else ["rope_parameters.rope_theta"]
        raise RequestError(
            f"{path}: found no {', '.join(missing)}; export the drafter again with `eagle3 stage=export`"
        )
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not top or top != nested:
        raise RequestError(
            f"{path}: found layer ids {top} at the top and {nested} in eagle_config, expected the same list twice; "
            "export the drafter again with `eagle3 stage=export`"
        )
    theta = rope.pop("rope_theta")
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return DrafterShape(
        layer_ids=check_ids(top, max(top), f"{path}: eagle_aux_hidden_state_layer_ids"),
        rope_theta=theta,
        rope_scaling=scaling,
        attention="dense",
        **{ours: config[theirs] for ours, theirs in FIELDS.items()},
    )


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(
            f"{path}: expected the weights of an exported drafter, found {type(error).__name__}: {error}; "
            "make them with `eagle3 stage=export`"
        ) from error


def _check_written(drafter: Eagle3Drafter, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Reads the folder back and compares logits: to the bit with the weights rounded to `dtype`, and as trained."""
    shape = drafter.shape
    reloaded = import_drafter(folder, drafter.embedding)
    if reloaded.shape.layer_ids != shape.layer_ids:
        raise StageFailed(f"{folder / CONFIG}: layer ids {shape.layer_ids} came back as {reloaded.shape.layer_ids}")
    rounded = copy.deepcopy(drafter)
    with torch.no_grad():
        for tensor in _tensors(rounded).values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    trained, expected, found = (_probe(each) for each in (drafter, rounded, reloaded))
    if not torch.equal(expected, found):
        raise StageFailed(
            f"{folder / WEIGHTS}: logits of the written drafter differ by up to "
            f"{float((expected - found).abs().max()):.3g} from the trained one's; expected none. Please report this"
        )
    return {
        "strict_reload": True,
        "logits_equal": True,
        "rounding": float((trained - found).abs().max()),
        "argmax_agreement": float((trained.argmax(-1) == found.argmax(-1)).float().mean()),
        "layer_ids": list(shape.layer_ids),
    }


@torch.inference_mode()
def _probe(drafter: Eagle3Drafter, tokens: int = 32) -> Tensor:
    """Logits [tokens, D] on fixed pseudo-random tokens and states."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (tokens,), generator=generator)
    states = torch.randn(tokens, shape.target_hidden_size * len(shape.layer_ids), generator=generator)
    _, logits = drafter.extend(drafter.new_cache(), ids, drafter.fuse(states), torch.arange(tokens))
    return logits
