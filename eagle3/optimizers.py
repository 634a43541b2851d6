"""AdamW that clips and writes the products' copies in one pass over memory, and Muon (walk: step 6).

torch's fused AdamW reads and writes 28 bytes a parameter, clipping rewrites every gradient before it, and the next
forward pass reads every master once more to cast it. Joined, that is 30 bytes a parameter instead of 42.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eagle3.compute_weights import ComputeWeights


class ClippedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, state and all, whose `clip` scales gradients as they are read.

    `clip_to` sets the clip before each step; weights that `copies` holds are renewed with their masters. Parameters are
    fp32 tensors on a GPU, whole or in shards; the state is torch's, so that checkpoints fit both.
    """

    def __init__(self, params: Any, copies: ComputeWeights | None = None, **options: Any) -> None:
        super().__init__(params, **options)
        self.copies = copies
        self.clip: Tensor | None = None

    def clip_to(self, norm: float) -> Tensor:
        """Bounds the next step's gradient by this norm over all parameters; returns the norm found, a scalar tensor.

        Where it is not finite, the step will change nothing.
        """
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        found = torch.nn.utils.get_total_norm(grads, foreach=True)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        self.clip = torch.where(found.isfinite(), torch.clamp(norm / (found + 1e-6), max=1.0), torch.nan)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        from eagle3.kernels.adamw import adamw_

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip, self.clip = self.clip, None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] += 1
                copy = self.copies.copy_of(weight) if self.copies is not None else None
                mine = _here(weight)
                adamw_(
                    mine, _here(weight.grad), _here(state["exp_avg"]), _here(state["exp_avg_sq"]), copy,
                    mine.new_ones(()) if clip is None else clip,
                    float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], int(state["step"]),
                )  # fmt: skip
                torch.autograd.graph.increment_version(mine)
                if copy is not None and self.copies is not None:
                    self.copies.mark(weight)
        return loss


def _here(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor in shards, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the five steps' polynomial (Keller Jordan's)


class MuonAdamW(torch.optim.Optimizer):
    """Muon (arXiv 2502.16982) for the groups marked `muon`, AdamW for the others, under one schedule.

    A matrix moves by its momentum's orthogonal part, scaled to the size of AdamW's updates, so that one learning rate
    serves both. That part costs 5 (4 m^2 n + 2 m^3) FLOPs for [m, n], m the shorter side, whatever the batch. Ranks of
    a process group, which hold the same weights and gradients, share the matrices and exchange the parts in bf16.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        adamw = [group for group in self.param_groups if not group.get("muon")]
        self._adamw = torch.optim.AdamW(adamw, fused=adamw[0]["params"][0].is_cuda)
        for mine, theirs in zip(adamw, self._adamw.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key not in mine})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [(p, g) for g in self.param_groups if g.get("muon") for p in g["params"] if p.grad is not None]
        self._orthogonal_step(matrices)
        self._adamw.state = self.state  # loading a state makes new ones
        self._adamw.param_groups = [group for group in self.param_groups if not group.get("muon")]
        self._adamw.step()
        return loss

    def _orthogonal_step(self, matrices: list[tuple[Tensor, dict[str, Any]]]) -> None:
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if shared else (0, 1)
        exchanges: list[torch.distributed.Work | None] = []
        parts: list[Tensor] = []
        for (weight, _), owner in zip(matrices, owners([weight.shape for weight, _ in matrices], ranks), strict=True):
            assert weight.grad is not None
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
            if owner == rank:
                part = orthogonal_part(weight.grad.lerp(momentum, MOMENTUM)).contiguous()
            else:
                part = torch.empty_like(weight, dtype=torch.bfloat16)
            exchanges.append(torch.distributed.broadcast(part, owner, async_op=True) if ranks > 1 else None)
            parts.append(part)
        for (weight, group), part, exchange in zip(matrices, parts, exchanges, strict=True):
            if exchange is not None:
                exchange.wait()
            lr = float(group["lr"])
            weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(part, alpha=-0.2 * lr * max(weight.shape) ** 0.5)


def orthogonal_part(matrix: Tensor) -> Tensor:
    """U V^T of a matrix U S V^T [m, n], nearly, in bf16: five Newton-Schulz steps, whose products run in bf16.

    Singular values end between about 0.7 and 1.2. Source: kellerjordan.github.io/posts/muon.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if tall else matrix.bfloat16()  # so that what is squared is of the shorter side
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def owners(sizes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Which rank makes each matrix's orthogonal part, so that all have about the same to do."""
    costs = [min(size) ** 2 * (2 * max(size) + min(size)) for size in sizes]
    found, loads = [0] * len(costs), [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        found[index] = loads.index(min(loads))
        loads[found[index]] += costs[index]
    return found
