"""A composed configuration, checked before anything loads: unknown keys, missing and impossible values, all at once.

Beside the walk: `cli` passes what Hydra composed through `validate` and hands the plain `Config` tree to the stage.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3.config import Config
from eagle3.errors import RequestError


def validate(node: DictConfig | dict[str, Any]) -> Config:
    """The typed tree of plain values; RequestError that names every fault.

    Hydra's own checks let `+typo=1` pass, so the composed config is merged into the schema once more.
    """
    node = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    faults = [_unknown(path) for path in _unknown_keys(OmegaConf.to_container(node, resolve=False), Config, "")]
    faults += [_missing(path) for path in sorted(OmegaConf.missing_keys(node))]
    if faults:
        raise _refusal(faults)
    try:
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), node))
    except OmegaConfBaseException as error:
        raise RequestError(explain(error)) from error
    assert isinstance(cfg, Config)
    faults = list(_out_of_bounds(cfg, ""))
    if faults:
        raise _refusal(faults)
    return cfg


def _refusal(faults: list[str]) -> RequestError:
    if len(faults) == 1:
        return RequestError(faults[0])
    return RequestError("\n  ".join([f"{len(faults)} faults in the configuration:", *faults]))


def _schema_of(hint: Any) -> tuple[str, Any]:
    """What a field's type says about its children: ("group", dataclass), ("entries", dataclass) or ("free", None)."""
    if dataclasses.is_dataclass(hint):
        return "group", hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            if dataclasses.is_dataclass(argument):
                return "group", argument
    if origin is dict and dataclasses.is_dataclass(arguments[1]):
        return "entries", arguments[1]
    return "free", None


def paths(schema: Any = Config, prefix: str = "") -> list[str]:
    """The dotted names of all fields of the schema, groups included."""
    found: list[str] = []
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        found.append(prefix + item.name)
        form, inner = _schema_of(hints[item.name])
        if form == "group":
            found += paths(inner, f"{prefix}{item.name}.")
    return found


def _unknown_keys(value: Any, schema: Any, prefix: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    hints = typing.get_type_hints(schema)
    for key, item in value.items():
        if key not in hints:
            yield f"{prefix}{key}"
            continue
        form, inner = _schema_of(hints[key])
        if form == "group":
            yield from _unknown_keys(item, inner, f"{prefix}{key}.")
        elif form == "entries" and isinstance(item, dict):
            for name, entry in item.items():
                yield from _unknown_keys(entry, inner, f"{prefix}{key}.{name}.")


def nearest(path: str) -> list[str]:
    """The fields whose names are most like this one: those of the same group first."""
    group, _, name = path.rpartition(".")
    known = paths()
    siblings = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == group}
    close = [siblings[n] for n in difflib.get_close_matches(name, siblings, n=2, cutoff=0.6)]
    same_name = [p for p in known if p.rpartition(".")[2] == name and p not in close]
    return (close + same_name + difflib.get_close_matches(path, known, n=2, cutoff=0.75))[:2]


def _unknown(path: str) -> str:
    group, _, name = path.rpartition(".")
    close = nearest(path)
    if close:
        return f"{path}: there is no such field; did you mean {' or '.join(dict.fromkeys(close))}?"
    siblings = sorted(p.rpartition(".")[2] for p in paths() if p.rpartition(".")[0] == group)
    where = f"`{group}` has" if siblings and group else "the configuration has"
    listed = siblings or [f.name for f in dataclasses.fields(Config)]
    return f"{path}: there is no field '{name}'; {where} {', '.join(listed)}; see `eagle3 --cfg job`"


def _missing(path: str) -> str:
    return f"{path}: has no value, and nobody can guess it; add {path}=VALUE to the command line"


def _out_of_bounds(value: Any, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(value):
        found, path = getattr(value, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(found):
            yield from _out_of_bounds(found, f"{path}.")
        elif isinstance(found, dict):
            for name, entry in found.items():
                if dataclasses.is_dataclass(entry):
                    yield from _out_of_bounds(entry, f"{path}.{name}.")
        elif found is not None and (fault := _fault(found, path, item.metadata)):
            yield fault


def _fault(found: Any, path: str, rules: typing.Mapping[str, Any]) -> str | None:
    choices = rules.get("choices")
    if choices is not None and found not in choices:
        close = difflib.get_close_matches(str(found), choices, n=1) or choices[:1]
        return f"{path}: found {found!r}, expected {' or '.join(choices)}; try {path}={close[0]}"
    least, most, above = rules.get("least"), rules.get("most"), rules.get("above")
    if all(limit is None for limit in (least, most, above)):
        return None
    fits = (
        found == found  # NaN fits nowhere
        and (least is None or found >= least)
        and (most is None or found <= most)
        and (above is None or found > above)
    )
    if fits:
        return None
    bounds = [("at least", least), ("above", above), ("at most", most)]
    expected = " and ".join(f"{word} {limit:g}" for word, limit in bounds if limit is not None)
    return f"{path}: found {found}, expected a number {expected}; leave it out for the default"


def explain(error: BaseException) -> str:
    """One line for what Hydra or OmegaConf refused: the config path, found and expected, what to write instead."""
    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    for link in chain:
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_omegaconf(link)
    text = " ".join(str(error).split())
    return text or type(error).__name__


TYPES = {"Integer": "a whole number", "Float": "a number", "String": "a word", "Boolean": "true or false"}


def _explain_omegaconf(error: OmegaConfBaseException) -> str:
    path = str(error.full_key)
    first = str(error).splitlines()[0].strip()
    if "not in '" in first or "not in struct" in first:
        return _unknown(path)
    for name, words in TYPES.items():
        if first.endswith(f"could not be converted to {name}"):
            value = first[first.find("'") : first.find(" of type")]
            return f"{path}: found {value}, expected {words}"
    return f"{path}: {first}"
