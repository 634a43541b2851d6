"""The drafter against the float64 double loop, against itself while decoding, and on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from eagle3 import loss
from eagle3.drafter import DrafterShape, Eagle3Drafter, load_drafter, save_drafter
from eagle3.errors import RequestError, StoreError
from eagle3.latent_attention import softmax_factor
from eagle3.rotary import rope_frequencies
from tests import reference
from tests.drafters import MLA, Teacher, make_document, make_drafter, make_shape, pack, train_step

REDUCED = {"draft_vocab_size": 15}
VARIANTS = {
    "dense": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "reduced vocabulary": REDUCED,
    "two states": {"layer_ids": (0, 4)},
    "four states": {"layer_ids": (0, 1, 2, 5), **REDUCED},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each state": {"fc_norm": True},
    "normed output": {"norm_output": True},
    "all norms": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
        **REDUCED,
    },
    "other head width": {"head_dim": 6, "num_key_value_heads": 2},
    "latent attention": MLA,
    "latent attention, all norms": {
        **MLA,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        **REDUCED,
    },
}


def documents(shape: DrafterShape) -> list:
    """Several documents; one has two turns, one is answered from its first token on, one has no supervised token."""
    return [
        make_document(shape, [(3, 8), (10, 14)], 16, 1),
        make_document(shape, [(0, 6)], 8, 2),
        make_document(shape, [], 4, 3),
        make_document(shape, [(2, 12)], 12, 4),
    ]


def referenced(drafter: Eagle3Drafter, docs: list, steps: int, oov: str = "mask", **kwargs) -> reference.Result:
    shape = drafter.shape
    teacher = Teacher(shape.vocab_size, shape.hidden_size).double()
    weights = dict(drafter.named_parameters())
    ids = drafter.target_ids if drafter.target_ids is not None else torch.arange(shape.vocab_size)
    return reference.unroll(
        weights,
        shape,
        drafter.embedding,
        [
            reference.Document(
                d.input_ids.tolist(), d.loss_mask.tolist(), torch.cat(list(d.hidden_states), -1), d.final_states
            )
            for d in docs
        ],
        teacher,
        ids.tolist(),
        steps,
        0.8,
        oov,
        **kwargs,
    )


def gradients(drafter: Eagle3Drafter, loss_value: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss_value.backward()
    return {
        name: parameter.grad.clone() for name, parameter in drafter.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_every_gradient_equal_the_double_loop(name: str) -> None:
    drafter = make_drafter(make_shape(**VARIANTS[name]))
    docs = documents(drafter.shape)
    ours = train_step(drafter, docs, steps=4)
    mine = gradients(drafter, ours.loss)
    expected = referenced(drafter, docs, steps=4)
    theirs = gradients(drafter, expected.loss)
    torch.testing.assert_close(ours.loss, expected.loss)
    assert len(ours.hits) == len(expected.rows)
    assert int(ours.oov.sum()) == len(expected.oov)
    assert (drafter.target_ids is None) == (not expected.oov)
    assert mine.keys() == theirs.keys() == dict(drafter.named_parameters()).keys()
    for parameter, grad in mine.items():
        assert grad.abs().max() > 0, parameter
        torch.testing.assert_close(grad, theirs[parameter], msg=lambda text, p=parameter: f"{p}: {text}")


def test_activations_that_are_made_again_take_less_memory_and_give_the_same() -> None:
    """Bit for bit; of an output row, the MLP's 24 inner values are kept four times over, or not at all."""
    drafter = make_drafter(make_shape())
    docs = documents(drafter.shape)
    weights = {parameter.data_ptr() for parameter in drafter.parameters()}

    def trained() -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = train_step(drafter, docs, steps=4)
        numbers = sum(tensor.numel() for pointer, tensor in kept.items() if pointer not in weights)
        return numbers, result.loss, gradients(drafter, result.loss)

    plain, loss_value, mine = trained()
    drafter.midlayer.recompute = True
    recomputed, again, theirs = trained()
    rows = sum(len(rows) for rows in pack(docs, 4).slots.rows)
    assert plain - recomputed == 4 * 24 * rows
    assert torch.equal(again, loss_value)
    assert all(torch.equal(grad, theirs[name]) for name, grad in mine.items())


