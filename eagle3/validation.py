"""A composed configuration, checked before anything loads: unknown keys, missing and impossible values, all at once.

Beside the walk: `cli` passes what Hydra composed through `validate` and hands the plain `Config` tree to the stage.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3 import stages
from eagle3.config import Config, ModelConfig
from eagle3.errors import RequestError


def validate(node: DictConfig | dict[str, Any]) -> Config:
    """The typed tree of plain values; RequestError that names every fault.

    Hydra's own checks let `+typo=1` pass, so the composed config is merged into the schema once more.
    """
    node = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    try:
        faults = [_unknown(path) for path in _unknown_keys(OmegaConf.to_container(node, resolve=False), Config, "")]
        faults += [_missing(path) for path in sorted(OmegaConf.missing_keys(node))]
        if faults:
            raise _refusal(faults)
        values = OmegaConf.to_container(node, resolve=True)
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
    except OmegaConfBaseException as error:
        raise RequestError(explain(error)) from error
    assert isinstance(cfg, Config)
    faults = [*out_of_bounds(cfg), *_loggers_without_package(cfg)]
    if faults:
        raise _refusal(faults)
    return cfg


# The packages behind loggers, any of which will do, and the extra of ours that brings one.
LOGGER_PACKAGES = {
    "lightning.pytorch.loggers.WandbLogger": (("wandb",), "wandb"),
    "lightning.pytorch.loggers.TensorBoardLogger": (("tensorboard", "tensorboardX"), "tensorboard"),
    "eagle3.mlflow_runs.MlflowLogger": (("mlflow",), "mlflow"),
}


def _loggers_without_package(cfg: Config) -> Iterator[str]:
    """A line for each tracker that a training could not open: behind the guard nobody would be stopped by it."""
    if cfg.stage.name not in ("train", "pipeline"):
        return
    for label, node in cfg.logger.loggers.items():
        target = node.get("_target_") if isinstance(node, dict) else None
        packages, extra = LOGGER_PACKAGES.get(str(target), ((), ""))
        if packages and not any(find_spec(package) for package in packages):
            yield (
                f"logger.loggers.{label}: its package {packages[0]} is not installed; run `pip install "
                f"'eagle3[{extra}]'`, or choose logger=csv"
            )


def known_depth(model: ModelConfig) -> int | None:
    """How many decoder layers the target has, as far as its config says so without torch and without a download."""
    if model.num_hidden_layers is not None:
        return model.num_hidden_layers
    try:
        config = json.loads((Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the checkpoint is not there yet, or its reader will say what is wrong with it


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


def siblings(path: str) -> list[str]:
    """The dotted names of the fields that stand beside `path` in the schema; none when its group does not exist."""
    group = path.split(".")[:-1]
    schema: Any = Config
    while group:
        hint = typing.get_type_hints(schema).get(group.pop(0))
        form, schema = _schema_of(hint)
        if form == "entries" and group:
            group.pop(0)
        if form == "free":
            return []
    prefix = path.rpartition(".")[0]
    return [f"{prefix}.{item.name}".lstrip(".") for item in dataclasses.fields(schema)]


def _is_open(path: str) -> bool:
    """Whether the path lies in a mapping whose keys the schema does not know, such as arguments of a class."""
    names, schema = path.split(".")[:-1], Config
    while names:
        hint = typing.get_type_hints(schema).get(names.pop(0))
        form, schema = _schema_of(hint)
        if form == "free":
            return typing.get_origin(hint) is dict
        if form == "entries" and names:
            names.pop(0)
    return False


def nearest(path: str) -> list[str]:
    """The fields whose names are most like this one, at most two: first those beside it."""
    name = path.rpartition(".")[2]
    beside = {p.rpartition(".")[2]: p for p in siblings(path)}
    close = [beside[n] for n in difflib.get_close_matches(name, beside, n=2, cutoff=0.6)]
    same_name = [p for p in paths() if p.rpartition(".")[2] == name]
    found = close + same_name or difflib.get_close_matches(path, paths(), n=2, cutoff=0.75)
    return list(dict.fromkeys(found))[:2]


def _unknown(path: str) -> str:
    if path in siblings(path) or _is_open(path):
        return f"{path}: has no value here that could be replaced; add one with +{path}=VALUE"
    if path.startswith("dataset.sources.") and path.count(".") == 2:
        return f"{path}: there is no such source; add one with +{path}.path=FILE"
    if path.startswith("hydra."):
        return f"{path}: Hydra lists no such setting, see `eagle3 --cfg hydra`; a plugin may take it as +{path}=VALUE"
    close = nearest(path)
    if close:
        return f"{path}: there is no such field; did you mean {' or '.join(close)}?"
    group, _, name = path.rpartition(".")
    listed = [p.rpartition(".")[2] for p in siblings(path) or siblings(name)]
    where = group if siblings(path) and group else "the configuration"
    return f"{path}: there is no field '{name}'; {where} has {', '.join(sorted(listed))}; see `eagle3 --cfg job`"


def _missing(path: str) -> str:
    return f"{path}: has no value, and nobody can guess it; add {path}=VALUE to the command line"


def out_of_bounds(value: Any, prefix: str = "") -> Iterator[str]:
    """A line for each field whose value its bounds or choices exclude."""
    for item in dataclasses.fields(value):
        found, path = getattr(value, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(found):
            yield from out_of_bounds(found, f"{path}.")
        elif isinstance(found, dict):
            for name, entry in found.items():
                if dataclasses.is_dataclass(entry):
                    yield from out_of_bounds(entry, f"{path}.{name}.")
                elif entry != "" and item.type == "dict[str, Any]":
                    yield from _not_a_number(entry, f"{path}.{name}")
                elif fault := _fault(entry, f"{path}.{name}", {}):
                    yield fault
        elif found is not None and (fault := _fault(found, path, item.metadata)):
            yield fault


def _not_a_number(found: Any, path: str) -> Iterator[str]:
    """A line for each nan in the arguments of a class, which may well take an empty word or an infinite number."""
    if isinstance(found, dict):
        for name, item in found.items():
            yield from _not_a_number(item, f"{path}.{name}")
    elif isinstance(found, list):
        for i, item in enumerate(found):
            yield from _not_a_number(item, f"{path}[{i}]")
    elif isinstance(found, float) and math.isnan(found):
        yield f"{path}: found nan, expected a number; leave it out for the default"


def _fault(found: Any, path: str, rules: typing.Mapping[str, Any]) -> str | None:
    choices = rules.get("choices")
    if choices is not None and found not in choices:
        close = difflib.get_close_matches(str(found), choices, n=1) or choices[:1]
        return f"{path}: found {found!r}, expected {' or '.join(choices)}; try {path}={close[0]}"
    if "each" in rules:
        count, faults = rules["count"], (_fault(item, f"{path}[{i}]", rules["each"]) for i, item in enumerate(found))
        if count is not None and len(found) != count:
            return f"{path}: found {found}, expected {count} numbers; leave it out for the default"
        return next((fault for fault in faults if fault), None)
    if isinstance(found, list):
        return next((fault for i, item in enumerate(found) if (fault := _fault(item, f"{path}[{i}]", {}))), None)
    if found == "":
        return f"{path}: found nothing after the =, expected a value (is a shell variable not set?); or leave it out"
    finite = not isinstance(found, float) or math.isfinite(found)
    least, most, above, below = (rules.get(name) for name in ("least", "most", "above", "below"))
    if finite and all(limit is None for limit in (least, most, above, below)):
        return None
    fits = (
        finite
        and (least is None or found >= least)
        and (most is None or found <= most)
        and (above is None or found > above)
        and (below is None or found < below)
    )
    if fits:
        return None
    bounds = [("of at least", least), ("above", above), ("of at most", most), ("below", below)]
    expected = " and ".join(f"{word} {limit:.12g}" for word, limit in bounds if limit is not None)
    kind = "a number" if finite else "a finite number"
    return f"{path}: found {found}, expected {f'{kind} {expected}'.strip()}; leave it out for the default"


def _experiments() -> list[str]:
    return [path.name.removesuffix(".yaml") for path in files("eagle3.conf").joinpath("experiment").iterdir()]


TYPES = {"Integer": "a whole number", "Float": "a number", "String": "a word", "bool": "true or false"}


def explain(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """One line for what Hydra or OmegaConf refused: the config path, found and expected, what to write instead.

    `arguments` is the command line, for the errors that do not say which of its words they are about.
    """
    for link in _chain(error):
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            return _explain_option(link)
        if isinstance(link, OverrideParseException):
            return _explain_override(link.override, arguments)
        if isinstance(link, OSError) and link.filename:
            return f"{link.filename}: {link.strerror}; expected a folder that can be created or written"
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_field(link.full_key, str(link).splitlines()[0].strip(), arguments)
    text = " ".join(str(error).split())
    ambiguous = re.match(r"Ambiguous value for argument '([^=]+)=(.*?)' 1\.", text)
    if ambiguous:
        key, value = ambiguous.groups()
        return (
            f"{key}: found {value}, which is neither a list nor, without -m, a sweep; write '{key}=[{value}]' "
            f"(in quotes) for one list, or add -m for one job for each value (lists: -m '{key}=[1,2],[3,4]')"
        )
    unmatched = re.match(r"Could not override '([^']*)'", text)
    if unmatched:
        return _unmatched(unmatched.group(1), arguments)
    listed = next((a for a in arguments if re.match(r"layers=\[?-?\d", a)), None)
    if listed is not None:
        return f"{listed}: found layer ids where a preset's name belongs; write 'layers.ids=[2,15,27]' (in quotes)"
    return text or type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# Launchers and sweepers that come with an extra of ours.
EXTRAS = {"joblib": "sweeps", "submitit_local": "sweeps", "submitit_slurm": "sweeps", "optuna": "sweeps", "ray": "ray"}


def _explain_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = sorted(error.options or [])
    if not group:
        return f"--config-name: there is no config '{option}'; try the default, config"
    if group in ("hydra/launcher", "hydra/sweeper") and option in EXTRAS:
        return f"{group}={option}: its plugin is not installed; run `pip install 'eagle3[{EXTRAS[option]}]'`"
    close = difflib.get_close_matches(option, options, n=1)
    hint = f"did you mean {group}={close[0]}?" if close else "see `eagle3 --help`"
    return f"{group}={option}: there is no such option, expected one of {', '.join(options) or '(none)'}; {hint}"


def _unmatched(name: str, arguments: Sequence[str]) -> str:
    """Hydra found neither a group nor a field of this name among what is composed."""
    given = next((a for a in arguments if a.partition("=")[0] == name), "")
    if not name:
        return f"{given or '='}: is no override, expected FIELD=VALUE or GROUP=OPTION; see `eagle3 --help`"
    if name == "experiment":
        return f"{given}: an experiment comes on top of everything else, so write +{given}"
    return _unknown(name)


def explain_flag(flag: str, value: str) -> str:
    """One line for a flag that does not exist, such as `--stage train`; `value` is what follows it."""
    name = flag.lstrip("-").replace("-", "_")
    close = [name] if name in paths() else nearest(name)
    value = "true" if not value or "=" in value or value.startswith("-") else value
    hint = f"did you mean {close[0]}={value}?" if close else "see `eagle3 --help`"
    return f"{flag}: is no flag, expected FIELD=VALUE or GROUP=OPTION without dashes; {hint}"


def _explain_override(override: str, arguments: Sequence[str]) -> str:
    if "=" not in override and not override.startswith("~"):
        hint = "see `eagle3 --help`" if override.isidentifier() else "quote a list that has spaces in it"
        following = next((b for a, b in itertools.pairwise(arguments) if a == override), "")
        if override in paths() and re.fullmatch(r"[\w.]+", following):
            hint = f"did you mean {override}={following}?"
        elif close := difflib.get_close_matches(override, stages.names(), n=1):
            hint = f"did you mean stage={close[0]}?"
        elif override in _experiments():
            hint = f"did you mean +experiment={override}?"
        return f"{override}: is no override, expected FIELD=VALUE or GROUP=OPTION; {hint}"
    key, _, value = override.partition("=")
    hint = f"put lists in quotes: '{key}=[1, 2, 3]'"
    if value[:1] not in ("[", "{", "'", '"'):
        escaped = value.replace("'", "\\'")
        hint = f"a word with special characters needs quotes of its own inside the shell's: \"{key}='{escaped}'\""
    return f"{key}: cannot read the value {value!r}; {hint}"


def _explain_field(path: str, text: str, arguments: Sequence[str]) -> str:
    if "not in '" in text or "not in struct" in text:
        return _unknown(path)
    if "missing mandatory value" in text:
        return _missing(path)
    if "is not Optional" in text:
        return f"{path}: found null, expected a value; leave it out for the default"
    if "is not a ListConfig" in text:
        given = next((a.partition("=")[2] for a in arguments if a.startswith(f"{path}=")), "...")
        return f"{path}: found a single value, expected a list; write '{path}=[{given}]' (in quotes)"
    found = re.match(r"Value ('.*?') .*(?:converted to|not a valid) (\w+)", text)
    if found and found.group(2) in TYPES:
        value, kind = found.groups()
        return f"{path}: found {value}, expected {TYPES[kind]}; leave it out for the default"
    return f"{path}: {text}; see `eagle3 --cfg job`"
