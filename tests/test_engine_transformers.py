"""The transformers engine against Hugging Face itself: captured states, greedy and sampled continuations."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.adapters.llama import LlamaAdapter
from eagle3.checkpoint import open_target
from eagle3.config import HardwareConfig
from eagle3.decoding import LiveTarget, decode
from eagle3.engines import Generation, Prompt, compute_dtype, expected_tokens_per_s, generation, open_engine
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import RequestError
from eagle3.tokens import Sample
from tests.conftest import random_samples, target_config, write_target

LENGTHS = [5, 30, 12, 100, 64, 7, 9, 1]
STOPS = [2, 17, 50, 80, 90, 100]
SMALL: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "MistralForCausalLM": ("llama.LlamaAdapter", {"sliding_window": None}),
    "Qwen2ForCausalLM": ("qwen.QwenAdapter", {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("qwen.QwenAdapter", {"head_dim": 16}),
    "Qwen3MoeForCausalLM": (
        "qwen.QwenAdapter",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "DeepseekV3ForCausalLM": ("deepseek_v3.DeepseekV3Adapter", LATENT),
    # As V2-Lite is: queries without a latent.
    "DeepseekV2ForCausalLM": ("deepseek_v3.DeepseekV3Adapter", {**LATENT, "q_lora_rank": None}),
    "GptOssForCausalLM": (
        "gpt_oss.GptOssAdapter",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
}


def engine_of(folder: Path, adapter: str = "llama.LlamaAdapter", **hardware: Any) -> TransformersEngine:
    cfg = target_config(folder, adapter=adapter)
    cfg = dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, **hardware))
    engine = open_engine(cfg, open_target(cfg))
    assert isinstance(engine, TransformersEngine)
    return engine


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> Iterator[TransformersEngine]:
    with engine_of(tiny_target) as opened:
        yield opened


def save_family(architecture: str, folder: Path) -> TransformersEngine:
    """A tiny random checkpoint of another family, opened."""
    import transformers

    adapter, special = FAMILIES[architecture]
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = model_class(model_class.config_class(**{**SMALL, **special})).float()
    model.save_pretrained(folder)
    return engine_of(folder, adapter)


def reference_states(model: Any, sample: Sample) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Hugging Face's own hidden states [T, H] (embedding first, the last one after the norm) and logits [T, V]."""
    with torch.no_grad():
        output = model(torch.as_tensor(sample.input_ids).long()[None], output_hidden_states=True)
    return tuple(state[0] for state in output.hidden_states), output.logits[0]


def check_states(engine: TransformersEngine, samples: Sequence[Sample], layer_ids: Sequence[int]) -> int:
    """Every sample's states are Hugging Face's at index = id; the final one, normed, is its last; returns how many."""
    count = 0
    head, by_id = engine.target.teacher_head(), {sample.id: sample for sample in samples}
    final = engine.target.shape.num_layers
    for caught in engine.capture(samples, layer_ids):
        sample = by_id[caught.sample_id]
        expected, logits = reference_states(engine.model, sample)
        assert set(caught.states) == set(layer_ids)
        for k, state in caught.states.items():
            assert state.shape == (len(sample.input_ids), engine.target.shape.hidden_size)
            assert state.is_contiguous()
            if k < final:
                torch.testing.assert_close(state, expected[k], rtol=1e-4, atol=1e-4)
            else:
                torch.testing.assert_close(head.normed(state), expected[final], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(head(state), logits, rtol=1e-4, atol=1e-4)
                assert torch.equal(head(state).argmax(-1), logits.argmax(-1))
        count += 1
    return count


@pytest.mark.parametrize("batch_tokens", [1, 256, 4096])
def test_states_are_the_models_own_at_any_batch_size(engine: TransformersEngine, batch_tokens: int):
    """E1, T4: batch 1 (each sample alone), several batches, one batch: rows of the right sample, padding nowhere."""
    engine.hardware = dataclasses.replace(engine.hardware, batch_tokens=batch_tokens)
    samples = random_samples(LENGTHS)
    assert check_states(engine, samples, [0, 1, 3, 6]) == len(samples)


def test_order_and_repetition_change_nothing(engine: TransformersEngine):
    """E1: shuffled, and called again, each sample has the same states: nothing leaks between calls."""
    engine.hardware = dataclasses.replace(engine.hardware, batch_tokens=256)
    samples = random_samples(LENGTHS, seed=3)
    shuffled = random.Random(0).sample(samples, len(samples))
    first, again, third = (
        {caught.sample_id: caught.states for caught in engine.capture(order, [2, 6])}
        for order in (samples, shuffled, samples)
    )
    for sample in samples:
        for k in (2, 6):
            torch.testing.assert_close(first[sample.id][k], again[sample.id][k], rtol=1e-4, atol=1e-4)
            assert torch.equal(first[sample.id][k], third[sample.id][k])


def test_two_samples_with_a_shared_start_both_have_all_rows(engine: TransformersEngine):
    """E2: a shared prefix is computed for each sample, not served from a cache."""
    one, other = random_samples([90, 90], seed=5)
    other.input_ids[:80] = one.input_ids[:80]
    assert check_states(engine, [one, other], [3, 6]) == 2


def test_the_forward_ends_behind_the_last_layer_that_is_needed(engine: TransformersEngine):
    ran: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(engine.model.model.layers)
    ]
    list(engine.capture(random_samples([5]), [0, 2]))
    for handle in handles:
        handle.remove()
    assert ran == [0, 1]


