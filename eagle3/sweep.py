"""What a multirun consists of: its jobs, their names, and the hidden states that they share (beside the walk).

`launchers` runs what is planned here, each job in its folder `<output_dir>/sweeps/<hash of config and grid>/<name>/`.
The same sweep has the same folder and names again, so that it can go on. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import DictConfig, OmegaConf

from eagle3.artifacts import digest
from eagle3.config import Config

# Stages that need hidden states of all the layers that a sweep asks for.
READS_STATES = ("extract", "train", "pipeline")
# What does not change which states are captured, layers apart.
AFTER_STATES = (
    *("stage", "layers", "drafter", "trainer", "logger", "export", "evaluate", "inspect", "runs", "report", "seed"),
)
MAX_NAME = 200


@dataclass(frozen=True)
class Job:
    """One point of the sweep: its folder's name, its overrides, what they compose to."""

    name: str
    overrides: tuple[str, ...]
    cfg: Config


def sweep_id(*, _root_: DictConfig) -> str:
    """Stands for the configuration and the grid of overrides, in whatever order they were written.

    Hydra hands the cache of the sweep's config down to its jobs' configs, which so keep the sweep's id.
    """
    cache = OmegaConf.get_cache(_root_).setdefault("eagle3.sweep_id", {})
    if "" not in cache:
        config = OmegaConf.to_container(application(_root_), resolve=False)
        typed = [str(override) for override in _root_.hydra.overrides.task]
        cache[""] = digest({"config": config, "grid": sorted(map(_grid_line, [*typed, *searched(_root_)]))})
    return cache[""]


def searched(root: DictConfig) -> list[str]:
    """What a sweeper's own configuration adds to the command line: its `params`, where it has some."""
    params = root.hydra.sweeper.get("params") or {}
    return [f"{key}={value}" for key, value in params.items()]


def _grid_line(override: str) -> str:
    """An override with the values that it sweeps over in one order; one that only Hydra can expand stays as it is."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    if not parsed.is_discrete_sweep() or isinstance(parsed.value(), Glob):
        return override
    return f"{parsed.get_key_element()}={','.join(sorted(parsed.sweep_string_iterator()))}"


def application(root: DictConfig) -> DictConfig:
    """A composed configuration without Hydra's own part."""
    return OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])


def job_names(jobs: Sequence[Sequence[str]], typed: Sequence[str] | None = None) -> list[str]:
    """A folder name for each job, distinct, of [A-Za-z0-9._=-] only.

    It is made of the overrides that the sweep varies: those that are not the same throughout in `typed`, the command
    line, where a field may stand twice. Without it, of those that differ between these jobs, which may be a part of the
    sweep only.
    """
    if typed is None:
        counts = Counter(override for overrides in jobs for override in set(overrides))
        fixed = {override for override, count in counts.items() if count == len(jobs)}
        own_of = [[o for o in overrides if o not in fixed] for overrides in jobs]
    else:
        varied = dict(map(override_key, typed))
        last_of = [{o.lstrip("+").split("=")[0]: o for o in overrides} for overrides in jobs]
        own_of = [[o for key, o in last.items() if varied.get(key, True)] for last in last_of]
    names = []
    for overrides, own in zip(jobs, own_of, strict=True):
        words = [o.lstrip("+").replace("[", "").replace("]", "") for o in own or overrides]
        text = "-".join(re.sub(r"[^A-Za-z0-9._=-]+", "-", word) for word in words)
        names.append(text.strip(".-") or "job")
    distinct: dict[str, set[tuple[str, ...]]] = {}
    for name, overrides in zip(names, jobs, strict=True):
        distinct.setdefault(name, set()).add(tuple(overrides))
    return [
        name if len(name) <= MAX_NAME and len(distinct[name]) == 1 else f"{name[:MAX_NAME]}-{digest(list(overrides))}"
        for name, overrides in zip(names, jobs, strict=True)
    ]


def override_key(override: str) -> tuple[str, bool]:
    """The field that an override sets, and whether it sweeps over values."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed.get_key_element().lstrip("+~"), parsed.is_sweep_override()


def union_requests(jobs: Sequence[Job], parallel: bool = False) -> list[tuple[Job, list[Any]]]:
    """For jobs that differ in layers only, as far as states go: one of them, and all selections that they need.

    A selection is a list of ids, a list of fractions, or None for EAGLE's rule. Pipelines and extractions that need
    only one can each make it themselves, unless they run in parallel; trainings make none.
    """
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.cfg.stage.name in READS_STATES and job.cfg.inputs.states is None:
            tree = dataclasses.asdict(job.cfg)
            groups.setdefault(digest({k: v for k, v in tree.items() if k not in AFTER_STATES}), []).append(job)
    found = []
    for members in groups.values():
        selections: list[Any] = []
        for job in members:
            own = job.cfg.layers
            for selection in (own.ids if own.ids is not None else own.fractions, *own.also):
                if selection not in selections:
                    selections.append(selection)
        trains = any(job.cfg.stage.name == "train" for job in members)
        if trains or len(selections) > 1 or (parallel and len(members) > 1):
            found.append((members[0], selections))
    return found
