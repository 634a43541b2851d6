"""Speculative decoding against a reference that recomputes everything, and counts made by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from eagle3.adapters.llama import LlamaAdapter
from eagle3.decoding import Acceptance, DrafterChain, LiveTarget, Recorder, Recording, decode, place
from eagle3.drafter import DrafterShape, Eagle3Drafter

LAYER_IDS = (1, 3, 4)
K = 3
PROMPT = [1, 40, 90, 17, 200, 31, 8, 120, 55]


@pytest.fixture(scope="module")
def model(tiny_target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def live(model):
    return LiveTarget(model, LlamaAdapter(), LAYER_IDS)


@pytest.fixture(scope="module")
def drafter(model):
    embedding = model.get_input_embeddings().weight.detach()
    vocab, hidden = embedding.shape
    shape = DrafterShape(
        hidden_size=hidden,
        target_hidden_size=hidden,
        layer_ids=LAYER_IDS,
        vocab_size=vocab,
        draft_vocab_size=150,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=1024,
        attention="dense",
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        hidden_act="silu",
    )
    torch.manual_seed(0)
    drafter = Eagle3Drafter(shape, embedding)
    target_ids = torch.randperm(vocab)[:150].sort().values
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if parameter.dim() == 1 else 0))
        drafter.d2t.copy_(target_ids - torch.arange(150))
        drafter.t2d.copy_(torch.zeros(vocab, dtype=torch.bool).index_fill(0, target_ids, True))
    return drafter.eval()


class Script:
    """Proposes the given text, spoilt at the given places of each round in turn; notes what `watched` would propose."""

    def __init__(self, text, prompt, rights, watched=None):
        self.text, self.prompt, self.rights, self.watched = text, prompt, rights, watched
        self.proposals = []

    def start(self):
        self.round = 0
        if self.watched:
            self.watched.start()

    def propose(self, text, states, k):
        if self.watched:
            self.proposals.append((list(text), self.watched.propose(text, states, k)))
        right = self.rights[self.round % len(self.rights)]
        self.round += 1
        drafts = [*self.text[len(text) : len(text) + k], *[0] * k][:k]
        return [token if i < right else (token + 1) % 100 for i, token in enumerate(drafts)]


def scripted(text, prompt_length):
    """A target that writes `text`."""
    return Recording(text, torch.zeros(len(text), 1)), text[:prompt_length]


# What follows recomputes EAGLE-3 drafting from the paper's definition, column by column, without any cache.


def rms(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, positions, theta=10000.0):
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def reference_layer(w, ids, features, positions):
    """One drafter layer over all columns at once, plain causal; returns g [T, H]."""
    x = torch.cat(
        [
            rms(w["embedding"][ids], w["midlayer.input_layernorm.weight"]),
            rms(features, w["midlayer.hidden_norm.weight"]),
        ],
        -1,
    )
    q, k, v = ((x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 12)) for name in ("q", "k", "v"))
    q, k = rotate(q, positions), rotate(k, positions)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 12**0.5
    scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
    h = (
        features
        + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
    )
    y = rms(h, w["midlayer.post_attention_layernorm.weight"])
    mlp = F.silu(y @ w["midlayer.mlp.gate_proj.weight"].T) * (y @ w["midlayer.mlp.up_proj.weight"].T)
    return h + mlp @ w["midlayer.mlp.down_proj.weight"].T


def reference_drafts(model, drafter, text, k):
    w = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in drafter.state_dict().items()
    }
    w["embedding"] = model.get_input_embeddings().weight.detach().double()
    with torch.no_grad():
        hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    states = torch.cat([hidden[i][0] for i in LAYER_IDS], -1).double()
    features, ids, drafts = states @ w["fc.weight"].T, list(text[1:]), []
    for _ in range(k):
        g = reference_layer(w, torch.tensor(ids), features, torch.arange(len(ids)).double())
        logits = rms(g[-1], w["norm.weight"]) @ w["lm_head.weight"].T
        best = int(logits.argmax())
        drafts.append(best + int(w["d2t"][best]))
        features, ids = torch.cat([features, g[-1:]]), [*ids, drafts[-1]]
    return drafts


def plain_ids(model, count):
    with torch.no_grad():
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0].tolist()


@pytest.fixture(scope="module")
def text(model):
    return plain_ids(model, 60)


def test_plain_decoding_equals_greedy_generate(live, text):
    decoded = decode(live, PROMPT, max_new_tokens=60, stop_ids=())
    assert [*PROMPT, *decoded.token_ids] == text
    assert decoded.finish == "length"
    assert decoded.accepted == ()


def test_drafts_equal_a_reference_without_caches_whatever_was_accepted(model, live, drafter, text):
    script = Script(text, PROMPT, rights=[2, 0, 3, 1, 3, 3, 0], watched=DrafterChain(drafter))
    decoded = decode(live, PROMPT, max_new_tokens=24, stop_ids=(), proposer=script, k=K)
    assert decoded.token_ids == text[len(PROMPT) : len(PROMPT) + 24]
    assert set(decoded.accepted) == {0, 1, 2, 3}
    for known, drafts in script.proposals:
        assert drafts == reference_drafts(model, drafter, known, K)
    assert len({tuple(drafts) for _, drafts in script.proposals}) > 3


def test_text_is_the_targets_own_whoever_drafts(live, drafter, text):
    perfect = Script(text, PROMPT, rights=[K])
    for proposer in (DrafterChain(drafter), perfect, Script(text, PROMPT, rights=[0, 1])):
        decoded = decode(live, PROMPT, max_new_tokens=40, stop_ids=(), proposer=proposer, k=K)
        assert decoded.token_ids == text[len(PROMPT) : len(PROMPT) + 40]
    decoded = decode(live, PROMPT, max_new_tokens=40, stop_ids=(), proposer=perfect, k=K)
    assert decoded.acceptance.acceptance_length == K + 1


@pytest.mark.parametrize("stop_ids", [(), "one of the text"])
def test_a_recording_gives_the_acceptance_of_the_live_target(live, drafter, text, stop_ids):
    stops = {text[len(PROMPT) + 13]} if stop_ids else set()
    recorder = Recorder(live)
    plain = decode(recorder, PROMPT, max_new_tokens=33, stop_ids=stops)
    recording = recorder.recording(K)
    for proposer in (DrafterChain(drafter), Script(text, PROMPT, rights=[3, 1, 2]), Script(text, PROMPT, rights=[3])):
        expected = decode(live, PROMPT, max_new_tokens=33, stop_ids=stops, proposer=proposer, k=K)
        replayed = decode(recording, PROMPT, max_new_tokens=33, stop_ids=stops, proposer=proposer, k=K)
        assert replayed.accepted == expected.accepted
        assert replayed.token_ids == expected.token_ids == plain.token_ids


def test_states_are_the_models_own_at_the_layers_doors(model, live, text):
    with torch.no_grad():
        hidden = model(torch.tensor([text[:20]]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[i][0] for i in LAYER_IDS], -1)
    with torch.inference_mode():
        _, prompt_states = live.start(text[:10])
        live.verify([3, 4, 5, 6])
        live.keep(10)
        answers, states = live.verify(text[10:20])
    torch.testing.assert_close(torch.cat([prompt_states, states]), expected, rtol=1e-4, atol=1e-4)
    assert answers == text[11:21]


def test_a_drafter_in_bfloat16_keeps_its_rotary_table(live, drafter, text):
    placed = place(copy.deepcopy(drafter), torch.device("cpu"), torch.bfloat16)
    assert placed.dtype == torch.bfloat16
    assert torch.equal(placed.rotary.frequencies, drafter.rotary.frequencies)
    decoded = decode(live, PROMPT, max_new_tokens=12, stop_ids=(), proposer=DrafterChain(placed), k=K)
    assert decoded.token_ids == text[len(PROMPT) : len(PROMPT) + 12]


def test_v4_two_right_then_wrong_is_exactly_three():
    target, prompt = scripted(list(range(50)), 5)
    decoded = decode(target, prompt, max_new_tokens=31, stop_ids=(), proposer=Script(range(50), prompt, [2]), k=K)
    assert decoded.accepted == (2,) * 10
    assert decoded.acceptance.acceptance_length == 3.0
    assert decoded.acceptance.conditional == [1.0, 1.0, 0.0]


def test_a_stop_token_inside_the_drafts_ends_the_text_but_the_round_counts_in_full():
    # The prefill writes 5; round 1 drafts 6 7 8, all right, and the target adds 9; 7 is the stop token.
    target, prompt = scripted(list(range(50)), 5)
    decoded = decode(target, prompt, max_new_tokens=20, stop_ids={7}, proposer=Script(range(50), prompt, [3]), k=K)
    assert decoded.token_ids == [5, 6, 7]
    assert decoded.finish == "stop"
    assert decoded.accepted == (3,)


def test_a_round_that_passes_max_new_tokens_counts_in_full():
    # 1 token by the prefill, 4 by round 1, 4 by round 2: 9 tokens, of which 7 were asked for.
    target, prompt = scripted(list(range(50)), 5)
    decoded = decode(target, prompt, max_new_tokens=7, stop_ids={40}, proposer=Script(range(50), prompt, [3]), k=K)
    assert decoded.token_ids == [5, 6, 7, 8, 9, 10, 11]
    assert decoded.finish == "length"
    assert decoded.accepted == (3, 3)


def test_a_stop_token_beyond_max_new_tokens_is_not_reached():
    target, prompt = scripted(list(range(50)), 5)
    decoded = decode(target, prompt, max_new_tokens=2, stop_ids={7}, proposer=Script(range(50), prompt, [3]), k=K)
    assert (decoded.token_ids, decoded.finish) == ([5, 6], "length")


def test_an_answer_of_one_token_has_no_round():
    target, prompt = scripted(list(range(50)), 5)
    decoded = decode(target, prompt, max_new_tokens=20, stop_ids={5}, proposer=Script(range(50), prompt, [3]), k=K)
    assert (decoded.token_ids, decoded.finish, decoded.accepted) == ([5], "stop", ())
    assert decoded.acceptance.acceptance_length is None


def test_v5_conditional_and_unconditional_acceptance_by_hand():
    acceptance = Acceptance.of([0, 1, 1, 3, 3, 2, 0, 3], k=3)
    assert acceptance.reached == (8, 6, 4, 3)
    assert acceptance.conditional == [6 / 8, 4 / 6, 3 / 4]
    assert acceptance.unconditional == [6 / 8, 4 / 8, 3 / 8]
    assert acceptance.acceptance_length == pytest.approx(1 + sum(rate or 0 for rate in acceptance.unconditional))
    assert acceptance.accepted_drafts == 13 / 8
