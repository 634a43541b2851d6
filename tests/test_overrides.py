"""What is written into an override comes out of Hydra as it was."""

from __future__ import annotations

import itertools
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from eagle3.overrides import override, quoted

PARTS = ("\\", '"', "'", "${", "}", "a b", "=,")
VALUES = ["".join(parts) for count in range(1, 5) for parts in itertools.product(PARTS, repeat=count)]


def read(text: str) -> str:
    """The value that Hydra sets."""
    found = OverridesParser.create().parse_override(text)
    return OmegaConf.create({str(found.key_or_group): found.value()})["output_dir"]


def test_any_value_comes_back_from_hydra() -> None:
    differing = [value for value in VALUES if read(f"output_dir={quoted(value)}") != value]
    assert differing == []


@pytest.mark.parametrize(
    "value", ["", "/out/a", "main", "$HOME/a", "~/a b", "été", "a\\b", "it's", 'a "b"', "${a}", "a\\"]
)
def test_any_value_comes_back_from_hydra_behind_a_shell(value: str) -> None:
    (word,) = shlex.split(override("output_dir", value))
    assert read(word) == value


def test_plain_words_are_not_quoted() -> None:
    assert override("inputs.export", "/out/export-3/8.1") == "inputs.export=/out/export-3/8.1"
