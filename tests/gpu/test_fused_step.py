"""The training step on a GPU: gradients against float64, bf16 errors beside autocast's, optimizer, prefetch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3.batches import PackedBatch
from eagle3.drafter import Eagle3Drafter
from eagle3.fused_step import LATENT_WIDTHS
from eagle3.head_rows import HeadRows
from eagle3.loss import LOSSES, mix_losses, unroll_loss
from eagle3.row_layout import RowLayout, lay_out, own_columns
from eagle3.slots import pack_rows, supervised_slots
from tests.drafters import Teacher, make_document, make_drafter, make_shape, pack, train_step
from tests.test_unroll import YARN, fused_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDE = {
    "hidden_size": 128,
    "target_hidden_size": 128,
    "intermediate_size": 320,
    "vocab_size": 900,
    "draft_vocab_size": 500,
    "head_dim": 32,
}


def latent(nope: int, rope: int, value: int, **ranks: int) -> dict[str, object]:
    """A latent drafter's sizes."""
    widths = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "head_dim": nope + rope}
    return {"attention": "mla", **widths, **ranks}


NORMS = {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True, "fc_norm": True}
VARIANTS = {
    "grouped queries": {"num_key_value_heads": 2},
    "head width 128": {"head_dim": 128, "num_key_value_heads": 1},
    "variants": NORMS,
    "full vocabulary": {"draft_vocab_size": 900},
    "latent attention": latent(*LATENT_WIDTHS, q_lora_rank=96, kv_lora_rank=64),
    "narrow latent attention": latent(32, 16, 32, q_lora_rank=64, kv_lora_rank=48),
    "latent attention of odd widths": latent(24, 8, 20, q_lora_rank=72, kv_lora_rank=40) | NORMS,
    "latent attention, all norms": latent(*LATENT_WIDTHS, q_lora_rank=72, kv_lora_rank=40)
    | NORMS
    | {"rope_scaling": YARN},
}


def wide_drafter(**changes: object) -> Eagle3Drafter:
    """float64, wide enough for tiles to be cut; weights as small as a fresh network's."""
    drafter = make_drafter(make_shape(**{**WIDE, **changes}))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" not in name:
                parameter.mul_(2.5 * parameter.shape[1] ** -0.5)
    return drafter


def documents(shape) -> list:
    """Turns of all lengths, a document without one, one of a single block."""
    return [
        make_document(shape, [(100, 300), (320, 500), (505, 520)], 560, 1),
        make_document(shape, [(0, 64)], 65, 2),
        make_document(shape, [], 40, 3),
        make_document(shape, [(7, 350)], 356, 4),
    ]


def gradients(drafter: Eagle3Drafter, loss: Tensor) -> dict[str, Tensor]:
    drafter.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.double().cpu() for name, p in drafter.named_parameters() if p.grad is not None}


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in expected.items()}


def on_gpu(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """fp32 masters on the GPU."""
    return copy.deepcopy(drafter).to("cuda", torch.float32)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "128" not in name])
def test_fp32_gradients_equal_float64(name: str) -> None:
    drafter = wide_drafter(**VARIANTS[name])
    docs = documents(drafter.shape)
    expected = train_step(drafter, docs, 7)
    theirs = gradients(drafter, expected.loss)
    mine = on_gpu(drafter)
    found = fused_step(mine, docs, 7, dtype=torch.float32)
    torch.testing.assert_close(found.loss.double().cpu(), expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.row_losses.double().cpu(), expected.row_losses, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.oov.cpu(), expected.oov)
    assert max(relative_errors(gradients(mine, found.loss), theirs).values()) < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_bf16_gradients_are_as_exact_as_autocast(name: str) -> None:
    """The drafter's own unroll under autocast, with the same teacher, is the yardstick."""
    drafter = wide_drafter(**VARIANTS[name])
    docs = documents(drafter.shape)
    theirs = gradients(drafter, train_step(drafter, docs, 7).loss)
    mine = on_gpu(drafter)
    ours = relative_errors(gradients(mine, fused_step(mine, docs, 7, dtype=torch.bfloat16).loss), theirs)
    mine = on_gpu(drafter)
    yardstick = relative_errors(gradients(mine, autocast_step(mine, docs).loss), theirs)
    assert np.median(list(ours.values())) < 1.1 * np.median(list(yardstick.values()))
    assert max(ours.values()) < 1.5 * max(yardstick.values())


