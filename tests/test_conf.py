"""The YAML files: every option composes, every combination is valid, every field is explained."""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import eagle3.conf
from eagle3 import config, launchers, validation
from eagle3.config import Config
from eagle3.validation import validate

CONF = Path(eagle3.conf.__path__[0])
GROUPS = ("model", "hardware", "dataset", "layers", "drafter", "trainer", "logger", "stage")
FILL = {
    "model": ["model.path=/models/x"],
    "dataset": ["dataset.sources.train.path=/data/x.jsonl"],
}
NEED_PATH = {"llama", "qwen", "deepseek_v3", "kimi_k2", "gpt_oss", "jsonl", "hub"}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def hydra() -> Iterator[None]:
    config.register_schema()
    launchers.register()
    with initialize_config_module("eagle3.conf", version_base="1.3"):
        yield


def words(chosen: dict[str, str]) -> list[str]:
    fill = [word for group, option in chosen.items() if option in NEED_PATH for word in FILL[group]]
    return [f"{group}={option}" for group, option in chosen.items()] + fill


def composed(**chosen: str) -> Config:
    return validate(compose("config", words(chosen)))


def test_groups_offer_what_the_interface_promises() -> None:
    promised = {
        "model": "smollm2_135m llama qwen kimi_k25 deepseek_v3",
        "hardware": "cpu gpu_1 rtx_pro_6000_x8 h200_x1 h200_x2 h200_x4 h200_x8",
        "dataset": "demo jsonl hub",
        "layers": "eagle early middle late spread",
        "drafter": "dense",
        "trainer": "default",
        "logger": "csv wandb tensorboard mlflow",
        "stage": "prepare extract train export evaluate pipeline inspect vocab estimate runs adapters verify",
        "experiment": "demo smoke",
    }
    for group, names in promised.items():
        assert set(names.split()) <= set(options(group)), group


@pytest.fixture(scope="module")
def every(hydra: None) -> dict[tuple[str, str], Config]:
    """A configuration for each option of each group; one holds an option of every group."""
    found: dict[tuple[str, str], Config] = {}
    for i in range(max(len(options(group)) for group in GROUPS)):
        row = {group: options(group)[i % len(options(group))] for group in GROUPS}
        found |= dict.fromkeys(row.items(), composed(**row))
    return found


@pytest.mark.parametrize(("group", "option"), [(g, o) for g in GROUPS for o in options(g)])
def test_every_option_composes_under_its_own_name(
    group: str, option: str, every: dict[tuple[str, str], Config]
) -> None:
    assert getattr(every[group, option], group).name == option


def test_every_model_hardware_layers_stage_combination_is_valid(every: dict[tuple[str, str], Config]) -> None:
    """An option's file speaks of its own section only, so that it fills it alike whatever stands beside it: every
    combination of the four is put together from those sections and checked."""
    groups = ("model", "hardware", "layers", "stage")
    for group, option in ((g, o) for g in groups for o in options(g)):
        path = CONF / group / f"{option}.yaml"
        own = OmegaConf.load(path)
        assert "@package" not in path.read_text(), path
        assert "${" not in OmegaConf.to_yaml(own), path
        assert {*own.pop("defaults", [])} <= {"_self_", *options(group)}, path
    any_of = next(iter(every.values()))
    rest = {f.name: getattr(any_of, f.name) for f in dataclasses.fields(any_of) if f.name not in groups}
    for row in itertools.product(*map(options, groups)):
        chosen = {group: getattr(every[group, option], group) for group, option in zip(groups, row, strict=True)}
        assert not list(validation.out_of_bounds(Config(**chosen, **rest)))


@pytest.mark.parametrize("name", options("experiment"))
def test_experiments_win_over_the_defaults(name: str) -> None:
    cfg = validate(compose("config", [f"+experiment={name}"]))
    assert cfg.dataset.max_new_tokens < composed().dataset.max_new_tokens


def test_kimi_on_eight_rtx_pro_6000() -> None:
    cfg = composed(model="kimi_k25", hardware="rtx_pro_6000_x8")
    assert (cfg.model.path, cfg.model.num_hidden_layers, cfg.model.hidden_size) == ("moonshotai/Kimi-K2.5", 61, 7168)
    assert cfg.model.quantization == "int4"
    assert (cfg.hardware.engine, cfg.hardware.tensor_parallel_size) == ("vllm", 8)


@pytest.mark.parametrize("option", ["llama", "qwen", "deepseek_v3"])
def test_a_model_by_path_never_falls_back_to_another_checkpoint(option: str) -> None:
    model = compose("config", [f"model={option}"]).model
    assert OmegaConf.is_missing(model, "path")
    # Nor is a smaller or an older one of the family taken for a wrong one.
    assert model.num_hidden_layers is None


def test_targets_can_be_located_and_take_their_fields() -> None:
    for option in options("model"):
        config.check_nodes(composed(model=option).model, "model")


def yaml_files() -> list[Path]:
    return [path for path in sorted(CONF.rglob("*.yaml")) if "hydra" not in path.parts]


@pytest.mark.parametrize("path", yaml_files(), ids=lambda path: str(path.relative_to(CONF)))
def test_a_comment_stands_above_each_field(path: Path) -> None:
    lines = path.read_text().splitlines()
    free = False  # below a node whose keys are not ours
    assert lines[0].startswith("#")
    for above, line in itertools.pairwise(lines):
        key = re.match(r"( *)([A-Za-z_]\w*):", line)
        if key is None or path.name == "application.yaml":
            continue
        indent, name = len(key.group(1)), key.group(2)
        if indent == 0:
            free = name in ("defaults", "sources", "adapter", "module", "lightning", "datamodule", "loggers") or (
                name in ("engine_options", "expected_backends")
            )
        if indent == 0 or not free:
            assert above.strip().startswith("#") or name == "defaults", f"{path.name}: no comment above {line!r}"


def test_every_field_of_the_schema_is_set_and_explained_in_yaml() -> None:
    explained: set[str] = set()
    for path in yaml_files():
        if path.parent.name == "experiment":
            continue
        group = path.parent.name if path.parent != CONF else ""
        section = group
        for line in path.read_text().splitlines():
            if top := re.match(r"([A-Za-z_]\w*):", line):
                section = group or top.group(1)
                explained.add(".".join(filter(None, [group, top.group(1)])))
            elif (inner := re.match(r"  ([A-Za-z_]\w*):", line)) and not group:
                explained.add(f"{section}.{inner.group(1)}")
    hints = typing.get_type_hints(Config)
    for name, hint in hints.items():
        fields = [f"{name}.{f.name}" for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else [name]
        for field in fields:
            assert field in explained, f"no YAML file explains {field}"


def test_help_names_every_stage_with_the_words_of_its_file() -> None:
    text = (CONF / "hydra" / "help" / "eagle3.yaml").read_text()
    for option in options("stage"):
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{option} "))
        comment = (CONF / "stage" / f"{option}.yaml").read_text().splitlines()[0].removeprefix("# ").rstrip(".")
        assert line.split(maxsplit=1)[1].lower() == comment.lower()