def test_the_head_is_not_computed(engine: TransformersEngine):
    ran: list[int] = []
    handle = engine.model.lm_head.register_forward_hook(lambda *_: ran.append(1))
    list(engine.capture(random_samples([5]), [6]))
    handle.remove()
    assert not ran


def test_a_failing_batch_names_the_setting(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(engine.model.base_model, "forward", fail)
    with pytest.raises(Exception, match=r"^hardware\.batch_tokens=.*can't allocate memory.*smaller"):
        list(engine.capture(random_samples([5]), [6]))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_through_its_adapter(architecture: str, tmp_path: Path):
    """E1, T4 and greedy decoding for each family that this engine runs; the evaluation's goes past any window."""
    with save_family(architecture, tmp_path) as engine:
        samples = random_samples([3, 40, 11])
        assert check_states(engine, samples, [0, 2, 3, 4]) == 3
        prompts = random_prompts(6, longest=20, max_new_tokens=12)
        for result in engine.generate(prompts, temperature=0, seed=0, stop_ids=STOPS):
            assert result.token_ids == huggingface(engine.model, prompts, result.key, 12)
        long, live = samples[1].input_ids.tolist(), LiveTarget(engine.model, engine.target.adapter, [2])
        found = decode(live, long, max_new_tokens=12, stop_ids=STOPS).token_ids
        assert found == decoded(engine.model, tuple(long), 12)


def test_attention_is_the_fast_one_whatever_config_json_asks_for(tmp_path: Path):
    folder = write_target(tmp_path, num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "eager"}))
    with engine_of(folder) as engine:
        assert engine.model.config._attn_implementation == "sdpa"


def random_prompts(count: int, longest: int, max_new_tokens: int, shared: Sequence[int] = ()) -> list[Prompt]:
    chance = random.Random(count)
    return [
        Prompt(
            key=f"prompt {i}",
            input_ids=[*shared, *(chance.randrange(3, 400) for _ in range(chance.randint(1, longest)))],
            max_new_tokens=max_new_tokens,
        )
        for i in range(count)
    ]


def huggingface(model: Any, prompts: Sequence[Prompt], key: str, max_new_tokens: int) -> list[int]:
    """The continuation that Hugging Face's own greedy loop gives."""
    return decoded(model, tuple(next(p.input_ids for p in prompts if p.key == key)), max_new_tokens)