def autocast_step(drafter: Eagle3Drafter, docs: list):
    shape, target_ids = drafter.shape, drafter.target_ids
    batch = pack(docs, 7, None if target_ids is None else drafter.t2d.cpu().numpy()).to("cuda")
    teacher = Teacher(shape.vocab_size, shape.hidden_size).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        hidden = drafter.unroll(
            batch.input_ids, batch.hidden_states.float(), batch.position_ids, batch.slots, batch.blocks
        )
        return unroll_loss(
            hidden,
            drafter.lm_head.weight,
            batch.final_states.float(),
            teacher,
            batch.slots,
            0.8 ** torch.arange(7, device="cuda") / batch.row_counts.clamp_min(1),
            target_ids,
            None if target_ids is None else drafter.t2d,
        )


@pytest.mark.parametrize("name", LOSSES)
def test_losses_mixed_from_config(name: str) -> None:
    drafter = wide_drafter()
    docs = documents(drafter.shape)
    mix = {"soft_cross_entropy": 0.3} | {name: 0.5}
    expected = train_step(drafter, docs, 3, oov="keep", row_loss=mix_losses(mix))
    theirs = gradients(drafter, expected.loss)
    mine = on_gpu(drafter)
    weights = tuple(mix.get(other, 0.0) for other in LOSSES)
    found = fused_step(mine, docs, 3, dtype=torch.float32, mix=weights, mask_oov=False)
    torch.testing.assert_close(found.loss.double().cpu(), expected.loss, rtol=1e-5, atol=1e-5)
    assert max(relative_errors(gradients(mine, found.loss), theirs).values()) < 1e-4


@pytest.mark.parametrize(
    ("heads", "widths"),
    [
        *(((8, 2), (128, 128, 0)), ((4, 4), (64, 64, 0)), ((8, 8), (128, 128, 64))),
        *(((4, 2), (24, 40, 8)), ((4, 4), (32, 32, 16)), ((2, 2), (64, 32, 16))),
    ],
)
def test_attention_of_scattered_rows_equals_float64(heads: tuple[int, int], widths: tuple[int, int, int]) -> None:
    """Output and every gradient of one step, T7's rows cut by turns; what nobody may read is poisoned."""
    from eagle3.kernels import fused, plain

    layout = layout_of([700, 40, 500, 260], turns=True)
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).bfloat16()

    step, rows, q_heads = 3, layout.counts[3], heads[0]
    first, last = layout.bounds(step)
    inputs, grad_out = buffers(layout, heads, widths, random), random(layout.stacked, q_heads * widths[1])
    results = []
    for kernels, kind, exact in ((fused, torch.bfloat16, torch.float32), (plain, torch.float64, torch.float64)):
        x = views(widths, *(buffer.to(kind) for buffer in inputs))
        grads = views(widths, *(torch.full_like(buffer, torch.nan, dtype=kind) for buffer in inputs))
        out = torch.full((rows, q_heads * widths[1]), torch.nan, device=device, dtype=kind)
        lse = torch.empty(q_heads, rows, device=device, dtype=exact)
        columns = torch.zeros(layout.tokens, heads[1], sum(widths), device=device, dtype=exact)
        own = torch.full((2, own_columns(7).start, q_heads, layout.counts[0]), 0.1, device=device, dtype=exact)
        left = own[:, own_columns(step)]
        kernels.attend(x, step, layout, out, lse)
        kernels.attend_backward(x, step, layout, out, lse, grad_out[first:last].to(kind), grads, columns, *left)
        kernels.own_backward(x, step, layout, grad_out.to(kind), grads, *own)
        made = [part[first:last] for part in (grads.query, grads.key, grads.value, grads.shared)]
        results.append([out, columns, left, *made])
    for found, expected in zip(*results, strict=True):
        assert float((found.double() - expected).norm()) <= 5e-3 * float(expected.norm())


def buffers(layout: RowLayout, heads: tuple[int, int], widths: tuple[int, int, int], make: Callable) -> list[Tensor]:
    """What projections would write: queries, keys beside values, and what keys share behind something else."""
    rows, tokens, (d, e, r) = layout.stacked, layout.tokens, widths
    return [make(rows, heads[0], d + r), make(rows + tokens, heads[1], d + e), make(rows + tokens, 8 + r)]


def views(widths: tuple[int, int, int], query: Tensor, columns: Tensor, shared: Tensor) -> HeadRows:
    key, value = columns.split(widths[:2], dim=2)
    return HeadRows(query, key, value, shared[:, 8:], query.shape[2] ** -0.5)


