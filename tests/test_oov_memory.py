"""The remembered out-of-vocabulary test of the teacher gives the loss and gradients that the test itself gives."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.batches import PackedBatch
from eagle3.drafter import Eagle3Drafter
from eagle3.loss import UnrollLoss, unroll_loss
from eagle3.oov_memory import OovMemory
from tests.drafters import Teacher, make_document, make_drafter, make_shape, pack

STEPS = 3


def loss(drafter: Eagle3Drafter, batch: PackedBatch, outside: Tensor | None = None) -> UnrollLoss:
    teacher = Teacher(drafter.shape.vocab_size, drafter.shape.hidden_size).double()
    if outside is not None:
        teacher.weight = teacher.weight[drafter.target_ids]
    hidden = drafter.unroll(batch.input_ids, batch.hidden_states, batch.position_ids, batch.slots, batch.blocks)
    weights = 0.8 ** torch.arange(STEPS, dtype=torch.float64) / batch.row_counts.clamp_min(1)
    head, ids, known = drafter.lm_head.weight, drafter.target_ids, drafter.t2d
    return unroll_loss(
        *(hidden, head, batch.final_states, teacher, batch.slots, weights, ids, known),
        chunk_elements=300,
        outside=outside,
    )


def test_a_second_pass_equals_the_first_in_any_packing() -> None:
    drafter = make_drafter(make_shape(draft_vocab_size=15))
    known = drafter.t2d.numpy()
    documents = [make_document(drafter.shape, [(2, 12)], 14, 1), make_document(drafter.shape, [(1, 5), (7, 9)], 9, 2)]
    memory = OovMemory()
    for document in documents:
        batch = pack([document], STEPS, known)
        assert memory.recall(batch) is None
        memory.learn(batch, loss(drafter, batch))

    again = OovMemory()
    again.load_state_dict(memory.state_dict())
    batch = pack(documents[::-1], STEPS, known)
    outside = again.recall(batch)
    assert outside is not None
    first, second = loss(drafter, batch), loss(drafter, batch, outside)
    assert 0 < int(first.oov.sum()) < len(first.oov)
    assert torch.equal(first.oov, second.oov)
    assert torch.equal(first.hits, second.hits)
    torch.testing.assert_close(second.row_losses, first.row_losses)
    parameters = list(drafter.parameters())
    grads = [torch.autograd.grad(result.loss, parameters) for result in (first, second)]
    for here, there in zip(*grads, strict=True):
        torch.testing.assert_close(here, there)


def test_a_sample_with_other_supervision_is_asked_again() -> None:
    drafter = make_drafter(make_shape(draft_vocab_size=15))
    known = drafter.t2d.numpy()
    narrow, wide = (make_document(drafter.shape, [(start, 12)], 14, 1, in_vocab=1.0) for start in (8, 2))
    memory = OovMemory()
    batch = pack([narrow], STEPS, known)
    memory.learn(batch, loss(drafter, batch))
    assert memory.recall(batch) is not None
    assert memory.recall(pack([wide], STEPS, known)) is None