@functools.cache
def decoded(model: Any, input_ids: tuple[int, ...], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([input_ids])
    mask = torch.ones_like(ids)
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": STOPS, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=mask, do_sample=False, **arguments)
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("shared", [[], [1, 5, 6, 7, 8, 9]])
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_greedy_is_what_hugging_face_decodes(engine: TransformersEngine, slots: int, shared: list[int]):
    """Slots are refilled, compacted and share a prefix; each continuation is the one that its prompt has alone."""
    engine.hardware = dataclasses.replace(engine.hardware, generate_slots=slots, batch_tokens=100)
    prompts = random_prompts(13, longest=40, max_new_tokens=20, shared=shared)
    results = list(engine.generate(prompts, temperature=0.0, seed=0, stop_ids=STOPS))
    assert sorted(result.key for result in results) == sorted(prompt.key for prompt in prompts)
    for result in results:
        assert result.token_ids == huggingface(engine.model, prompts, result.key, 20)
        assert result.finish == ("stop" if result.token_ids[-1] in STOPS else "length")
        assert len(result.token_ids) <= 20
    assert {result.finish for result in results} == {"stop", "length"}


def test_a_prompt_that_is_the_start_of_all_others(engine: TransformersEngine):
    prompts = [Prompt("short", [4, 5, 6], 5), Prompt("long", [4, 5, 6, 7, 8], 5), Prompt("same", [4, 5, 6], 5)]
    for result in engine.generate(prompts, temperature=0.0, seed=0, stop_ids=STOPS):
        assert result.token_ids == huggingface(engine.model, prompts, result.key, 5)


def sampled(engine: TransformersEngine, prompts: Sequence[Prompt], seed: int) -> dict[str, Generation]:
    return {r.key: r for r in engine.generate(prompts, temperature=0.9, seed=seed, stop_ids=[2])}


def test_sampling_depends_on_seed_and_key_and_not_on_the_batch(engine: TransformersEngine):
    engine.hardware = dataclasses.replace(engine.hardware, generate_slots=5)
    prompts = random_prompts(12, longest=20, max_new_tokens=15)
    first = sampled(engine, prompts, seed=1)
    assert sampled(engine, prompts, seed=1) == first
    some = sampled(engine, prompts[::-1][:4], seed=1)
    assert all(first[key] == result for key, result in some.items())
    assert sampled(engine, prompts, seed=2) != first


def test_sampling_follows_the_distribution(engine: TransformersEngine):
    """First tokens of many keys fall as the model's own probabilities say (chi-square over the likely tokens)."""
    engine.hardware = dataclasses.replace(engine.hardware, generate_slots=64)
    count, ids = 3000, [7, 8, 9]
    prompts = [Prompt(str(i), ids, 1) for i in range(count)]
    found = torch.zeros(400)
    for result in engine.generate(prompts, temperature=2.0, seed=0, stop_ids=[]):
        found[result.token_ids[0]] += 1
    with torch.no_grad():
        expected = (engine.model(torch.tensor([ids])).logits[0, -1].double() / 2.0).softmax(-1) * count
    likely = expected >= 5
    assert likely.sum() > 10
    statistic = ((found[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    freedom = int(likely.sum())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_prompts_that_cannot_be_continued(engine: TransformersEngine):
    for prompt, reason in [(Prompt("empty", [], 5), "found no token"), (Prompt("long", [3] * 1020, 5), "exceed")]:
        with pytest.raises(RequestError, match=rf"^prompt {prompt.key}: .*{reason}"):
            list(engine.generate([prompt], temperature=0, seed=0, stop_ids=STOPS))
    assert list(engine.generate([], temperature=0, seed=0, stop_ids=STOPS)) == []
    nothing = list(engine.generate([Prompt("none", [3], 0)], temperature=0, seed=0, stop_ids=STOPS))
    assert nothing == [Generation("none", [], "length")]


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path):
    """X2's kind: transformers would fill the gap with random numbers and go on."""
    folder = write_target(tmp_path / "gap", num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"1 tensors of LlamaForCausalLM are not in .*layers\.1\.mlp\.up_proj"):
        engine_of(folder)


def test_a_family_that_needs_another_engine(tiny_target: Path, monkeypatch: pytest.MonkeyPatch):
    """Kimi-K2.5 does not run here; the refusal comes before anything loads."""
    monkeypatch.setattr(LlamaAdapter, "engines", ("vllm",))
    with pytest.raises(RequestError, match=r"^hardware\.engine: the adapter llama runs with \['vllm'\]"):
        engine_of(tiny_target)


def test_long_sequences_share_the_memory_of_several_slots(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch):
    """Slots have memory for an average length; more than that at once is not admitted, and all are answered."""
    monkeypatch.setattr(generation, "TOKENS_PER_SLOT", 20)
    engine.hardware = dataclasses.replace(engine.hardware, generate_slots=4)
    live: list[int] = []
    step = generation.Generator._step
    monkeypatch.setattr(generation.Generator, "_step", lambda self, rows: live.append(len(rows)) or step(self, rows))
    prompts = random_prompts(9, longest=40, max_new_tokens=20)
    for result in engine.generate(prompts, temperature=0.0, seed=0, stop_ids=STOPS):
        assert result.token_ids == huggingface(engine.model, prompts, result.key, 20)
    assert max(live) == 3
    assert live[0] == 1


def test_dtype_is_float32_on_a_cpu_unless_asked(tiny_target: Path):
    cfg = target_config(tiny_target)
    target = open_target(cfg)
    assert compute_dtype(cfg.hardware, target) == "float32"
    assert compute_dtype(HardwareConfig(name="gpu", accelerator="gpu"), target) == "float32"
    target.config.dtype = torch.bfloat16
    assert compute_dtype(HardwareConfig(name="gpu", accelerator="gpu"), target) == "bfloat16"
    target.model = dataclasses.replace(target.model, dtype="int3")
    with pytest.raises(RequestError, match=r"^model\.dtype: found 'int3'"):
        compute_dtype(cfg.hardware, target)


def test_bfloat16_states(tiny_target: Path):
    cfg = target_config(tiny_target)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dtype="bfloat16"))
    with open_engine(cfg, open_target(cfg)) as engine:
        (caught,) = engine.capture(random_samples([9]), [2, 6])
        assert {state.dtype for state in caught.states.values()} == {torch.bfloat16}
        assert engine.info().dtype == "bfloat16"


def test_the_speed_guess_depends_on_the_model_alone(tiny_target: Path):
    cfg = target_config(tiny_target)
    target = open_target(cfg)
    one = expected_tokens_per_s(dataclasses.replace(cfg.hardware, threads=1), target)
    two = expected_tokens_per_s(dataclasses.replace(cfg.hardware, threads=2), target)
    assert one is not None
    assert two == 2 * one
    assert expected_tokens_per_s(HardwareConfig(name="gpu", accelerator="gpu"), target) is None
