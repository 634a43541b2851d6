"""The chunked loss against logits written out in full, and its rows by hand. (Gradients: test_drafter.)"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle3.errors import RequestError
from eagle3.loss import LOSSES, mix_losses, mix_weights, soft_cross_entropy, unroll_loss
from tests.drafters import Teacher, make_document, make_drafter, make_shape, pack, train_step


def test_chunk_size_changes_nothing() -> None:
    drafter = make_drafter(make_shape(draft_vocab_size=15))
    docs = [make_document(drafter.shape, [(2, 12)], 14, 1), make_document(drafter.shape, [(1, 5), (7, 9)], 9, 2)]
    whole = train_step(drafter, docs, 3, chunk_elements=1 << 20)
    (grads_whole,) = torch.autograd.grad(whole.loss, [drafter.lm_head.weight])
    for elements in (1, 150, 500):
        cut = train_step(drafter, docs, 3, chunk_elements=elements)
        torch.testing.assert_close(cut.loss, whole.loss)
        torch.testing.assert_close(cut.row_losses, whole.row_losses)
        assert torch.equal(cut.hits, whole.hits)
        assert torch.equal(cut.oov, whole.oov)
        torch.testing.assert_close(torch.autograd.grad(cut.loss, [drafter.lm_head.weight])[0], grads_whole)


def test_a_hit_is_the_text_token_over_the_full_vocabulary() -> None:
    """A head whose logits are all equal always drafts its first token: that hits exactly where the text has the target
    token that this draft id stands for."""
    drafter = make_drafter(make_shape(draft_vocab_size=15))
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
    document = make_document(drafter.shape, [(2, 20)], 20, 4)
    document.input_ids[[5, 11]] = int(drafter.to_target(torch.tensor(0)))
    result = train_step(drafter, [document], 1)
    first = int(drafter.to_target(torch.tensor(0)))
    assert result.hits.tolist() == [int(token) == first for token in document.input_ids[3:20]]
    assert 2 <= int(result.hits.sum()) < 10


def test_teacher_is_the_final_state_of_the_token_before_the_prediction() -> None:
    """T4, T1: slot t at step k learns from the target's logits after token t+1+k, and from no other row."""
    drafter = make_drafter(make_shape())
    document = make_document(drafter.shape, [(3, 9)], 12, 1)
    base = train_step(drafter, [document], 2)
    for token in range(12):
        states = document.final_states.clone()
        states[token] += 1.0
        changed = train_step(drafter, [type(document)(document.sample_id, document.input_ids, document.loss_mask,
                                                      document.hidden_states, states)], 2)  # fmt: skip
        moved = (changed.row_losses - base.row_losses).abs() > 1e-12
        # Rows: slots 2 … 6 at step 0, then 2 … 5 at step 1.
        expected = [t + 1 == token for t in range(2, 7)] + [t + 2 == token for t in range(2, 6)]
        assert moved.tolist() == expected


def test_losses_are_zero_or_entropy_when_drafter_and_teacher_agree() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_q, p = torch.log_softmax(logits, -1), torch.softmax(logits, -1)
    for name in ("reverse_kl", "total_variation", "lk"):
        torch.testing.assert_close(LOSSES[name](log_q, p), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(soft_cross_entropy(log_q, p), -(p * p.log()).sum(-1))


def test_losses_stay_finite_where_probabilities_vanish() -> None:
    log_q = torch.log_softmax(torch.tensor([[300.0, 0.0, -300.0]]), -1).requires_grad_()
    p = torch.softmax(torch.tensor([[-300.0, 0.0, 300.0]]), -1)
    for name, loss in LOSSES.items():
        value = loss(log_q, p)
        (grad,) = torch.autograd.grad(value.sum(), log_q)
        assert torch.isfinite(value).all(), name
        assert torch.isfinite(grad).all(), name


def test_losses_mix_by_weight() -> None:
    log_q = torch.log_softmax(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), -1)
    p = torch.softmax(torch.randn(3, 5, generator=torch.Generator().manual_seed(1)), -1)
    mixed = mix_losses({"soft_cross_entropy": 0.5, "lk": 2.0, "reverse_kl": 0.0})
    torch.testing.assert_close(
        mixed(log_q, p), 0.5 * LOSSES["soft_cross_entropy"](log_q, p) + 2 * LOSSES["lk"](log_q, p)
    )
    assert mix_losses({}) is soft_cross_entropy
    assert mix_weights({}) == (1.0, 0.0, 0.0, 0.0)
    assert mix_weights({"soft_cross_entropy": 0.0, "lk": 2.0}) == (0.0, 0.0, 0.0, 2.0)
    with pytest.raises(RequestError, match=r"drafter\.losses: found \['hinge'\], expected names among .*lk"):
        mix_losses({"hinge": 1.0})


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"soft_cross_entropy": 0.0, "lk": 0.0}, r"drafter\.losses: found \{.*\}, expected a weight above 0"),
        ({"soft_cross_entropy": 1.0, "lk": -1.0}, r"drafter\.losses\.lk: found -1\.0, expected a finite weight"),
        ({"lk": math.inf}, r"drafter\.losses\.lk: found inf, expected a finite weight"),
        ({"lk": math.nan}, r"drafter\.losses\.lk: found nan, expected a finite weight"),
    ],
)
def test_weights_that_make_no_loss_are_refused(weights: dict[str, float], words: str) -> None:
    for mix in (mix_losses, mix_weights):
        with pytest.raises(RequestError, match=words):
            mix(weights)


