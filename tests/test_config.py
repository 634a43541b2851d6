"""The checked configuration and the building of objects: faults are named before anything loads."""

from __future__ import annotations

import collections
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import eagle3.conf
from eagle3.config import Config, ModelConfig, build, check_nodes, choice, number
from eagle3.errors import RequestError, StoreError
from eagle3.validation import known_depth, nearest, paths, validate

GROUPS = ("stage", "model", "hardware", "dataset", "layers", "drafter", "trainer", "logger")


def tree(**changes: Any) -> dict[str, Any]:
    """The smallest valid configuration, with values changed at dotted paths (`__` for a dot)."""
    node: dict[str, Any] = {group: {"name": group} for group in GROUPS}
    node["model"]["path"] = "/models/x"
    for path, value in changes.items():
        *groups, last = path.split("__")
        inner = node
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return node


def refusal(**changes: Any) -> str:
    with pytest.raises(RequestError) as caught:
        validate(tree(**changes))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_valid_tree_becomes_plain_values() -> None:
    """C5: no OmegaConf type passes the CLI."""
    cfg = validate(
        OmegaConf.create(tree(layers__ids=[2, 3], dataset__sources={"a": {"path": "x"}}, drafter__losses={"a": 1}))
    )
    assert type(cfg) is Config
    assert type(cfg.layers.ids) is list
    assert type(cfg.dataset.sources) is dict
    assert cfg.dataset.sources["a"].role == "train"
    assert cfg.drafter.losses == {"a": 1.0}


def test_all_missing_values_are_reported_at_once() -> None:
    message = refusal(model__path="???", dataset__sources={"train": {"path": "???"}})
    assert message.startswith("2 faults")
    assert "model.path=VALUE" in message
    assert "dataset.sources.train.path=VALUE" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers__idz": [1]}, "layers.ids"),
        ({"sead": 1}, "seed"),
        ({"lr": 1.0}, "trainer.lr"),
        ({"trainer__draft_vocab_size": 3}, "drafter.draft_vocab_size"),
        ({"dataset__sources": {"a": {"path": "x", "rolle": "train"}}}, "dataset.sources.a.role"),
        ({"evaluate__promts_per_set": 3}, "evaluate.prompts_per_set"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(changes: dict[str, Any], expected: str) -> None:
    message = refusal(**changes)
    assert "there is no such field" in message
    assert f"did you mean {expected}" in message


def test_an_unknown_key_like_no_other_lists_what_there_is() -> None:
    assert "layers has also, fractions, ids, name" in refusal(layers__zzzzz=1)
    assert "the configuration has cache_dir" in refusal(zzzzz=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset__on_bad_row": "foo"}, ("dataset.on_bad_row", "'foo'", "skip or stop", "dataset.on_bad_row=skip")),
        ({"store__dtype": "float23"}, ("store.dtype", "bfloat16 or float32", "store.dtype=float32")),
        ({"drafter__draft_vocab_size": 0}, ("drafter.draft_vocab_size", "found 0", "at least 1")),
        ({"drafter__draft_vocab_size": -1}, ("drafter.draft_vocab_size", "found -1")),
        ({"trainer__lr": float("nan")}, ("trainer.lr", "nan", "above 0")),
        ({"trainer__lr": 0.0}, ("trainer.lr", "above 0")),
        ({"gc__older_than_days": float("inf")}, ("gc.older_than_days", "found inf", "a finite number of at least 0")),
        ({"layers__fractions": [0.1, float("nan")]}, ("layers.fractions[1]", "found nan", "a finite number;")),
        ({"drafter__losses": {"kl": float("inf")}}, ("drafter.losses.kl", "found inf", "a finite number;")),
        (
            {"trainer__callbacks__x": {"how": float("nan")}},
            ("trainer.callbacks.x.how", "found nan", "expected a number;"),
        ),
        (
            {"logger__loggers__x": {"a": {"b": [1, {"c": float("nan")}]}}},
            ("logger.loggers.x.a.b[1].c", "found nan", "expected a number;"),
        ),
        ({"seed": -1}, ("seed", "found -1", "of at least 0 and of at most 4294967295")),
        ({"dataset__seed": 2**70}, ("dataset.seed", "of at most 4294967295")),
        ({"output_dir": ""}, ("output_dir", "found nothing after the =", "shell variable")),
        ({"inputs__drafter": ""}, ("inputs.drafter", "found nothing after the =")),
        ({"evaluate__sets": [""]}, ("evaluate.sets[0]", "found nothing after the =")),
        ({"trainer__betas": [0.9]}, ("trainer.betas", "found [0.9]", "2 numbers")),
        ({"trainer__betas": [0.9, 1.0]}, ("trainer.betas[1]", "found 1.0", "of at least 0 and below 1")),
        ({"store__max_failed_fraction": 1.5}, ("store.max_failed_fraction", "at most 1")),
        ({"dataset__sources": {"a": {"path": "x", "limit": 0}}}, ("dataset.sources.a.limit", "found 0")),
        ({"hardware__devices": 0}, ("hardware.devices", "at least 1")),
        ({"hardware__precision": "16-mixed"}, ("found '16-mixed'", "expected 32-true or bf16-mixed;")),
        ({"evaluate__k": 0}, ("evaluate.k", "at least 1")),
    ],
)
def test_impossible_values_are_refused_with_the_allowed_ones(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(**changes)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer__max_epochs": "abc"}, "trainer.max_epochs: found 'abc', expected a whole number"),
        ({"trainer__lr": "fast"}, "trainer.lr: found 'fast', expected a number"),
        ({"dry_run": "perhaps"}, "dry_run: found 'perhaps', expected true or false"),
        ({"layers__ids": 2}, "layers.ids: found a single value, expected a list"),
        ({"trainer__lr": "${nowhere}"}, "trainer.lr: Interpolation key 'nowhere' not found"),
    ],
)
def test_wrong_types_are_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_faults_are_reported_together() -> None:
    message = refusal(trainer__lr=-1.0, dataset__on_bad_row="foo", drafter__unroll_steps=0)
    assert message.startswith("3 faults")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_logger_whose_package_is_missing_is_refused_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is prepared: behind the guard of trackers it would cost a warning, and nothing be tracked."""
    node = OmegaConf.load(Path(eagle3.conf.__path__[0]) / "logger" / f"{name}.yaml")
    loggers = OmegaConf.to_container(node.loggers)
    for package in (name, "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)  # what Python looks at first; None: there is none
    for stage in ("train", "pipeline"):
        message = refusal(stage__name=stage, logger__loggers=loggers)
        assert message.startswith(f"logger.loggers.{name}: ")
        assert f"pip install 'eagle3[{name}]'" in message
    assert validate(tree(stage__name="prepare", logger__loggers=loggers)).logger.loggers


def test_null_is_not_checked_against_bounds() -> None:
    assert validate(tree(drafter__draft_vocab_size=None)).drafter.draft_vocab_size is None


def test_a_class_may_take_an_infinite_number_and_empty_words_in_lists() -> None:
    """Lightning's EarlyStopping with divergence_threshold=inf, say."""
    given = {"x": {"threshold": float("inf"), "words": ["", -float("inf")]}}
    assert validate(tree(trainer__callbacks=given)).trainer.callbacks == given


