"""The forms in which drafters travel: one table of tensor names and one of config fields, read in both directions.

EAGLE's form (EAGLE, SpecForge, vLLM, SGLang): `midlayer.*`, a flat config.json, layer ids at the top as vLLM means them
and in `eagle_config` as each server means them there. The form of the speculators library: `layers.0.*`, the
layer's config nested. Sources: vLLM's llama_eagle3.py, deepseek_eagle3.py and configs/speculators, SGLang's
llama_eagle3.py and kimi_k25_eagle3.py, speculators' models/eagle3, SpecForge's llama3_eagle.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from eagle3 import servers
from eagle3.drafter import DrafterShape
from eagle3.errors import RequestError
from eagle3.layers import check_ids, eagle_ids, from_output_ids, output_ids
from eagle3.rotary import rope_frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle3.adapter import TargetShape

SPECULATORS = "speculators"
VOCABULARY_MAP = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"
# A drafter's tensor or prefix: its name in EAGLE's form, and in speculators' where that is another one.
TENSORS: dict[str, tuple[str, ...]] = {
    "midlayer.": ("midlayer.", "layers.0."),
    "input_norm.": ("input_norm.",),
    "fc_norm.": ("fc_norm.",),
    "fc.": ("fc.",),
    "norm.": ("norm.",),
    "lm_head.": ("lm_head.",),
    "d2t": ("d2t",),
    "t2d": ("t2d",),
}
# DrafterShape's fields and config.json's, and what an absent one means; ... = it must be there.
SIZES: dict[str, Any] = {
    "hidden_size": ...,
    "vocab_size": ...,
    "intermediate_size": ...,
    "num_attention_heads": ...,
    "rms_norm_eps": ...,
    "max_position_embeddings": ...,
    "hidden_act": "silu",
}
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Speculators keeps these outside the layer's own config, and takes the first as true where it is absent.
OUTER = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size", "draft_vocab_size")


def rename(tensors: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """A drafter's tensors under the names of a form (eagle or speculators)."""
    renamed = {}
    for name, tensor in tensors.items():
        ours = next(known for known in TENSORS if _covers(known, name))
        theirs = TENSORS[ours][-1 if form == SPECULATORS else 0]
        renamed[theirs + name.removeprefix(ours)] = tensor
    return renamed


def recognise(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Any form's tensors under our names. RequestError for one that is no tensor of an EAGLE-3 drafter."""
    known = {theirs: ours for ours, names in TENSORS.items() for theirs in names}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        theirs = next((prefix for prefix in known if _covers(prefix, name)), None)
        if theirs is None:
            raise RequestError(
                f"{where}: found a tensor '{name}', expected names of an EAGLE-3 drafter ({', '.join(known)}); "
                "export the drafter again with `eagle3 stage=export`, or choose another folder"
            )
        found[known[theirs] + name.removeprefix(theirs)] = tensor
    return found


def _covers(prefix: str, name: str) -> bool:
    return name == prefix or (prefix.endswith(".") and name.startswith(prefix))


def config_of(
    shape: DrafterShape,
    target: TargetShape,
    engine: str,
    rules: servers.Release,
    dtype: torch.dtype,
    verifier: str,
    k: int,
) -> dict[str, Any]:
    """config.json for an export target; `verifier` names the target's checkpoint, `k` drafts a round by default."""
    reader = rules.drafters[shape.attention]
    inner = _layer_config(shape, target, reader, dtype)
    outer = {name: getattr(shape, name) for name in OUTER}
    ids = list(shape.layer_ids)
    if engine != SPECULATORS:
        nested = servers.nested_ids(engine, target.architecture, ids)
        return {
            "architectures": [reader.architecture],
            **inner,
            **outer,
            # vLLM's V2 runner reads the ids at the top, its V1 runner and others those below.
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(nested), "use_aux_hidden_state": True},
        }
    return {
        "architectures": [reader.architecture],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": k,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": [target.architecture]},
        },
        "transformer_layer_config": inner,
        **outer,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "tie_word_embeddings": False,
        "dtype": inner["dtype"],
        "torch_dtype": inner["dtype"],
    }