def test_unknown_oov_rule_is_refused() -> None:
    drafter = make_drafter(make_shape())
    with pytest.raises(RequestError, match=r"drafter\.oov: found 'drop'"):
        train_step(drafter, [make_document(drafter.shape, [(1, 5)], 6, 1)], 1, oov="drop")


def test_no_supervised_row_gives_zero_loss_and_zero_gradients() -> None:
    """T9: nothing is NaN, and every parameter has a (zero) gradient."""
    drafter = make_drafter(make_shape(draft_vocab_size=15), dtype=torch.float32)
    result = train_step(drafter, [make_document(drafter.shape, [], 6, 1)], 3)
    assert float(result.loss.detach()) == 0.0
    result.loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_validation_computes_no_gradients() -> None:
    drafter = make_drafter(make_shape())
    docs = [make_document(drafter.shape, [(1, 9)], 9, 1)]
    with torch.no_grad():
        quiet = train_step(drafter, docs, 2)
    assert not quiet.loss.requires_grad
    torch.testing.assert_close(quiet.loss, train_step(drafter, docs, 2).loss.detach())


def test_no_full_logits_tensor_is_alive() -> None:
    """The largest tensor that the loss makes stays within the chunk: here 64 pairs of 4096 teacher logits at most."""
    rows, vocab, width = 512, 4096, 8
    sizes = {"hidden_size": width, "target_hidden_size": width, "vocab_size": vocab, "draft_vocab_size": vocab}
    drafter = make_drafter(make_shape(**sizes, num_attention_heads=2, num_key_value_heads=2), dtype=torch.float32)
    document = make_document(drafter.shape, [(1, rows)], rows, 1)
    seen: list[int] = []

    def watch(name: str):
        def loss(log_q: Tensor, p: Tensor) -> Tensor:
            seen.append(max(log_q.numel(), p.numel()))
            return LOSSES[name](log_q, p)

        return loss

    train_step(drafter, [document], 2, row_loss=watch("soft_cross_entropy"), chunk_elements=64 * vocab)
    assert sum(seen) >= 2 * (rows - 3) * vocab
    assert max(seen) <= 64 * vocab


def test_under_autocast_products_run_in_bfloat16_and_the_softmax_in_float32() -> None:
    drafter = make_drafter(make_shape(draft_vocab_size=15), dtype=torch.float32)
    docs = [make_document(drafter.shape, [(1, 14)], 16, 1, in_vocab=1.0)]
    exact = train_step(drafter, docs, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = train_step(drafter, docs, 2)
    assert rough.row_losses.dtype == torch.float32
    assert rough.loss != exact.loss
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.1, atol=0.1)
    rough.loss.backward()
    assert drafter.lm_head.weight.grad is not None
    assert drafter.lm_head.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("step", "slots"), [(0, [3, 4, 5, 8, 9]), (1, [3, 4, 8]), (2, [3])])
def test_gradient_flows_only_into_supervised_rows(step: int, slots: list[int]) -> None:
    """T1: answers at [4, 8) and [9, 12) of 14 tokens, the supervised slots of each step counted by hand. A step's loss
    reaches just these outputs, and through attention the states of their columns and of those before, of none after."""
    drafter = make_drafter(make_shape())
    document = make_document(drafter.shape, [(4, 8), (9, 12)], 14, 1)
    states = torch.cat(list(document.hidden_states), -1).requires_grad_()
    batch = pack([document], 3)
    hidden = drafter.unroll(batch.input_ids, states, batch.position_ids, batch.slots, batch.blocks)
    hidden.retain_grad()
    teacher = Teacher(23, 16).double()
    weights = torch.zeros(3, dtype=torch.float64)
    weights[step] = 1 / batch.row_counts[step]
    unroll_loss(hidden, drafter.lm_head.weight, batch.final_states, teacher, batch.slots, weights).loss.backward()
    assert batch.row_counts.tolist() == [5, 3, 1]
    assert hidden.grad is not None
    assert states.grad is not None
    rows = (hidden.grad.abs().amax(-1) > 0).split([5, 3, 1])
    assert [bool(part.all()) for part in rows] == [bool(part.any()) for part in rows] == [k == step for k in range(3)]
    assert batch.slots.supervised_rows[step].tolist() == slots
    assert (states.grad.abs().amax(-1) > 0).tolist() == [t <= max(slots) for t in range(14)]
