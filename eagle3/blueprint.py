"""What a new drafter is made of: its shape, its vocabulary, its first weights (before step 6 of the walk).

Sizes come from the config, else from the target through its adapter. The vocabulary map is built once from the
supervised tokens; a warm start brings its own, bit-equal, because every output of its head stands for one token of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3.checkpoint import Target
from eagle3.config import DrafterConfig
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.errors import RequestError
from eagle3.parts import Part
from eagle3.prepared import Prepared
from eagle3.published import look_into, read_drafter
from eagle3.store import StatesStore
from eagle3.vocab import VocabMap, build_vocab

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Samples that the size of the states is read from.
SCALE_SAMPLES = 32
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# What a warm start takes over from the drafter that it starts from.
KEPT = ("rope_theta", "rope_scaling", "rms_norm_eps")
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NETWORK = Part(
    "drafter.module",
    Eagle3Drafter,
    "an eagle3.drafter.Eagle3Drafter or a subclass",
    "leave drafter.module as it is in conf/drafter/dense.yaml",
    default="eagle3.drafter.Eagle3Drafter",
)


def drafter_shape(
    cfg: DrafterConfig, target: Target, layer_ids: tuple[int, ...], draft_vocab_size: int
) -> DrafterShape:
    """The shape that a config means for a target. RequestError when its heads do not fit together."""
    shape = target.shape
    sizes = dict(target.adapter.drafter_defaults(shape))
    sizes.update({name: getattr(cfg, name) for name in SIZES if getattr(cfg, name) is not None})
    latent = _latent_sizes(cfg, target)
    if latent:
        width = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": width}
    heads, kv_heads, head_dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    if heads % kv_heads:
        raise RequestError(
            f"drafter.num_key_value_heads: found {kv_heads} for {heads} attention heads, expected a divisor of "
            f"{heads}; try drafter.num_key_value_heads={heads}"
        )
    if not latent and head_dim % 2:
        raise RequestError(
            f"drafter.head_dim: found {head_dim}, expected an even number (rotary embedding turns pairs); "
            f"try drafter.head_dim={head_dim + 1}"
        )
    return DrafterShape(
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        layer_ids=layer_ids,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab_size,
        **{name: sizes[name] for name in SIZES},
        **latent,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        rope_scaling=shape.rope_scaling,
        max_position_embeddings=cfg.max_position_embeddings or shape.max_position_embeddings,
        attention=cfg.attention,
        **{name: getattr(cfg, name) for name in VARIANTS},
        hidden_act=shape.hidden_act,
    )


def _latent_sizes(cfg: DrafterConfig, target: Target) -> dict[str, int]:
    """Latent attention's sizes, the target's where none are given; none for a dense drafter."""
    given = [name for name in LATENT_SIZES if getattr(cfg, name) is not None]
    if cfg.attention != "mla":
        if given:
            raise RequestError(
                f"drafter.{given[0]}: found {getattr(cfg, given[0])} with drafter.attention={cfg.attention}, expected "
                "it only with latent attention; try drafter=mla"
            )
        return {}
    grouped = [name for name in ("num_key_value_heads", "head_dim") if getattr(cfg, name) is not None]
    if grouped:
        raise RequestError(
            f"drafter.{grouped[0]}: found {getattr(cfg, grouped[0])}, expected null with drafter.attention=mla, whose "
            f"heads are sized by {', '.join(LATENT_SIZES[2:])}; leave it out"
        )
    text = target.adapter.text_config(target.config)
    sizes = {name: int(getattr(cfg, name) or getattr(text, name, None) or 0) for name in LATENT_SIZES}
    missing = [name for name, size in sizes.items() if not size]
    if missing:
        raise RequestError(
            f"drafter.attention: found mla for a target of {target.shape.architecture}, which has no "
            f"{', '.join(missing)} to take over; set drafter.{missing[0]} and the like, or try drafter=dense"
        )
    if sizes["qk_rope_head_dim"] % 2:
        raise RequestError(
            f"drafter.qk_rope_head_dim: found {sizes['qk_rope_head_dim']}, expected an even number (rotary embedding "
            f"turns pairs); try drafter.qk_rope_head_dim={sizes['qk_rope_head_dim'] + 1}"
        )
    return sizes


def state_scales(store: StatesStore, layer_ids: tuple[int, ...]) -> list[float]:
    """The typical size of each captured state: the median over rows of their root mean square.

    Medians, since a text's first token has states hundreds of times larger than all others.
    """
    samples = [store.read(sample_id, layer_ids) for sample_id in store.sample_ids[:SCALE_SAMPLES]]
    rows = (torch.cat([states[k].float().square().mean(-1) for states in samples]) for k in layer_ids)
    return [max(float(row.median().sqrt()), torch.finfo(torch.float32).tiny) for row in rows]


def new_drafter(
    cfg: DrafterConfig,
    target: Target,
    prepared: Prepared,
    layer_ids: tuple[int, ...],
    seed: int,
    scales: Sequence[float] | None = None,
) -> tuple[Eagle3Drafter, VocabMap]:
    """A drafter with fresh weights and a vocabulary of the prepared set's supervised tokens.

    `scales` are the states' sizes, from `state_scales`.
    """
    vocab = build_vocab(
        prepared.token_counts(),
        cfg.draft_vocab_size,
        target.shape.vocab_size,
        prepared.special_ids,
        prepared.tokenizer_hash,
    )
    shape = drafter_shape(cfg, target, layer_ids, vocab.draft_vocab_size)
    drafter = NETWORK.build(cfg.module, shape=shape, embedding=target.embedding())
    drafter.set_vocabulary(vocab.d2t, vocab.t2d)
    head = target.head()[vocab.target_ids].float() if cfg.init_head == "target" else None
    drafter.initialise(seed, head, scales)
    return drafter, vocab


def warm_drafter(
    cfg: DrafterConfig, target: Target, prepared: Prepared, layer_ids: tuple[int, ...], folder: Path, where: str
) -> tuple[Eagle3Drafter, VocabMap]:
    """A drafter that goes on from the weights and the vocabulary of a trained one, ours or published.

    RequestError as `warm_shape`, and for a published drafter's map or embedding that is not right.
    """
    wanted = warm_shape(cfg, target, layer_ids, folder, where)
    trained = read_drafter(folder, target, layer_ids)
    drafter = NETWORK.build(cfg.module, shape=wanted, embedding=target.embedding())
    drafter.load_state_dict(trained.state_dict(), strict=True)
    return drafter, VocabMap(drafter.d2t.clone(), drafter.t2d.clone(), prepared.tokenizer_hash)


def warm_shape(
    cfg: DrafterConfig, target: Target, layer_ids: tuple[int, ...], folder: Path, where: str
) -> DrafterShape:
    """The shape of a drafter that goes on from the one in a folder, which the config names in `where`.

    Its rope and epsilon stay, which the config does not know. RequestError when the config means another shape: its
    weights would not mean what they meant; also, as StoreError, when its files are not whole. Reads no weights.
    """
    trained = look_into(folder, target, layer_ids)
    wanted = drafter_shape(cfg, target, layer_ids, trained.draft_vocab_size)
    wanted = dataclasses.replace(wanted, **{name: getattr(trained, name) for name in KEPT})
    if cfg.draft_vocab_size is not None and cfg.draft_vocab_size != trained.draft_vocab_size:
        raise RequestError(
            f"drafter.draft_vocab_size: found {cfg.draft_vocab_size}, expected {trained.draft_vocab_size}, the "
            f"vocabulary of {where}={folder}, which is kept; set it so, or leave {where} out"
        )
    differing = {
        field.name: (getattr(trained, field.name), getattr(wanted, field.name))
        for field in dataclasses.fields(wanted)
        if field.name != "max_position_embeddings" and getattr(trained, field.name) != getattr(wanted, field.name)
    }
    if differing:
        listed = ", ".join(f"{name} {before} there, {now} here" for name, (before, now) in differing.items())
        raise RequestError(
            f"{where}: {folder} has another shape ({listed}), expected the same; configure it so, or leave {where} out"
        )
    return wanted