def test_rows_outside_the_draft_vocabulary_keep_their_loss_when_asked() -> None:
    """T7: oov=keep trains on the renormalised distribution, oov=mask gives these rows no weight.

    Where every teacher's choice is inside, both are the same.
    """
    drafter = make_drafter(make_shape(**REDUCED))
    docs = documents(drafter.shape)
    kept, masked = train_step(drafter, docs, steps=3, oov="keep"), train_step(drafter, docs, steps=3)
    torch.testing.assert_close(kept.loss, referenced(drafter, docs, 3, "keep").loss)
    assert masked.oov.any()
    assert masked.loss < kept.loss
    assert (masked.row_losses[masked.oov] == 0).all()
    assert torch.equal(masked.oov, kept.oov)
    assert not masked.hits[masked.oov & (masked.row_losses != 0)].any()
    assert drafter.target_ids is not None
    inside = [final for d in docs for final in d.final_states if drafter.t2d[choice(final)]]
    docs = [dataclasses.replace(d, final_states=torch.stack(inside)[: len(d.input_ids)]) for d in docs]
    kept, masked = train_step(drafter, docs, steps=3, oov="keep"), train_step(drafter, docs, steps=3)
    assert not masked.oov.any()
    assert torch.equal(masked.row_losses, kept.row_losses)
    assert torch.equal(masked.loss, kept.loss)


def choice(final_state: torch.Tensor) -> int:
    """The token that the teacher of `train_step` finds likeliest."""
    return int(Teacher(23, 16).double()(final_state).argmax())


