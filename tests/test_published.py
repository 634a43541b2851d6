"""Drafters as others publish them are read with every tensor, their layers and their vocabulary map."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checkpoint import open_target
from eagle3.drafter import DrafterShape, Eagle3Drafter, load_drafter
from eagle3.errors import RequestError
from eagle3.export import export_drafter
from eagle3.published import import_drafter
from tests.test_export import D, H, V, logits, make_drafter, make_target
from tests.trained import copied, make_inputs, train_config, trained

LAYERS = 61


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def eagles_own(drafter: Eagle3Drafter, prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    """The tensors as EAGLE and SpecForge save them: the embedding and both maps beside the weights."""
    names = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    names = {name.replace("midlayer.", prefix): tensor for name, tensor in names.items()}
    return {**names, "embed_tokens.weight": drafter.embedding.clone()}


def eagle_config(**changes: Any) -> dict[str, Any]:
    """config.json as EAGLE published it: no layer ids, no flags, rope in the old spelling."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 65536,
        "hidden_act": "silu",
        "vocab_size": V,
        "draft_vocab_size": D,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {**config, **changes}


@pytest.mark.parametrize(
    ("nested", "meant"),
    [(None, (2, 30, 58)), ([1, 29, 57], (2, 30, 58)), ([2, 30, 58], (2, 30, 58))],
    ids=["EAGLE", "SpecForge", "inputs"],
)
def test_eagles_form_with_its_default_layers(tmp_path: Path, nested: list[int] | None, meant: tuple[int, ...]) -> None:
    drafter = make_drafter()
    more = {} if nested is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": nested}}
    folder = write(tmp_path / "published", eagle_config(**more), eagles_own(drafter))
    found = import_drafter(folder, drafter.embedding, LAYERS)
    assert found.shape.layer_ids == meant
    assert torch.equal(logits(found), logits(drafter))


def test_layers_of_an_unknown_meaning_are_asked_for(tmp_path: Path) -> None:
    drafter = make_drafter()
    config = eagle_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [4, 20, 40]})
    folder = write(tmp_path / "published", config, eagles_own(drafter))
    with pytest.raises(RequestError, match=r"\[4, 20, 40\] in eagle_config only.*layers\.ids="):
        import_drafter(folder, drafter.embedding, LAYERS)
    assert import_drafter(folder, drafter.embedding, LAYERS, [5, 21, 41]).shape.layer_ids == (5, 21, 41)


def test_t12_the_vocabulary_map_is_taken_over_bit_by_bit(tmp_path: Path) -> None:
    drafter = make_drafter()
    folder = write(tmp_path / "published", eagle_config(), eagles_own(drafter, "layers.0."))
    found = import_drafter(folder, drafter.embedding, LAYERS)
    assert torch.equal(found.d2t, drafter.d2t)
    assert torch.equal(found.t2d, drafter.t2d)
    assert torch.equal(logits(found), logits(drafter))


def test_a_full_vocabulary_may_bring_a_map_that_says_nothing(tmp_path: Path) -> None:
    drafter = make_drafter(draft_vocab_size=V)
    config = eagle_config(draft_vocab_size=None)
    folder = write(tmp_path / "published", config, eagles_own(drafter))
    assert torch.equal(logits(import_drafter(folder, drafter.embedding, LAYERS)), logits(drafter))
    weights = eagles_own(drafter)
    weights["d2t"][3] = 1
    with pytest.raises(RequestError, match="a d2t with offsets"):
        import_drafter(write(tmp_path / "broken", config, weights), drafter.embedding, LAYERS)


def test_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    drafter = make_drafter()
    weights = eagles_own(drafter)
    half = {**weights, "embed_tokens.weight": drafter.embedding.to(torch.bfloat16)}
    import_drafter(write(tmp_path / "half", eagle_config(), half), drafter.embedding, LAYERS)
    weights["embed_tokens.weight"][5] += 1
    with pytest.raises(RequestError, match=r"an embed_tokens\.weight of \[120, 32\] that is not the target's"):
        import_drafter(write(tmp_path / "own", eagle_config(), weights), drafter.embedding, LAYERS)