def _layer_config(
    shape: DrafterShape, target: TargetShape, reader: servers.Reader, dtype: torch.dtype
) -> dict[str, Any]:
    """The drafter's one layer as a transformers config, with rope in every spelling in use."""
    rope = {**(shape.rope_scaling or {"rope_type": "default"}), **_attn_factor(shape)}
    eos, dtype_name = target.eos_token_ids, str(dtype).removeprefix("torch.")
    heads: dict[str, Any] = {"num_key_value_heads": shape.num_key_value_heads, "head_dim": shape.head_dim}
    if shape.attention == "mla":
        # DeepSeek's configs call the rotated part the width of a head.
        heads |= {name: getattr(shape, name) for name in LATENT_SIZES} | {"head_dim": shape.qk_rope_head_dim}
    return {
        "model_type": reader.model_type,
        "num_hidden_layers": 1,
        **{name: getattr(shape, name) for name in SIZES},
        **heads,
        # transformers 4 reads the first pair, transformers 5 the second form.
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if shape.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        # fc is sized by it; without it servers assume three.
        "num_aux_hidden_states": len(shape.layer_ids),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def _attn_factor(shape: DrafterShape) -> dict[str, float]:
    """YaRN's factor on cos and sin for servers that know no mscale in a dense layer (vLLM 0.26, SGLang 0.5.14).

    They multiply their own default by `attn_factor`; the others ignore it and read what transformers reads.
    """
    scaling = shape.rope_scaling or {}
    if shape.attention != "dense" or _kind(scaling) != "yarn":
        return {}
    factor = rope_frequencies(shape)[1] / _yarn_default(scaling["factor"])
    return {} if math.isclose(factor, 1.0) else {"attn_factor": factor}


def _kind(scaling: Mapping[str, Any]) -> str:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _yarn_default(factor: float) -> float:
    """What multiplies cos and sin where a YaRN config says nothing else."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def shape_of(
    config: Mapping[str, Any], path: Path, num_layers: int | None = None, layer_ids: Sequence[int] | None = None
) -> DrafterShape:
    """The drafter that a config.json of any form describes.

    Where it does not say its layers as vLLM means them, `layer_ids` are they, else `num_layers` of the target decides
    between the two defaults in use. RequestError, naming the file, when something is missing or contradicts itself.
    """
    speculators = "speculators_model_type" in config
    inner = dict(config.get("transformer_layer_config") or {}) if speculators else dict(config)
    _check_kind(config, inner, path)
    missing = [name for name, default in SIZES.items() if default is ... and name not in inner]
    rope = dict(inner.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", inner.get("rope_theta"))
    scaling = dict((rope or inner.get("rope_scaling")) or {})
    attn_factor = scaling.pop("attn_factor", None)
    if attn_factor is not None and not {"mscale", "attention_factor"} & scaling.keys():
        scaling["attention_factor"] = attn_factor * _yarn_default(scaling["factor"])
    latent = bool(inner.get("kv_lora_rank"))
    if latent:
        missing += [name for name in LATENT_SIZES if name not in inner]
    if theta is None:
        missing.append("rope_theta")
    if missing:
        raise RequestError(
            f"{path}: found no {', '.join(missing)}; export the drafter again with `eagle3 stage=export`, or add them"
        )
    sizes = {name: inner.get(name, default) for name, default in SIZES.items()}
    heads = sizes["num_attention_heads"]
    if latent:
        latents = {name: inner[name] for name in LATENT_SIZES}
        kinds = {"attention": "mla", "num_key_value_heads": heads, **latents}
        kinds["head_dim"] = latents["qk_nope_head_dim"] + latents["qk_rope_head_dim"]
    else:
        head_dim = inner.get("head_dim") or sizes["hidden_size"] // heads
        kinds = {"num_key_value_heads": inner.get("num_key_value_heads") or heads, "head_dim": head_dim}
    defaults = dict.fromkeys(OUTER[:4], False) | {"norm_before_residual": speculators}
    defaults |= {"target_hidden_size": sizes["hidden_size"], "draft_vocab_size": sizes["vocab_size"]}
    outer = {name: config.get(name) if config.get(name) is not None else default for name, default in defaults.items()}
    values: dict[str, Any] = {
        **sizes,
        **kinds,
        **outer,
        "layer_ids": _layer_ids(config, path, num_layers, layer_ids),
        "rope_theta": float(cast(float, theta)),
        "rope_scaling": None if _kind(scaling) == "default" else scaling,
    }
    return DrafterShape(**values)


def _check_kind(config: Mapping[str, Any], inner: Mapping[str, Any], path: Path) -> None:
    """RequestError unless this is an EAGLE-3 drafter of one layer."""
    names = {reader.architecture for each in servers.RELEASES.values() for r in each for reader in r.drafters.values()}
    names |= {"Eagle3LlamaForCausalLM", "Eagle3DeepseekV3ForCausalLM", "Eagle3DraftModel"}
    found = config.get("architectures")
    speculators = config.get("speculators_model_type")
    if speculators not in (None, "eagle3") or (speculators is None and not (found and set(found) <= names)):
        raise RequestError(
            f"{path}: found architectures {found}, expected one of {sorted(names)}; try another inputs.export="
        )
    if inner.get("num_hidden_layers", 1) != 1:
        raise RequestError(f"{path}: found {inner['num_hidden_layers']} layers, expected a drafter of one layer")


def _layer_ids(
    config: Mapping[str, Any], path: Path, num_layers: int | None, given: Sequence[int] | None
) -> tuple[int, ...]:
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    where = f"{path}: eagle_aux_hidden_state_layer_ids"
    if top:
        found = check_ids(top, num_layers or max(top), where)
        if nested is not None and list(nested) not in (list(found), [i - 1 for i in found]):
            raise RequestError(
                f"{path}: found layer ids {top} at the top and {nested} in eagle_config, expected the same list, or "
                "one lower as the outputs of layers; export the drafter again with `eagle3 stage=export`"
            )
        return found
    if num_layers is None:
        raise RequestError(
            f"{where}: found none at the top, expected the layers it reads; export it with `eagle3 stage=export`"
        )
    if given is not None:
        return check_ids(given, num_layers)
    usual = eagle_ids(num_layers)
    if nested is None or tuple(nested) == usual:
        return usual
    if tuple(nested) == output_ids(usual):
        return from_output_ids(nested)
    raise RequestError(
        f"{path}: found layer ids {nested} in eagle_config only, where trainers write inputs or outputs of layers; "
        f"expected {list(usual)} or {list(output_ids(usual))}, which can be told apart; give the inputs that it was "
        "trained on with layers.ids=[...]"
    )