@pytest.mark.parametrize("name", ["reverse_kl", "total_variation", "lk"])
def test_other_losses_equal_the_double_loop(name: str) -> None:
    def written_out(draft: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        q, p = torch.softmax(draft, 0), torch.softmax(teacher, 0)
        if name == "reverse_kl":
            return sum(q[i] * (q[i].log() - p[i].log()) for i in range(len(q)))
        if name == "total_variation":
            return sum((p[i] - q[i]).abs() for i in range(len(q))) / 2
        return -sum(torch.minimum(p[i], q[i]) for i in range(len(q))).log()

    drafter = make_drafter(make_shape(**REDUCED))
    docs = documents(drafter.shape)[:2]
    ours = train_step(drafter, docs, steps=2, row_loss=loss.LOSSES[name])
    expected = referenced(drafter, docs, 2, row_loss=written_out)
    torch.testing.assert_close(ours.loss, expected.loss)
    mine, theirs = gradients(drafter, ours.loss), gradients(drafter, expected.loss)
    for parameter in mine:
        torch.testing.assert_close(mine[parameter], theirs[parameter])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_scaled_rope_equals_the_double_loop(scaling: dict) -> None:
    shape = make_shape(rope_scaling=scaling, head_dim=8)
    drafter = make_drafter(shape)
    frequencies, factor = rope_frequencies(shape)
    assert not torch.equal(frequencies, rope_frequencies(dataclasses.replace(shape, rope_scaling=None))[0])
    docs = documents(shape)[:2]
    expected = referenced(drafter, docs, 2, frequencies=frequencies.double(), rope_factor=factor)
    torch.testing.assert_close(train_step(drafter, docs, steps=2).loss, expected.loss)


def test_yarn_for_latent_attention_equals_the_double_loop_and_transformers() -> None:
    """Kimi's form: `mscale` and `mscale_all_dim` cancel in cos and sin and come back, squared, in the softmax."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    scaling = {
        "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    shape = make_shape(**MLA, rope_scaling=scaling)
    theirs = DeepseekV3Attention(
        DeepseekV3Config(
            **{name: getattr(shape, name) for name in MLA if name not in ("attention", "head_dim")},
            hidden_size=shape.hidden_size,
            num_attention_heads=4,
            rope_parameters={**scaling, "rope_theta": shape.rope_theta},
            max_position_embeddings=4096,
        ),
        layer_idx=0,
    )
    assert softmax_factor(shape) / 10**0.5 == pytest.approx(theirs.scaling)
    drafter = make_drafter(shape)
    frequencies, factor = rope_frequencies(shape)
    assert len(frequencies) == 2
    assert factor == 1.0
    docs = documents(shape)[:2]
    expected = referenced(drafter, docs, 2, frequencies=frequencies.double(), softmax_factor=theirs.scaling * 10**0.5)
    torch.testing.assert_close(train_step(drafter, docs, steps=2).loss, expected.loss)


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(RequestError, match=r"rope_scaling .*spiral"):
        make_drafter(make_shape(rope_scaling={"rope_type": "spiral", "factor": 2.0}))


def test_packed_equals_unpacked() -> None:
    drafter = make_drafter(make_shape(num_key_value_heads=2))
    docs = documents(drafter.shape)
    packed = train_step(drafter, docs, steps=3)
    mine = gradients(drafter, packed.loss)
    whole = pack(docs, 3).row_counts.tolist()
    parts = [train_step(drafter, [document], steps=3, row_counts=whole).loss for document in docs]
    theirs = gradients(drafter, torch.stack(parts).sum())
    torch.testing.assert_close(packed.loss, torch.stack(parts).sum())
    for parameter, grad in mine.items():
        torch.testing.assert_close(grad, theirs[parameter])


@pytest.mark.parametrize("name", ["dense", "grouped queries", "normed output", "all norms", "latent attention"])
def test_decoding_with_a_cache_equals_the_unroll(name: str) -> None:
    """T5: three drafting steps from every slot; the head sees the normed output, the next step the un-normed one
    (or the normed one where `norm_output` says so)."""
    drafter = make_drafter(make_shape(**VARIANTS[name]))
    document = make_document(drafter.shape, [(1, 12)], 12, 7, in_vocab=1.0)
    expected = referenced(drafter, [document], 3)
    ids = torch.from_numpy(document.input_ids)
    features = drafter.fuse(torch.cat(list(document.hidden_states), -1))
    for t in range(8):
        cache = drafter.new_cache()
        ids_read, state, positions = ids[1 : t + 2], features[: t + 1], torch.arange(t + 1)
        for k in range(3):
            g, logits = drafter.extend(cache, ids_read, state, positions)
            torch.testing.assert_close(logits[-1], expected.logits[0, t, k])
            assert cache.length == t + 1 + k
            ids_read, state, positions = ids[t + 2 + k][None], g[-1:], torch.tensor([t + k + 1])
        cache.truncate(t)
        assert cache.length == t
        _, again = drafter.extend(cache, ids[t + 1][None], features[t][None], torch.tensor([t]))
        torch.testing.assert_close(again[0], expected.logits[0, t, 0])


def test_columns_appended_together_equal_columns_appended_one_by_one() -> None:
    drafter = make_drafter(make_shape())
    ids, features = torch.arange(6), torch.randn(6, 16, dtype=torch.float64)
    _, together = drafter.extend(drafter.new_cache(), ids, features, torch.arange(6))
    cache = drafter.new_cache()
    apart = [drafter.extend(cache, ids[i][None], features[i][None], torch.tensor([i]))[1] for i in range(6)]
    torch.testing.assert_close(together, torch.cat(apart))


def test_draft_ids_map_to_target_ids() -> None:
    drafter = make_drafter(make_shape(**REDUCED))
    target_ids = drafter.target_ids
    assert target_ids is not None
    assert torch.equal(drafter.to_target(torch.arange(15)), target_ids)
    assert drafter.t2d[target_ids].all()
    assert int(drafter.t2d.sum()) == 15
    assert make_drafter(make_shape()).target_ids is None


def test_saved_drafter_loads_bit_equal(tmp_path: Path) -> None:
    drafter = make_drafter(make_shape(**VARIANTS["all norms"]), dtype=torch.float32)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path, drafter.embedding)
    assert loaded.shape == drafter.shape
    state = loaded.state_dict()
    assert "embedding" not in state
    assert {
        "d2t",
        "t2d",
        "fc.weight",
        "midlayer.self_attn.q_proj.weight",
        "input_norm.weight",
        "fc_norm.2.weight",
    } <= set(state)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_torn_or_foreign_drafter_files_are_named(tmp_path: Path) -> None:
    drafter = make_drafter(make_shape(), dtype=torch.float32)
    with pytest.raises(StoreError, match=r"drafter\.safetensors: expected a drafter's weights"):
        load_drafter(tmp_path, drafter.embedding)
    path = save_drafter(drafter, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=r"drafter\.safetensors"):
        load_drafter(tmp_path, drafter.embedding)
    path.write_bytes(whole)
    with pytest.raises(RequestError, match="expected the target's"):
        load_drafter(tmp_path, drafter.embedding[:-1])
    other = Eagle3Drafter(make_shape(fc_norm=True), drafter.embedding)
    other.shape = drafter.shape
    save_drafter(other, tmp_path)
    with pytest.raises(StoreError, match=r"fc_norm"):
        load_drafter(tmp_path, drafter.embedding)
