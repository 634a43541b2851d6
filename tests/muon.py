"""Small weights under Muon and AdamW, and one rank of a group that trains them; light to import in another process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eagle3.optimizers import MuonAdamW


def groups(seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((6, 4), (5, 7), (3, 3), (8,))
    matrix, other, head, norm = (torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes)
    return [
        {"params": [matrix, other], "lr": 0.01, "weight_decay": 0.1, "muon": True},
        {"params": [head], "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)},
        {"params": [norm], "lr": 0.01, "weight_decay": 0.0, "betas": (0.9, 0.95)},
    ]


def fill(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def moved(rank: int, ranks: int, folder: Path) -> None:
    """Saves a rank's weights after three steps; what it makes itself are the matrices that it owns."""
    if ranks > 1:
        meeting = f"file://{folder / 'meeting'}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    optimizer, generator = MuonAdamW(groups()), torch.Generator().manual_seed(1)
    with FlopCounterMode(display=False) as counter:
        for _ in range(3):
            fill(optimizer, generator)
            optimizer.step()
    weights: list[Tensor] = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    torch.save({"weights": weights, "flops": counter.get_total_flops()}, folder / f"{ranks}-{rank}.pt")
    if ranks > 1:
        torch.distributed.destroy_process_group()
