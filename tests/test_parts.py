"""A part of a training that the config names: what is known before it is built, and what only then."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3.errors import RequestError
from eagle3.parts import Part

TABLE = Part("group.table", dict, "a dict", "leave it", default="builtins.dict")


def make(**options: Any) -> Any:
    """A dict, or what is asked for."""
    return options.get("instead", options)


@pytest.mark.parametrize("target", ["builtins.dict", "collections.OrderedDict", "tests.test_parts.make"])
def test_a_class_of_the_kind_and_a_function_pass_unbuilt(target: str) -> None:
    TABLE.check({"_target_": target, "a": 1})
    assert TABLE.build({"_target_": target, "a": 1}, b=2) == {"a": 1, "b": 2}


def test_an_empty_node_means_the_default() -> None:
    assert TABLE.check({}) is dict
    assert type(TABLE.build({})) is dict
    with pytest.raises(RequestError, match=r"^group\.table: found \{\}, expected a dict; leave it$"):
        Part("group.table", dict, "a dict", "leave it").check({})


def test_another_kind_is_refused_as_soon_as_it_is_known() -> None:
    with pytest.raises(RequestError, match=r"^group\.table: found builtins\.list, expected a dict; leave it$"):
        TABLE.check({"_target_": "builtins.list"})
    other = {"_target_": "tests.test_parts.make", "instead": 3}
    TABLE.check(other)
    with pytest.raises(RequestError, match=r"^group\.table: found tests\.test_parts\.make, which made a int, expected"):
        TABLE.build(other)


def test_a_node_that_says_all_must_say_what_its_class_needs() -> None:
    needy = Part("group.pair", tuple, "a pair", "leave it", all=True)
    node = {"_target_": "tests.test_parts.pair", "first": 1}
    with pytest.raises(RequestError, match=r"^group\.pair: .*pair is not given what it needs \(.*'second'\)"):
        needy.check(node)
    needy.check({**node, "second": 2})
    Part("group.pair", tuple, "a pair", "leave it").check(node)


def pair(first: int, second: int) -> tuple[int, int]:
    """Needs both."""
    return first, second
