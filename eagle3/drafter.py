"""The EAGLE-3 drafter: one decoder layer that reads the target's states and the next token (walk: step 6).

A column is (state, embedding of the next token). In training `unroll` runs all drafting steps of a packed batch at
once; in decoding `extend` appends columns to a cache. Both are the same arithmetic. Source: EAGLE-3, arXiv 2503.01840;
tensor names and the variants' flags are those of vLLM's llama_eagle3.py, so that export renames nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eagle3.attention import Block, unroll_attention
from eagle3.errors import RequestError, StoreError
from eagle3.latent_attention import LatentAttention
from eagle3.norm import Norm
from eagle3.rotary import Rotary
from eagle3.slots import SlotRows

WEIGHTS = "drafter.safetensors"
# What reading a file of weights raises that is torn or something else.
UNREADABLE = (OSError, SafetensorError, KeyError, TypeError, ValueError)
# The last norm of a fresh drafter whose head is the target's: logits half as large as the target's own.
SOFT_START = 0.5


@dataclass(frozen=True)
class DrafterShape:
    """The drafter's sizes and variants; `layer_ids` are the target's layers that it reads, in this order."""

    hidden_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    attention: str = "dense"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    hidden_act: str = "silu"
    # Latent attention's sizes; with it `head_dim` is that of a query and `num_key_value_heads` the query heads'.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def plain(self) -> dict[str, Any]:
        """As plain JSON values, for manifests."""
        return {**dataclasses.asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> DrafterShape:
        """Reads what `plain` wrote."""
        return cls(**{**values, "layer_ids": tuple(values["layer_ids"])})


class Attention(nn.Module):
    """The paper's four projections; queries, keys and values read the pair (embedding, state) of width 2H."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        width, inner = 2 * shape.hidden_size, self.heads * self.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def queries(self, pair: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
        """[R, 2H] → [R, heads, D], rotated at `positions` [R]."""
        return rotary(self.q_proj(pair).unflatten(-1, (self.heads, self.head_dim)), positions)

    def columns(self, pair: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R, 2H] → keys, rotated, and values, each [R, kv_heads, D]."""
        keys = rotary(self.k_proj(pair).unflatten(-1, (self.kv_heads, self.head_dim)), positions)
        return keys, self.v_proj(pair).unflatten(-1, (self.kv_heads, self.head_dim))


class Mlp(nn.Module):
    """The gated MLP."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.activation = ACT2FN[shape.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class MidLayer(nn.Module):
    """The decoder layer around the attention."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        # Makes the MLP's activations again in the backward pass instead of keeping them.
        self.recompute = False
        self.self_attn = LatentAttention(shape) if shape.attention == "mla" else Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)

    def enter(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections read [R, 2H] and the residual [R, H]: the state as it came, or normed (variant)."""
        normed = self.hidden_norm(features)
        pair = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        return pair, normed if self.norm_before_residual else features

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """From attended heads [R, heads, D] to the layer's output g [R, H], pre-norm."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        normed = self.post_attention_layernorm(hidden)
        if self.recompute:
            return hidden + checkpoint(self.mlp, normed, use_reentrant=False, preserve_rng_state=False)
        return hidden + self.mlp(normed)


class DraftCache:
    """Keys and values of the columns so far, as decoding appends and truncates them."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of columns."""
        return 0 if self.keys is None else len(self.keys)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` columns."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:length], self.values[:length]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds columns [T, kv_heads, D]; returns all of them."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys)), torch.cat((self.values, values))
        self.keys, self.values = keys, values
        return keys, values


class DraftHead(nn.Linear):
    """The drafter's lm_head [D, H]."""

    def forward(self, input: Tensor, step: Callable[..., Any] | None = None, *args: Any) -> Any:
        """Draft logits of rows [..., H]; or `step(rows, *args)`, which reads the weight itself.

        So that a strategy may gather the weight behind what comes before, and send its gradient off once it is made.
        """
        return super().forward(input) if step is None else step(input, *args)


class Eagle3Drafter(nn.Module):
    """The drafter on the target's frozen embedding [V, H], which is not part of its state dict."""

    embedding: Tensor
    d2t: Tensor
    t2d: Tensor
    draft_ids: Tensor

    def __init__(self, shape: DrafterShape, embedding: Tensor) -> None:
        super().__init__()
        if tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
            raise RequestError(
                f"drafter: found an embedding of {list(embedding.shape)}, expected the target's "
                f"[{shape.vocab_size}, {shape.hidden_size}]; train and use a drafter with the same model="
            )
        self.shape = shape
        states, width = len(shape.layer_ids), shape.target_hidden_size
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.input_norm = Norm(states * width, eps=shape.rms_norm_eps) if shape.norm_before_fc else None
        norms = [Norm(width, eps=shape.rms_norm_eps) for _ in range(states)]
        self.fc_norm = nn.ModuleList(norms) if shape.fc_norm else None
        self.fc = nn.Linear(states * width, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = DraftHead(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(shape)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        in_vocab = torch.arange(shape.vocab_size) < shape.draft_vocab_size
        self.register_buffer("t2d", in_vocab)

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs a training step's `step(*args)`, around which a strategy may gather the weights (FSDP2).

        What it returns must be tensors or tuples of them, or that strategy does not see the gradients.
        """
        return step(*args)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.fc.weight.dtype

    @property
    def target_ids(self) -> Tensor | None:
        """The target id of each draft id, int64 [D]; None when the vocabularies are equal."""
        if self.shape.draft_vocab_size == self.shape.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, d2t: Tensor, t2d: Tensor) -> None:
        """Takes over a vocabulary map: offsets int64 [D] (target id - draft id, target ids ascending), bool [V]."""
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    @torch.no_grad()
    def initialise(
        self, seed: int, head: Tensor | None = None, state_scales: Sequence[float] | None = None, std: float = 0.02
    ) -> None:
        """Fresh weights: matrices normal with `std`, norms one, the head the rows [D, H] of the target's if given.

        `state_scales` are the typical sizes (root mean square of a row) of the K captured states: with them fc starts
        as the deepest state at size one, which is nearest to what the head reads. Otherwise states of size 20 would
        drown what the layer adds to them, and training would first have to shrink fc.
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            else:
                parameter.fill_(1.0)
        if head is not None:
            self.lm_head.weight.copy_(head)
            # The target's rows behind a norm of one are as sure as the target is, before anything was learned.
            self.norm.weight.fill_(SOFT_START)
        if state_scales is not None:
            normed = self.input_norm is not None or self.fc_norm is not None
            self.fc.weight.zero_()
            deepest = self.fc.weight[:, -self.shape.target_hidden_size :]
            deepest.fill_diagonal_(1.0 if normed else 1.0 / state_scales[-1])

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids → target ids."""
        return draft_ids + self.d2t[draft_ids]

    def embed(self, input_ids: Tensor) -> Tensor:
        """The target's embeddings [R, H] in the drafter's dtype."""
        return F.embedding(input_ids, self.embedding).to(self.dtype)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The target's states [T, K, H_target] in the order of `layer_ids`, or [T, K * H_target], → features [T, H]."""
        states = hidden_states.flatten(1).to(self.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            chunks = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(states)

    def unroll(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        slots: SlotRows,
        blocks: Sequence[Sequence[Block]],
    ) -> Tensor:
        """All unroll steps of a packed batch of T tokens, teacher-forced: → normed outputs [M, H] of supervised slots.

        The M rows come step by step in the order of `slots`; `lm_head` of them are the draft logits. `hidden_states`
        [T, K, H_target]; `blocks[k]` cuts `slots.rows[k]` for the attention.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        # Step 0: keys and values of every row; its last token's column in a document is never attended to.
        pair, residual = layer.enter(self.embed(input_ids.roll(-1)), self.fuse(hidden_states))
        key, value = attention.columns(pair, self.rotary, position_ids)
        rows = slots.rows[0]
        pair, features = pair[rows], residual[rows]
        residual = features
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs: list[Tensor] = []
        for k in range(slots.steps):
            rows, kept, supervised = slots.rows[k], slots.kept[k], slots.supervised[k]
            positions = position_ids[rows] + k
            if k > 0:
                if kept is not None:
                    features = features[kept]
                    own_keys, own_values = [x[kept] for x in own_keys], [x[kept] for x in own_values]
                pair, residual = layer.enter(self.embed(input_ids[rows + 1 + k]), features)
                own_key, own_value = attention.columns(pair, self.rotary, positions)
                own_keys.append(own_key)
                own_values.append(own_value)
            query = attention.queries(pair, self.rotary, positions)
            attended = unroll_attention(query, key, value, own_keys, own_values, rows, blocks[k])
            g = layer.leave(attended, residual)
            output = self.norm(g)
            features = output if self.shape.norm_output else g
            outputs.append(output if supervised is None else output[supervised])
        return torch.cat(outputs)

    def new_cache(self) -> DraftCache:
        """An empty cache."""
        return DraftCache()

    def extend(
        self, cache: DraftCache, input_ids: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Appends T columns that read tokens `input_ids` [T] beside `features` [T, H], each seeing all before it.

        A column's token is the one after its state: column t of a text holds fuse(states of token t) and token t+1, at
        position t. Returns what the next drafting step takes as its feature, [T, H], and the draft logits [T, D].
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        pair, residual = layer.enter(self.embed(input_ids), features)
        query = attention.queries(pair, self.rotary, positions)
        before = cache.length
        keys, values = cache.append(*attention.columns(pair, self.rotary, positions))
        columns = torch.arange(len(keys), device=keys.device)
        mask = columns[None, :] <= (before + torch.arange(len(query), device=keys.device))[:, None]
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        g = layer.leave(attended[0].transpose(0, 1), residual)
        output = self.norm(g)
        return (output if self.shape.norm_output else g), self.lm_head(output)


def drafter_tensors(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """The drafter's fp32 weights and vocabulary map on the CPU; all ranks take part where it lies in shards."""
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in drafter.state_dict().items()
    }
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in whole.items()
    }


def save_drafter(drafter: Eagle3Drafter, folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """Writes `drafter.safetensors`: the drafter's tensors (read beforehand where given), its shape in the metadata."""
    path = Path(folder) / WEIGHTS
    save_file(tensors or drafter_tensors(drafter), path, metadata={"shape": json.dumps(drafter.shape.plain())})
    return path


def read_shape(folder: Path) -> DrafterShape:
    """The shape of what `save_drafter` wrote, from the file's header, which has to fit its size. Errors as below."""
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            return DrafterShape.from_plain(json.loads(file.metadata()["shape"]))
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def load_drafter(folder: Path, embedding: Tensor) -> Eagle3Drafter:
    """Reads what `save_drafter` wrote onto the target's embedding [V, H].

    StoreError, naming the file, when it is absent or torn or when a tensor is missing, unknown or of another size;
    RequestError when the embedding is another model's.
    """
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            shape = DrafterShape.from_plain(json.loads(file.metadata()["shape"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    drafter = Eagle3Drafter(shape, embedding)
    try:
        drafter.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise StoreError(
            f"{path}: its tensors are not those of the shape that it states: {' '.join(str(error).split())}; "
            "delete its folder and run `eagle3 stage=train` again"
        ) from error
    return drafter


def _unreadable(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path}: expected a drafter's weights, found {type(error).__name__}: {error}; "
        "delete its folder and run `eagle3 stage=train` again"
    )