def layout_of(lengths: list[int], turns: bool) -> RowLayout:
    flags, ids = [], [np.zeros(length, dtype=np.int64) for length in lengths]
    for length in lengths:
        mask = np.zeros(length, dtype=bool)
        mask[length - length // 4 :] = True
        if turns:
            mask[length // 3 : length // 2] = True
        flags.append(supervised_slots(np.zeros(length, dtype=np.int64), mask, 7))
    rows = pack_rows(ids, flags, 7)
    bounds = torch.tensor(np.cumsum([0, *lengths]))
    batch = lay_out(rows, torch.zeros(sum(lengths), dtype=torch.int64), bounds)
    return RowLayout(batch.counts, batch.tokens, batch.indices.cuda(), batch.bounds_of, batch.pair_bounds, batch.seen)


@pytest.mark.parametrize("name", ["grouped queries", "latent attention"])
def test_new_lengths_compile_nothing(name: str) -> None:
    from eagle3.kernels import flash

    drafter = on_gpu(wide_drafter(**VARIANTS[name]))
    shape = drafter.shape

    def step(length: int) -> int:
        docs = [make_document(shape, [(length // 2, length)], length, length)]
        fused_step(drafter, docs, 3, dtype=torch.bfloat16).loss.backward()
        kernels = (flash._attend, flash._queries, flash._columns)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    before = [step(128), step(131)][-1]
    assert [step(length) for length in (77, 256, 1000, 333)] == [before] * 4


@pytest.mark.parametrize("name", ["grouped queries", "latent attention"])
def test_empty_and_unsupervised_batches_give_zero_gradients(name: str) -> None:
    drafter = on_gpu(wide_drafter(**VARIANTS[name]))
    for docs in ([], [make_document(drafter.shape, [], 90, 1)]):
        drafter.zero_grad(set_to_none=True)
        step = fused_step(drafter, docs, 3, dtype=torch.bfloat16)
        step.loss.backward()
        assert step.loss == 0
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in drafter.parameters())


def test_the_optimizer_equals_torch_and_renews_the_copies() -> None:
    from eagle3.compute_weights import ComputeWeights
    from eagle3.optimizers import ClippedAdamW

    generator = torch.Generator("cuda").manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(*size, generator=generator, device="cuda")) for size in ((300, 701), (77,))
    ]
    exact = [torch.nn.Parameter(weight.detach().double()) for weight in weights]
    copies = ComputeWeights([weights[:1]], torch.bfloat16)
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, theirs = ClippedAdamW(weights, copies, **options), torch.optim.AdamW(exact, **options)
    for _ in range(5):
        for mine, other in zip(weights, exact, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator, device="cuda")
            other.grad = mine.grad.double()
        norm = ours.clip_to(0.5)
        torch.testing.assert_close(norm.double(), torch.nn.utils.clip_grad_norm_(exact, 0.5), rtol=1e-6, atol=0)
        ours.step()
        theirs.step()
    for mine, other in zip(weights, exact, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-6)
    renewed = copies.joined[0].clone()
    assert torch.equal(copies.fresh()[0], renewed)
    assert torch.equal(renewed, weights[0].bfloat16())
    weights[0].data.mul_(2)
    with torch.no_grad():
        weights[0].mul_(2)
    assert torch.equal(copies.fresh()[0], weights[0].bfloat16())


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    from eagle3.optimizers import ClippedAdamW

    weight = torch.nn.Parameter(torch.ones(5000, device="cuda"))
    optimizer = ClippedAdamW([weight], lr=0.1)
    weight.grad = torch.full_like(weight, torch.inf)
    assert not torch.isfinite(optimizer.clip_to(0.5))
    optimizer.step()
    assert torch.equal(weight, torch.ones_like(weight))
    assert not optimizer.state[weight]["exp_avg"].any()


def test_batches_arrive_on_the_device_in_order_and_errors_in_their_place() -> None:
    from eagle3.prefetch import prefetched

    shape = make_shape()
    batches = [pack([make_document(shape, [(2, n)], n, n)], 3, with_layout=True) for n in (9, 12, 7, 30)]

    def read() -> Iterator[PackedBatch]:
        yield from batches
        raise OSError("the disk is gone")

    arrived = prefetched(read(), torch.device("cuda", torch.cuda.current_device()))
    for batch in batches:
        found = next(arrived)
        assert found.hidden_states.is_cuda
        assert torch.equal(found.hidden_states.cpu(), batch.hidden_states)
        assert found.layout is not None
        assert torch.equal(found.layout.indices.cpu(), batch.layout.indices)
    with pytest.raises(OSError, match="the disk is gone"):
        next(arrived)
