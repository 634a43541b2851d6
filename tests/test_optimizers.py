"""Muon beside AdamW: the update by hand, and a state that can be saved."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import start_processes
from torch.utils.flop_counter import FlopCounterMode

from eagle3.optimizers import MOMENTUM, NEWTON_SCHULZ, MuonAdamW, orthogonal_part, owners
from tests.muon import fill, groups, moved
from tests.test_checkpoints import assert_equal_artifacts, kill_and_resume
from tests.test_train import assert_two_ranks_equal_one
from tests.trained import copied, make_inputs, train_config, trained


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


def test_it_moves_matrices_as_torch_does() -> None:
    optimizer, generator = MuonAdamW(groups()), torch.Generator().manual_seed(1)
    mine = optimizer.param_groups[0]["params"]
    theirs = copy.deepcopy(mine)
    muon = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        fill(optimizer, generator)
        for weight, other in zip(mine, theirs, strict=True):
            other.grad = weight.grad.clone()
        optimizer.step()
        muon.step()
    assert all(torch.equal(weight, other) for weight, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("size", [(64, 24), (24, 64), (32, 32)])
def test_the_orthogonal_part_costs_what_is_said(size: tuple[int, int]) -> None:
    m, n = min(size), max(size)
    with FlopCounterMode(display=False) as counter:
        assert orthogonal_part(torch.randn(size)).shape == size
    assert counter.get_total_flops() == 5 * (4 * m * m * n + 2 * m**3)


def test_ranks_share_the_matrices_evenly() -> None:
    """Llama-8B's drafter: fc, q, k, v, o, gate, up, down."""
    sizes = [(4096, 12288), (4096, 8192), *[(1024, 8192)] * 2, (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)]
    assert owners(sizes, 1) == [0] * 8
    for ranks in (2, 4):
        loads = [0] * ranks
        for (m, n), owner in zip(sizes, owners(sizes, ranks), strict=True):
            loads[owner] += min(m, n) ** 2 * (2 * max(m, n) + min(m, n))
        assert max(loads) < 1.3 * sum(loads) / ranks
    assert len(set(owners(sizes, 8))) == 8


@pytest.mark.slow
def test_two_ranks_share_the_work_and_end_where_one_does(tmp_path: Path) -> None:
    moved(0, 1, tmp_path)
    start_processes(moved, (2, tmp_path), nprocs=2)
    alone, *pair = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    for rank in pair:
        assert all(torch.equal(mine, other) for mine, other in zip(rank["weights"], alone["weights"], strict=True))
    assert sum(rank["flops"] for rank in pair) == alone["flops"]
    assert all(rank["flops"] > 0 for rank in pair)


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
