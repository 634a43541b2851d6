"""The written-out unroll and its loss against the drafter's own, which is tested against the float64 double loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from eagle3.drafter import Eagle3Drafter
from eagle3.fused_step import FusedStep
from eagle3.linear_loss import DraftTeacher
from eagle3.loss import LOSSES, UnrollLoss, mix_losses
from tests.drafters import MLA, Teacher, make_document, make_drafter, make_shape, pack, train_step

# `mscale_all_dim` also scales latent attention's softmax.
YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VARIANTS = {
    "dense": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "reduced vocabulary": {"draft_vocab_size": 15},
    "norm before residual": {"norm_before_residual": True},
    "normed output": {"norm_output": True},
    "both": {"norm_before_residual": True, "norm_output": True, "draft_vocab_size": 15},
    "rotary scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "narrow heads": {"head_dim": 6, "num_key_value_heads": 2},
    "latent attention": MLA,
    "latent attention, scaled": {**MLA, "rope_scaling": YARN, "draft_vocab_size": 15},
    "latent attention, both": {**MLA, "norm_before_residual": True, "norm_output": True},
}


def documents(shape) -> list:
    return [
        make_document(shape, [(3, 8), (10, 14)], 16, 1),
        make_document(shape, [(0, 6)], 8, 2),
        make_document(shape, [], 4, 3),
        make_document(shape, [(2, 30), (60, 85)], 100, 4),
    ]


def fused_step(
    drafter: Eagle3Drafter,
    docs: list,
    steps: int,
    alignment: str = "exact",
    dtype: torch.dtype | None = None,
    **options,
) -> UnrollLoss:
    """`tests.drafters.train_step` by the written-out passes, on the drafter's device."""
    target_ids, device = drafter.target_ids, drafter.fc.weight.device
    batch = pack(docs, steps, None if target_ids is None else drafter.t2d.cpu().numpy(), alignment, with_layout=True)
    if not docs:  # the data module gives an empty batch its widths
        width = drafter.shape.target_hidden_size
        shaped = {"hidden_states": torch.empty(0, len(drafter.shape.layer_ids), width)}
        batch = dataclasses.replace(batch, **shaped, final_states=torch.empty(0, width))
    batch, dtype = batch.to(device), dtype or drafter.dtype
    teacher = Teacher(drafter.shape.vocab_size, drafter.shape.hidden_size).to(
        device, torch.promote_types(dtype, torch.float32)
    )
    head = DraftTeacher(lambda states: normed(teacher, states), teacher.weight * 0.7, target_ids)
    step = FusedStep(drafter, head, dtype, **options, chunk_bytes=4000)
    assert batch.layout is not None
    weights = 0.8 ** torch.arange(steps, dtype=drafter.dtype, device=device) / batch.row_counts.clamp_min(1)
    return step(batch, batch.layout, weights)


def normed(teacher: Teacher, states: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6) * teacher.norm_weight


def assert_same_step(drafter: Eagle3Drafter, ours: UnrollLoss, theirs: UnrollLoss) -> None:
    """Loss, what happened at each row, and every gradient."""
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(ours.row_losses, theirs.row_losses)
    assert torch.equal(ours.hits, theirs.hits)
    assert torch.equal(ours.oov, theirs.oov)
    theirs.loss.backward()
    expected = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    ours.loss.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", VARIANTS)
def test_every_gradient_equals_the_drafters_own(name: str) -> None:
    drafter = make_drafter(make_shape(**VARIANTS[name]))
    docs = documents(drafter.shape)
    assert_same_step(drafter, fused_step(drafter, docs, 5), train_step(drafter, docs, 5))


@pytest.mark.parametrize("name", ["dense", "both", "latent attention"])
def test_rows_made_again_in_the_backward_pass_change_nothing(name: str) -> None:
    drafter = make_drafter(make_shape(**VARIANTS[name]))
    docs = documents(drafter.shape)
    assert_same_step(drafter, fused_step(drafter, docs, 5, recompute=True), train_step(drafter, docs, 5))


@pytest.mark.parametrize("alignment", ["eagle", "speculators"])
def test_rows_that_are_computed_but_not_supervised_get_no_loss(alignment: str) -> None:
    drafter = make_drafter(make_shape(draft_vocab_size=15))
    docs = documents(drafter.shape)
    ours, theirs = fused_step(drafter, docs, 4, alignment), train_step(drafter, docs, 4, alignment=alignment)
    assert_same_step(drafter, ours, theirs)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_mixed_from_config(name: str) -> None:
    drafter = make_drafter(make_shape(draft_vocab_size=15))
    docs = documents(drafter.shape)
    mix = {"soft_cross_entropy": 0.3} | {name: 0.5}
    ours = fused_step(drafter, docs, 3, mix=tuple(mix.get(other, 0.0) for other in LOSSES), mask_oov=False)
    assert_same_step(drafter, ours, train_step(drafter, docs, 3, oov="keep", row_loss=mix_losses(mix)))


@pytest.mark.parametrize("tokens", [0, 9])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["dense", "latent attention"])
def test_t9_a_batch_without_supervised_rows_has_zero_loss_and_zero_gradients(
    tokens: int, recompute: bool, name: str
) -> None:
    drafter = make_drafter(make_shape(**VARIANTS[name]))
    docs = [make_document(drafter.shape, [], tokens, 1)] if tokens else []
    step = fused_step(drafter, docs, 3, recompute=recompute)
    step.loss.backward()
    assert step.loss == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in drafter.parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["grouped queries", "latent attention"])
def test_gradients_arrive_one_group_after_another_the_large_first(recompute: bool, name: str) -> None:
    """So that ranks exchange one while the next is being made."""
    drafter = make_drafter(make_shape(**VARIANTS[name]))
    latent = drafter.shape.attention == "mla"
    pair = {"q_a_proj", "kv_a_proj_with_mqa"} if latent else {"q_proj", "k_proj", "v_proj"}
    expansions = [{"q_b_proj", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm"}] if latent else []
    arrived: list[str] = []
    for name, parameter in drafter.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name.split(".")[-2]))
    fused_step(drafter, documents(drafter.shape), 3, recompute=recompute).loss.backward()
    groups = [
        {"lm_head"},
        {"gate_proj", "up_proj"},
        {"down_proj"},
        {*pair, "input_layernorm"},
        {"o_proj"},
        *expansions,
        {"hidden_norm", "post_attention_layernorm", "norm"},
        {"fc"},
    ]
    for group in groups:
        assert set(arrived[: len(group)]) == group
        del arrived[: len(group)]
    assert not arrived