@pytest.mark.parametrize("flag", [None, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_speculators_form_there_and_back(tmp_path: Path, flag: str | None) -> None:
    drafter = make_drafter(**({} if flag is None else {flag: True}))
    export_drafter(drafter, make_target(), tmp_path, torch.float32, "speculators", verifier="org/target", k=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["norm_before_residual"] is (flag == "norm_before_residual")
    names = load_file(tmp_path / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any(name.startswith("midlayer.") for name in names)
    found = import_drafter(tmp_path, drafter.embedding)
    assert found.shape == drafter.shape
    assert torch.equal(logits(found), logits(drafter))


def test_speculators_own_default_is_kept(tmp_path: Path) -> None:
    """Where its config is silent, the residual is the normed state."""
    drafter = make_drafter(norm_before_residual=True)
    export_drafter(drafter, make_target(), tmp_path, torch.float32, "speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["norm_before_residual"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert import_drafter(tmp_path, drafter.embedding).shape.norm_before_residual


def test_hf_holds_the_embedding_and_comes_back(tmp_path: Path) -> None:
    drafter = make_drafter()
    export_drafter(drafter, make_target(), tmp_path, torch.bfloat16, "hf")
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], drafter.embedding.to(torch.bfloat16))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert import_drafter(tmp_path, drafter.embedding).shape == drafter.shape


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "found architectures"),
        ({"num_hidden_layers": 4}, "found 4 layers"),
        ({"rope_theta": None}, "found no rope_theta"),
    ],
)
def test_what_is_no_such_drafter_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    drafter = make_drafter()
    folder = write(tmp_path / "published", eagle_config(**changes), eagles_own(drafter))
    with pytest.raises(RequestError, match=r"config\.json.*" + words):
        import_drafter(folder, drafter.embedding, LAYERS)


def test_weights_cut_short_are_to_be_deleted_and_made_again(tmp_path: Path) -> None:
    """Before that, stage=export takes the folder for complete."""
    drafter = make_drafter()
    export_drafter(drafter, make_target(), tmp_path, torch.float32, "vllm")
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(RequestError, match=r"model\.safetensors: .*; delete the folder and make it again"):
        import_drafter(tmp_path, drafter.embedding)


def test_a_servers_own_factor_on_the_rotation_is_kept(tmp_path: Path) -> None:
    """`attn_factor` multiplies YaRN's default, where transformers has `attention_factor` for the product."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attn_factor": 0.5}
    drafter = make_drafter()
    folder = write(tmp_path / "published", eagle_config(rope_scaling=yarn), eagles_own(drafter))
    found = import_drafter(folder, drafter.embedding, LAYERS)
    assert found.rotary.attention_scaling == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize("form", ["eagle", "speculators"])
def test_t12_a_warm_start_from_a_published_folder_keeps_map_and_weights(
    form: str, tiny_target: Path, tmp_path: Path
) -> None:
    """Trained for one step at a rate of nothing: the same drafter comes out, with the map bit-equal."""
    inputs = copied(make_inputs(tiny_target), tmp_path)
    _, first, _ = trained(train_config(inputs, tiny_target, "trainer.max_steps=2"))
    target = open_target(train_config(inputs, tiny_target))
    before = load_drafter(first.folder, target.embedding())
    folder = tmp_path / "published"
    if form == "eagle":
        write(folder, published_config(before.shape), eagles_own(before))
    else:
        folder.mkdir()
        export_drafter(before, target.shape, folder, torch.float32, "speculators")
    settings = (f"drafter.warm_start={folder}", "trainer.lr=1e-12", "trainer.max_steps=1", "seed=5")
    states = first.folder.parents[1] / "states" / first.manifest()["identity"]["states"]
    _, second, _ = trained(train_config(inputs, tiny_target, *settings, f"inputs.states={states}"))
    after = load_drafter(second.folder, target.embedding())
    assert second.id != first.id
    assert torch.equal(after.d2t, before.d2t)
    assert torch.equal(after.t2d, before.t2d)
    for name, tensor in before.state_dict().items():
        assert torch.allclose(after.state_dict()[name].float(), tensor.float(), atol=1e-6), name


def published_config(shape: DrafterShape) -> dict[str, Any]:
    """As EAGLE would publish it, with layers that are not the default ones."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size", "draft_vocab_size")
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in shape.layer_ids]}}
    return eagle_config(**{name: getattr(shape, name) for name in names}, **ids)
