"""An exported folder is the drafter that was trained, in the form that servers read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.adapter import TargetShape
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.errors import RequestError
from eagle3.export import export_drafter
from eagle3.published import import_drafter
from eagle3.vocab import check_vocabulary_map

V, D, H = 120, 40, 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
# Every parameter of vLLM's llama_eagle3.py, before it fuses q, k, v and gate, up.
VLLM_NAMES = {
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *("fc.weight", "norm.weight", "lm_head.weight"),
}


def make_drafter(**changes):
    shape = {
        "hidden_size": H,
        "target_hidden_size": H,
        "layer_ids": (2, 30, 58),
        "vocab_size": V,
        "draft_vocab_size": D,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "max_position_embeddings": 65536,
        "attention": "dense",
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "hidden_act": "silu",
    }
    shape = DrafterShape(**{**shape, **changes})
    generator = torch.Generator().manual_seed(3)
    drafter = Eagle3Drafter(shape, torch.randn(V, H, generator=generator))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        if shape.draft_vocab_size < V:
            target_ids = torch.randperm(V, generator=generator)[:D].sort().values
            drafter.d2t.copy_(target_ids - torch.arange(D))
            drafter.t2d.copy_(torch.zeros(V, dtype=torch.bool).index_fill(0, target_ids, True))
    return drafter.eval()


def make_target(**changes):
    shape = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 61,
        "hidden_size": H,
        "vocab_size": V,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65536,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_ids": (2, 7),
    }
    return TargetShape(**{**shape, **changes})


def logits(drafter, count=20):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(V, (count,), generator=generator)
    states = torch.randn(count, H * len(drafter.shape.layer_ids), generator=generator)
    with torch.no_grad():
        return drafter.extend(drafter.new_cache(), ids, drafter.fuse(states), torch.arange(count))[1]


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def test_x1_weights_hold_the_vocabulary_map(tmp_path):
    export_drafter(make_drafter(), make_target(), tmp_path, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == VLLM_NAMES | {"d2t", "t2d"}
    d2t, t2d = weights["d2t"], weights["t2d"]
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    target_ids = torch.arange(D) + d2t
    assert len(set(target_ids.tolist())) == D == int(t2d.sum())
    assert t2d[target_ids].all()


def test_x1_a_full_vocabulary_needs_no_map(tmp_path):
    drafter = make_drafter(draft_vocab_size=V)
    export_drafter(drafter, make_target(), tmp_path, torch.float32)
    assert set(load_file(tmp_path / "model.safetensors")) == VLLM_NAMES
    imported = import_drafter(tmp_path, drafter.embedding)
    assert torch.equal(logits(imported), logits(drafter))
    assert imported.to_target(torch.tensor([5, 119])).tolist() == [5, 119]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d2t, t2d: d2t.zero_(), "t2d"),
        (lambda d2t, t2d: d2t[-1].add_(V), "out of range"),
        (lambda d2t, t2d: d2t[3].sub_(1 + int(d2t[3] - d2t[2])), "repeated"),
        (lambda d2t, t2d: t2d.logical_not_(), "t2d"),
    ],
)
def test_x1_a_broken_map_is_refused_by_file(tmp_path, spoil, words):
    drafter = make_drafter()
    with torch.no_grad():
        spoil(drafter.d2t, drafter.t2d)
    with pytest.raises(RequestError, match=r"model\.safetensors.*" + words):
        export_drafter(drafter, make_target(), tmp_path, torch.float32)


def test_x1_an_all_zero_map_is_refused_even_when_it_agrees_with_itself(tmp_path):
    d2t, t2d = torch.zeros(D, dtype=torch.int64), torch.arange(V) < D
    with pytest.raises(RequestError, match="all-zero"):
        check_vocabulary_map(d2t, t2d, V, "file")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x2_logits_before_and_after_are_equal(tmp_path, dtype):
    drafter = make_drafter()
    checks = export_drafter(drafter, make_target(), tmp_path, dtype)
    imported = import_drafter(tmp_path, drafter.embedding)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == dtype
    assert imported.state_dict()["fc.weight"].dtype == torch.float32
    if dtype == torch.float32:
        assert torch.equal(logits(imported), logits(drafter))
        assert (checks["rounding"], checks["argmax_agreement"]) == (0.0, 1.0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(dtype))
    assert torch.equal(logits(imported), logits(drafter))
    assert checks["strict_reload"]
    assert checks["logits_equal"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("norm.weight"), "no norm.weight"),
        (lambda w: w.pop("lm_head.weight"), "no lm_head.weight"),
        (lambda w: w.pop("d2t"), "no d2t"),
        (lambda w: w.update({"midlayer.extra": torch.ones(2)}), "unknown midlayer.extra"),
        (lambda w: w.update({"head": torch.ones(2)}), "a tensor 'head'"),
        (lambda w: w.update({"fc.weight": torch.ones(H, 2 * H)}), r"fc.weight \[32, 64\] instead of \[32, 96\]"),
    ],
)
def test_x2_reading_is_strict(tmp_path, change, words):
    drafter = make_drafter()
    export_drafter(drafter, make_target(), tmp_path, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match=r"model\.safetensors.*" + words):
        import_drafter(tmp_path, drafter.embedding)


def test_x3_layer_ids_are_vllms_and_come_back(tmp_path):
    for ids in ((2, 30, 58), (1, 4), (0, 20, 40, 61)):
        folder = tmp_path / "-".join(map(str, ids))
        folder.mkdir()
        drafter = make_drafter(layer_ids=ids)
        export_drafter(drafter, make_target(), folder, torch.float32)
        config = read_config(folder)
        assert config["eagle_aux_hidden_state_layer_ids"] == list(ids)
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(ids)
        assert config["num_aux_hidden_states"] == len(ids)
        assert load_file(folder / "model.safetensors")["fc.weight"].shape == (H, len(ids) * H)
        assert import_drafter(folder, drafter.embedding).shape == drafter.shape


def test_x3_layer_ids_that_disagree_are_refused(tmp_path):
    drafter = make_drafter()
    export_drafter(drafter, make_target(), tmp_path, torch.float32)
    config = read_config(tmp_path)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3, 31, 59]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"\[2, 30, 58\] at the top and \[3, 31, 59\]"):
        import_drafter(tmp_path, drafter.embedding)


def rotary_tables(config, positions):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    return cos[0], sin[0]


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN], ids=["none", "llama3", "yarn"])
def test_x5_rope_survives_in_every_spelling(tmp_path, scaling):
    from transformers import AutoConfig, LlamaConfig

    drafter = make_drafter(rope_scaling=scaling)
    export_drafter(drafter, make_target(), tmp_path, torch.float32)
    written = read_config(tmp_path)
    assert (written["rope_theta"], written["rope_scaling"]) == (500000.0, scaling)
    rope = scaling or {"rope_type": "default"}
    assert written["rope_parameters"] == {**rope, "rope_theta": 500000.0}

    positions = [0, 5_000, 50_000]
    trained = LlamaConfig(
        hidden_size=H,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=65536,
        rope_parameters={**rope, "rope_theta": 500000.0},
    )
    expected = rotary_tables(trained, positions)
    old = {name: value for name, value in written.items() if name != "rope_parameters"}
    new = {name: value for name, value in written.items() if name not in ("rope_theta", "rope_scaling")}
    for name, config in {"both": written, "old": old, "new": new}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        found = rotary_tables(AutoConfig.from_pretrained(tmp_path / name), positions)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
    assert import_drafter(tmp_path, drafter.embedding).shape == drafter.shape


def test_config_is_a_llama_to_transformers(tmp_path):
    from transformers import AutoConfig

    export_drafter(make_drafter(), make_target(), tmp_path, torch.bfloat16)
    written = read_config(tmp_path)
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, [2, 7])
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.num_hidden_layers, config.dtype) == ("llama", 1, torch.bfloat16)
    for name, value in {
        "vocab_size": V,
        "draft_vocab_size": D,
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 65536,
        "norm_before_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }.items():
        assert getattr(config, name) == value


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_t5_norm_flags_are_written_and_come_back(tmp_path, flag):
    drafter = make_drafter(**{flag: True})
    export_drafter(drafter, make_target(), tmp_path, torch.float32)
    assert read_config(tmp_path)[flag] is True
    imported = import_drafter(tmp_path, drafter.embedding)
    assert imported.shape == drafter.shape
    assert torch.equal(logits(imported), logits(drafter))


def test_the_embedding_must_be_the_targets(tmp_path):
    export_drafter(make_drafter(), make_target(), tmp_path, torch.float32)
    with pytest.raises(RequestError, match=r"120 x 32.*100 x 32"):
        import_drafter(tmp_path, torch.zeros(100, H))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"architectures": ["LlamaForCausalLM"]}'])
def test_another_folder_is_refused_by_file(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RequestError, match=r"config\.json"):
        import_drafter(tmp_path, torch.zeros(V, H))


def test_cut_off_weights_are_refused_by_file(tmp_path):
    drafter = make_drafter()
    export_drafter(drafter, make_target(), tmp_path, torch.float32)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RequestError, match=r"model\.safetensors"):
        import_drafter(tmp_path, drafter.embedding)
