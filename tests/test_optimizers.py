"""Muon beside AdamW: the update by hand, and a state that can be saved."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from eagle3.optimizers import MuonAdamW
from tests.test_checkpoints import assert_equal_artifacts, kill_and_resume
from tests.test_train import assert_two_ranks_equal_one
from tests.trained import copied, make_inputs, train_config, trained

# Of torch's Muon, which are Keller Jordan's.
MOMENTUM, NEWTON_SCHULZ = 0.95, (3.4445, -4.7750, 2.0315)


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


def test_matrices_move_by_their_orthogonal_part_and_the_rest_as_adamw_says() -> None:
    """The five Newton-Schulz steps leave singular values near one: so the update is that of the SVD, roughly."""
    optimizer, generator = MuonAdamW(groups()), torch.Generator().manual_seed(1)
    theirs = copy.deepcopy([group["params"] for group in optimizer.param_groups[1:]])
    adamw = torch.optim.AdamW(
        [{"params": theirs[0], "weight_decay": 0.1}, {"params": theirs[1], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    before = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
    fill(optimizer, generator)
    for mine, other in zip(optimizer.param_groups[1:], theirs, strict=True):
        other[0].grad = mine["params"][0].grad.clone()
    optimizer.step()
    adamw.step()
    for mine, other in zip(optimizer.param_groups[1:], theirs, strict=True):
        assert torch.equal(mine["params"][0], other[0])
    for parameter, start in zip(optimizer.param_groups[0]["params"], before, strict=True):
        u, _, v = torch.linalg.svd(parameter.grad, full_matrices=False)
        update = (start * (1 - 0.01 * 0.1) - parameter.detach()) / (0.01 * 0.2 * max(parameter.shape) ** 0.5)
        singular = torch.linalg.svdvals(update)
        assert float(singular.min()) > 0.6
        assert float(singular.max()) < 1.3
        assert float((update * (u @ v)).sum() / (update.norm() * (u @ v).norm())) > 0.95


def test_several_steps_equal_float64() -> None:
    """The reference applies the steps' polynomial to the singular values; products in bf16 keep 8 bits."""
    optimizer, generator = MuonAdamW(groups()), torch.Generator().manual_seed(1)
    weights = optimizer.param_groups[0]["params"]
    expected = [weight.detach().double() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in expected]
    for _ in range(3):
        before = [weight.detach().double() for weight in weights]
        fill(optimizer, generator)
        optimizer.step()
        for weight, start, momentum in zip(weights, before, momenta, strict=True):
            grad = weight.grad.double()
            momentum.mul_(MOMENTUM).add_((1 - MOMENTUM) * grad)
            u, singular, v = torch.linalg.svd((1 - MOMENTUM) * grad + MOMENTUM * momentum, full_matrices=False)
            singular = singular / singular.norm()
            for _ in range(5):
                singular = sum(c * singular ** (2 * i + 1) for i, c in enumerate(NEWTON_SCHULZ))
            update = 0.2 * 0.01 * max(weight.shape) ** 0.5 * (u * singular) @ v
            found = (1 - 0.01 * 0.1) * start - weight.detach().double()
            assert float((found - update).norm()) < 0.03 * float(update.norm())


def test_a_loaded_state_goes_on_alike() -> None:
    first, second = MuonAdamW(groups()), MuonAdamW(groups())
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        if step == 2:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            for mine, other in zip(first.param_groups, second.param_groups, strict=True):
                for a, b in zip(mine["params"], other["params"], strict=True):
                    b.data.copy_(a.data)
        fill(first, generator)
        for mine, other in zip(first.param_groups, second.param_groups, strict=True):
            for a, b in zip(mine["params"], other["params"], strict=True):
                b.grad = a.grad.clone()
        first.step()
        if step >= 2:
            second.step()
    for mine, other in zip(first.param_groups, second.param_groups, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine["params"], other["params"], strict=True))


def test_training_with_muon_learns_and_resumes(tiny_target: Path, tmp_path: Path) -> None:
    inputs, muon = make_inputs(tiny_target), ("trainer.optimizer=muon",)
    _, artifact, run = trained(train_config(copied(inputs, tmp_path / "whole"), tiny_target, *muon))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    validated = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert validated == sorted(validated, reverse=True)
    assert validated[-1] < validated[0] - 0.05
    killed = kill_and_resume(copied(inputs, tmp_path / "killed"), tiny_target, 7, *muon)
    assert_equal_artifacts(killed, artifact)
    with pytest.raises(AssertionError):
        assert_equal_artifacts(killed, trained(train_config(copied(inputs, tmp_path / "adamw"), tiny_target))[1])


@pytest.mark.slow
def test_training_with_muon_on_two_ranks_equals_one(tiny_target: Path, tmp_path: Path) -> None:
    """Sums in another order are rounded otherwise to bf16, so weights differ by a part of a step."""
    two = ("hardware.devices=2", "hardware.training_strategy=ddp")
    both = ("trainer.optimizer=muon",)
    assert_two_ranks_equal_one(make_inputs(tiny_target), tiny_target, tmp_path, *two, both=both, atol=5e-4)