def test_a_class_may_take_an_empty_word() -> None:
    loggers = {"csv": {"_target_": "lightning.pytorch.loggers.CSVLogger", "prefix": ""}}
    assert validate(tree(logger__loggers=loggers)).logger.loggers == loggers


def test_fields_of_the_schema_have_usable_defaults() -> None:
    assert "trainer.lr" in paths()
    assert nearest("trainer.lrr") == ["trainer.lr"]
    assert choice("a", "b").metadata["choices"] == ("a", "b")
    assert number(None, least=1).default is None


def test_the_depth_is_known_from_the_config_or_the_checkpoint(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path))
    assert known_depth(model) is None
    for text in ("{", "[]", "{}", '{"text_config": null}'):
        (tmp_path / "config.json").write_text(text)
        assert known_depth(model) is None
    for config in ({"num_hidden_layers": 10}, {"text_config": {"num_hidden_layers": 10}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert known_depth(model) == 10
    model.num_hidden_layers = 61
    assert known_depth(model) == 61


class Holder:
    """What `build` makes in these tests."""

    def __init__(self, size: int, values: Any = None, inner: Any = None, sink: Any = None) -> None:
        if size < 0:
            raise ValueError("size must not be negative")
        if size == 99:
            raise StoreError("from the constructor")
        self.size, self.values, self.inner, self.sink = size, values, inner, sink


HOLDER = f"{__name__}.Holder"


def test_build_passes_plain_containers_and_untouched_objects() -> None:
    """C5: constructors get lists and dicts; what the caller passes arrives as the very object."""
    sink = collections.Counter()
    node = {"_target_": HOLDER, "size": 1, "values": {"ids": [1, 2]}, "inner": {"_target_": HOLDER, "size": 2}}
    made = build(node, sink=sink)
    assert type(made.values) is dict
    assert type(made.values["ids"]) is list
    assert made.inner.size == 2
    assert made.sink is sink
    assert build(node, size=5).size == 5


def test_build_hands_dataclasses_over_as_they_are() -> None:
    cfg = validate(tree())
    assert build({"_target_": HOLDER, "size": 1}, sink=cfg).sink is cfg


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"_target_": "no_such_package.Thing"}, ("no_such_package", "ModuleNotFoundError")),
        ({"_target_": "fractions.Fractoin"}, ("fractions.Fractoin", "AttributeError")),
        ({"_target_": HOLDER, "size": -1}, ("ValueError: size must not be negative",)),
        ({"_target_": HOLDER, "sice": 1}, ("sice", HOLDER)),
        ({"_target_": HOLDER}, (HOLDER, "missing 1 required positional argument: 'size'")),
        ({"_target_": HOLDER, "size": 1, "inner": {"_target_": HOLDER, "size": -1}}, ("ValueError: size must not",)),
    ],
)
def test_build_names_the_field_and_the_root_cause(node: dict[str, Any], words: tuple[str, ...]) -> None:
    """C7: a constructor's complaint comes with its config path."""
    with pytest.raises(RequestError) as caught:
        build(node, _where_="drafter.module")
    message = str(caught.value)
    assert message.startswith("drafter.module")
    for word in words:
        assert word in message


def test_build_lets_our_own_errors_pass() -> None:
    for node in (
        {"_target_": HOLDER, "size": 99},
        {"_target_": HOLDER, "size": 1, "inner": {"_target_": HOLDER, "size": 99}},
    ):
        with pytest.raises(StoreError, match="from the constructor"):
            build(node)


def test_check_nodes_finds_all_faults_without_building() -> None:
    good = {"_target_": HOLDER, "size": -1}
    check_nodes({"a": good, "b": [good], "c": {"_target_": "fractions.Fraction", "_args_": [1, 2]}})
    assert Fraction(1, 2) == build({"_target_": "fractions.Fraction", "_args_": [1, 2]})
    with pytest.raises(RequestError) as caught:
        check_nodes({"a": {"_target_": "nowhere.X"}, "b": [{"_target_": HOLDER, "sice": 1}]}, "trainer")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("trainer.a._target_: found 'nowhere.X'")
    assert lines[1].startswith(f"trainer.b[0]: {HOLDER} does not take these fields")
