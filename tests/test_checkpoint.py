"""The target's checkpoint: opened and checked without loading it, its tensors, its identity, its teacher head."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle3.checkpoint import Target, open_target
from eagle3.config import ModelConfig, StageConfig
from eagle3.engines.taps import StateTaps
from eagle3.errors import RequestError
from tests.conftest import CHAT_TEMPLATE, target_config, write_target


@pytest.fixture
def copied(tiny_target: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own, to be damaged."""
    return Path(shutil.copytree(tiny_target, tmp_path / "copied"))


def opened(folder: Path, **model: Any) -> Target:
    cfg = target_config(folder)
    return open_target(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **model)))


def split_into_shards(folder: Path) -> list[Path]:
    """Rewrites a single-file checkpoint as two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / file for file in parts]


def test_tensors_are_read_one_by_one(tiny_target: Path):
    target, stored = opened(tiny_target), load_file(tiny_target / "model.safetensors")
    assert torch.equal(target.embedding(), stored["model.embed_tokens.weight"])
    assert torch.equal(target.head(), stored["lm_head.weight"])
    assert torch.equal(target.final_norm(), stored["model.norm.weight"])
    assert target.shape.num_layers == 6
    assert target.shape.eos_token_ids == (2,)


def test_shards_give_the_same_tensors(copied: Path, tiny_target: Path):
    split_into_shards(copied)
    target = opened(copied)
    assert torch.equal(target.embedding(), opened(tiny_target).embedding())
    assert target.weights.num_parameters == opened(tiny_target).weights.num_parameters


def test_a_tied_head_is_the_embedding(tmp_path: Path):
    target = opened(write_target(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=1))
    assert "lm_head.weight" not in target.weights
    assert torch.equal(target.head(), target.embedding())


def test_teacher_gives_the_models_own_logits(tiny_target: Path):
    """T4: the final state is before the norm; norm, then head, is what the model itself computes."""
    target = opened(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    input_ids = torch.arange(3, 40)[None]
    with torch.no_grad(), StateTaps(model.model.layers, target.adapter, [6]) as states:
        expected = model(input_ids).logits
    torch.testing.assert_close(target.teacher_head()(states[6]), expected, rtol=1e-6, atol=1e-5)
    unnormed = torch.nn.functional.linear(states[6], target.head())
    assert (unnormed.argmax(-1) != expected.argmax(-1)).any()


def test_fingerprint_is_of_the_content_not_of_the_place(copied: Path, tiny_target: Path):
    """E13: the same files elsewhere are the same target; plain values only."""
    fingerprint = opened(copied).fingerprint()
    assert fingerprint == opened(tiny_target).fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint


def test_fingerprint_changes_with_weights_config_tokenizer_and_template(copied: Path):
    """E13, D13: a fine-tune of equal sizes, another template, another revision or quantization is another target."""
    before = opened(copied).fingerprint()
    changed: dict[str, Any] = {
        "revision": opened(copied, revision="v2").fingerprint(),
        "quantization": opened(copied, quantization="int4").fingerprint(),
        "chat_template": opened(copied, chat_template="{{ messages[0].content }}").fingerprint(),
    }
    weights = load_file(copied / "model.safetensors")
    save_file(
        {name: tensor * 1.001 for name, tensor in weights.items()}, copied / "model.safetensors", {"format": "pt"}
    )
    changed["weights"] = opened(copied).fingerprint()
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    changed["tokenizer"] = opened(copied).fingerprint()
    for key, after in changed.items():
        assert {name for name in before if before[name] != after[name]} == {key}


def test_a_loaders_notes_in_the_config_change_nothing(copied: Path):
    before = opened(copied).fingerprint()
    config = json.loads((copied / "config.json").read_text())
    config["transformers_version"] = "99"
    (copied / "config.json").write_text(json.dumps(config))
    assert opened(copied).fingerprint() == before


def test_chat_template_can_be_replaced_by_text_or_file(tiny_target: Path, tmp_path: Path):
    assert opened(tiny_target).chat_template == CHAT_TEMPLATE
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(text)
    for given in (text, str(tmp_path / "mine.jinja")):
        target = opened(tiny_target, chat_template=given)
        rendered = target.tokenizer().apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False)
        assert rendered == "a b"
    with pytest.raises(RequestError, match=r"^model\.chat_template: no file nowhere\.jinja"):
        assert opened(tiny_target, chat_template="nowhere.jinja").chat_template


def test_tokenizer_of_another_folder(tiny_target: Path, copied: Path):
    (copied / "tokenizer.json").unlink()
    assert opened(copied, tokenizer=str(tiny_target)).tokenizer().encode("Paris")


def test_no_model_there(tmp_path: Path, tiny_target: Path):
    """Bad input: a folder that is no model, a missing folder, a misspelt id: one line, exit 2."""
    (tmp_path / "file").write_text("x")
    for path, reason in [
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "nowhere"), "is no folder"),
        (str(tmp_path / "file"), "is no folder"),
        ("someone/nothing-of-that-name", "neither a local folder nor a hub model"),
    ]:
        with pytest.raises(RequestError, match=reason) as refusal:
            opened(tiny_target, path=path)
        assert str(refusal.value).startswith("model.path: ")
        assert "\n" not in str(refusal.value)


def test_damaged_config(copied: Path):
    (copied / "config.json").write_text('{"architectures": ["Llama')
    with pytest.raises(RequestError, match=r"config\.json: cannot be read as JSON"):
        opened(copied)
    (copied / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RequestError, match="names no `architectures`"):
        opened(copied)
    (copied / "config.json").write_text('{"model_type": "nobody_knows", "architectures": ["X"]}')
    with pytest.raises(RequestError, match="transformers cannot read it"):
        opened(copied)


def test_wrong_adapter(tiny_target: Path):
    cfg = target_config(tiny_target, adapter="qwen.QwenAdapter")
    with pytest.raises(RequestError, match=r"config\.json: found architectures \['LlamaForCausalLM'\]"):
        open_target(cfg)
    with pytest.raises(RequestError, match=r"model\.adapter: .* made a Fraction"):
        opened(tiny_target, adapter={"_target_": "fractions.Fraction"})


def test_no_adapter_lists_those_that_exist(tiny_target: Path):
    """C7: the message lists the adapters and an override that works when pasted."""
    with pytest.raises(RequestError, match=r"^model\.adapter: none chosen; .*'llama'") as refusal:
        opened(tiny_target, adapter={})
    pasted = re.search(r"'\+model\.adapter\.(_target_)=([\w.]+)'", str(refusal.value))
    assert pasted is not None
    assert opened(tiny_target, adapter=dict([pasted.groups()])).shape.num_layers == 6


def test_sizes_that_contradict_the_config(copied: Path):
    with pytest.raises(RequestError, match=r"^model\.num_hidden_layers: 7 is configured, but .* says 6"):
        opened(copied, num_hidden_layers=7)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "vocab_size": 500}))
    with pytest.raises(RequestError, match=r"embed_tokens.weight has shape \[400, 48\].*\[500, 48\]"):
        opened(copied)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights(copied: Path, kept: int):
    data = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(data[:kept])
    with pytest.raises(RequestError, match=r"model\.safetensors: (no readable safetensors header|found \d+ bytes)"):
        opened(copied)


def test_missing_weights(copied: Path):
    shards = split_into_shards(copied)
    shards[1].unlink()
    with pytest.raises(RequestError, match="1 of 2 shards are missing, first model-00002-of-00002"):
        opened(copied)
    shards[0].unlink()
    (copied / "model.safetensors.index.json").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RequestError, match=r"pytorch_model\.bin: convert it to safetensors"):
        opened(copied)


def test_index_and_shards_disagree(copied: Path):
    split_into_shards(copied)
    index = copied / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    file = weight_map["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.extra.weight": file}}))
    with pytest.raises(RequestError, match=r"no tensor model\.extra\.weight, which the index places there"):
        opened(copied)
    index.write_text("{}")
    with pytest.raises(RequestError, match="found no weight_map"):
        opened(copied)


def test_a_tensor_that_the_family_needs_is_missing(copied: Path):
    weights = load_file(copied / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"no tensor model\.norm\.weight.*stage=adapters"):
        opened(copied)


def test_quantization_is_what_the_config_says(copied: Path):
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copied / "config.json").write_text(json.dumps(config))
    found = opened(copied).quantization
    assert isinstance(found, dict)
    assert found["quant_method"] == "fp8"
    assert opened(copied, quantization="int4").quantization == "int4"
    assert ModelConfig().quantization is None


@pytest.mark.parametrize("asked", ["dry_run=true", "stage=estimate"])
def test_what_only_foretells_downloads_no_weights(asked: str, tiny_target: Path) -> None:
    cfg = target_config(tiny_target)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path="someone/nothing-of-that-name"))
    stage = StageConfig("estimate" if asked == "stage=estimate" else "extract")
    cfg = dataclasses.replace(cfg, stage=stage, dry_run=asked == "dry_run=true")
    with pytest.raises(RequestError, match=f"{asked} downloads no weights.*run `hf download someone/nothing"):
        open_target(cfg)
