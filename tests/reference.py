"""The unroll written as the paper and DESIGN define it: a double loop over (document, slot, step).

It shares no code with eagle3 but reads a drafter's parameters. Everything is float64; autograd gives the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Document:
    """input_ids [N], loss_mask [N], hidden_states [N, K * H], final_states [N, H]."""

    input_ids: list[int]
    loss_mask: list[bool]
    hidden_states: Tensor
    final_states: Tensor


@dataclass
class Result:
    """What the loop found, keyed by (document, slot, step)."""

    loss: Tensor
    rows: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    logits: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    oov: set[tuple[int, int, int]] = field(default_factory=set)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def is_supervised(document: Document, t: int, k: int, draft_vocabulary: set[int]) -> bool:
    """DESIGN's words: tokens t+1 … t+2+k in one masked span, tokens t+2 … t+1+k in the draft vocabulary."""
    if t + 2 + k >= len(document.input_ids):
        return False
    in_span = all(document.loss_mask[i] for i in range(t + 1, t + 3 + k))
    return in_span and all(document.input_ids[i] in draft_vocabulary for i in range(t + 2, t + 2 + k))


def cross_entropy(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    return -(torch.softmax(teacher_logits, 0) * torch.log_softmax(draft_logits, 0)).sum()


def unroll(
    weights: dict[str, Tensor],
    shape: object,
    embedding: Tensor,
    documents: Sequence[Document],
    teacher: Callable[[Tensor], Tensor],
    target_ids: list[int],
    steps: int,
    decay: float,
    oov: str = "mask",
    row_loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    frequencies: Tensor | None = None,
    rope_factor: float = 1.0,
    softmax_factor: float = 1.0,
) -> Result:
    """The loss of one training step on these documents. `teacher` maps one final state [H] to logits [V]."""
    s = shape
    vocabulary = set(target_ids)
    eps, heads, kv, dim = s.rms_norm_eps, s.num_attention_heads, s.num_key_value_heads, s.head_dim
    latent = s.attention == "mla"
    if latent:
        kv, dim = heads, s.qk_rope_head_dim
    if frequencies is None:
        frequencies = (1.0 / s.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)).double()

    def rotate(vector: Tensor, position: int) -> Tensor:
        turned = list(vector)
        half = dim // 2
        for i in range(half):
            c = torch.cos(position * frequencies[i]) * rope_factor
            n = torch.sin(position * frequencies[i]) * rope_factor
            a, b = (2 * i, 2 * i + 1) if latent else (i, i + half)
            turned[a], turned[b] = vector[a] * c - vector[b] * n, vector[b] * c + vector[a] * n
        return torch.stack(turned)

    def column(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """What the projections read, and the residual."""
        normed = rms_norm(state, weights["midlayer.hidden_norm.weight"], eps)
        embedded = rms_norm(embedding[token], weights["midlayer.input_layernorm.weight"], eps)
        return torch.cat((embedded, normed)), (normed if s.norm_before_residual else state)

    def project(name: str, pair: Tensor, count: int) -> list[Tensor]:
        flat = weights[f"midlayer.self_attn.{name}.weight"] @ pair
        size = len(flat) // count
        return [flat[h * size : (h + 1) * size] for h in range(count)]

    def queries(pair: Tensor, position: int) -> list[Tensor]:
        if not latent:
            return [rotate(x, position) for x in project("q_proj", pair, heads)]
        (small,) = project("q_a_proj", pair, 1)
        small = rms_norm(small, weights["midlayer.self_attn.q_a_layernorm.weight"], eps)
        n = s.qk_nope_head_dim
        return [torch.cat((x[:n], rotate(x[n:], position))) for x in project("q_b_proj", small, heads)]

    def key_and_value(pair: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        if not latent:
            return [rotate(x, position) for x in project("k_proj", pair, kv)], project("v_proj", pair, kv)
        (both,) = project("kv_a_proj_with_mqa", pair, 1)
        small, shared = both[: s.kv_lora_rank], rotate(both[s.kv_lora_rank :], position)
        small = rms_norm(small, weights["midlayer.self_attn.kv_a_layernorm.weight"], eps)
        n, expanded = s.qk_nope_head_dim, project("kv_b_proj", small, heads)
        return [torch.cat((x[:n], shared)) for x in expanded], [x[n:] for x in expanded]

    counts = [0] * steps
    for document in documents:
        for t in range(len(document.input_ids)):
            for k in range(steps):
                counts[k] += is_supervised(document, t, k, vocabulary)

    result = Result(torch.zeros((), dtype=torch.float64))
    for d, document in enumerate(documents):
        length = len(document.input_ids)
        features, keys, values, pairs = [], [], [], []
        for t in range(length):
            states = document.hidden_states[t]
            if s.norm_before_fc:
                states = rms_norm(states, weights["input_norm.weight"], eps)
            if s.fc_norm:
                parts = states.chunk(len(s.layer_ids))
                states = torch.cat([rms_norm(p, weights[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)])
            features.append(weights["fc.weight"] @ states)
            if t + 1 == length:
                break
            pair, residual = column(features[t], document.input_ids[t + 1])
            pairs.append((pair, residual))
            key, value = key_and_value(pair, t)
            keys.append(key)
            values.append(value)
        for t in range(length - 1):
            own: list[tuple[list[Tensor], list[Tensor]]] = []
            state = features[t]
            for k in range(steps):
                if t + 1 + k >= length:
                    break
                if k == 0:
                    pair, residual = pairs[t]
                else:
                    pair, residual = column(state, document.input_ids[t + 1 + k])
                    own.append(key_and_value(pair, t + k))
                seen = [(keys[j], values[j]) for j in range(t + 1)] + own
                attended = []
                for h, query in enumerate(queries(pair, t + k)):
                    group = h // (heads // kv)
                    scores = torch.stack([query @ key[group] for key, _ in seen]) * softmax_factor / len(query) ** 0.5
                    share = torch.softmax(scores, 0)
                    attended.append(sum(share[j] * value[group] for j, (_, value) in enumerate(seen)))
                hidden = residual + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
                x = rms_norm(hidden, weights["midlayer.post_attention_layernorm.weight"], eps)
                gate = weights["midlayer.mlp.gate_proj.weight"] @ x
                up = weights["midlayer.mlp.up_proj.weight"] @ x
                g = hidden + weights["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
                normed = rms_norm(g, weights["norm.weight"], eps)
                state = normed if s.norm_output else g
                if not is_supervised(document, t, k, vocabulary):
                    continue
                logits = weights["lm_head.weight"] @ normed
                target = teacher(document.final_states[t + 1 + k])
                loss = row_loss(logits, target[torch.tensor(target_ids)])
                result.logits[d, t, k] = logits
                result.rows[d, t, k] = loss
                if int(target.argmax()) not in vocabulary:
                    result.oov.add((d, t, k))
                    if oov == "mask":
                        continue
                result.loss = result.loss + decay**k * loss / counts[k]
    return result
