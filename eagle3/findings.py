"""What a sweep found: its selections, their spread over seeds, and which one to use (beside the walk).

A selection is what its jobs share when the seed is left out. Numbers are acceptance lengths: those of decoding where
the sweep decoded, else the simulated ones of validation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eagle3.records import INDEX, Record, read_json

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; beyond, a fit that is good to 0.2 %.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    quantile = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.5 / freedom
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


@dataclass
class Selection:
    """The jobs that differ in nothing but the seed; `measure` is the headline that the sweep is judged by."""

    label: str
    jobs: list[Record]
    measure: str

    @cached_property
    def by_seed(self) -> dict[str, float]:
        """The measure of each finished job under its seed."""
        return {_seed(job): value for job in self.jobs if (value := job.headline(self.measure)) is not None}

    @property
    def values(self) -> list[float]:
        """The measures of all finished jobs."""
        return list(self.by_seed.values())

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None when no job is done."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def layer_ids(self) -> list[int] | None:
        """The layers that its drafters read."""
        return next((job.layer_ids for job in self.jobs if job.layer_ids), None)

    def others(self, measure: str) -> list[float]:
        """Another headline of its finished jobs."""
        return [value for job in self.jobs if (value := job.headline(measure)) is not None]

    def positions(self) -> tuple[list[float], bool] | None:
        """The acceptance at each position, averaged over its jobs, and whether it was measured by decoding."""
        found = [positions for job in self.jobs if (positions := job.positions())]
        if not found:
            return None
        length = min(len(rates) for rates, _ in found)
        return [statistics.fmean(rates[i] for rates, _ in found) for i in range(length)], found[0][1]


@dataclass
class Findings:
    """A sweep folder as it is now: `jobs` in the order of its index, `selections` the best first."""

    folder: Path
    jobs: list[Record]
    selections: list[Selection]
    measure: str

    @property
    def measured(self) -> list[Selection]:
        """The selections with at least one finished job."""
        return [selection for selection in self.selections if selection.mean is not None]

    @property
    def real(self) -> bool:
        """Whether acceptance was measured by decoding."""
        return self.measure == "acceptance_length"

    def verdict(self) -> list[str]:
        """The recommendation in sentences: what leads, how sure that is, and what would make it surer."""
        name = "acceptance length" if self.real else "simulated acceptance length"
        ranked = self.measured
        if not ranked:
            return ["No job has measured an acceptance length yet."]
        best = ranked[0]
        assert best.mean is not None
        spread = half_width(best.values)
        seeds = f"{len(best.values)} seed{'s' * (len(best.values) > 1)}"
        sure = f" ± {spread:.3f} (95 %, {seeds})" if spread is not None else " (one seed)"
        layer_ids = f", layers {best.layer_ids}" if best.layer_ids else ""
        lines = [f"Use {best.label}{layer_ids}: {name} {best.mean:.3f}{sure}."]
        if len(ranked) == 1:
            return lines
        lines += [_lead(best, rival) for rival in ranked[1:4]]
        if all(_difference(best, rival)[1] is None for rival in ranked[1:]):
            lines.append("One seed cannot tell a difference from luck: add seed=0,1,2 to the sweep.")
        elif any(_close(best, rival) for rival in ranked[1:]):
            lines.append("Where the lead is smaller than its uncertainty the order may be luck; more seeds narrow it.")
        if not self.real:
            lines.append("Nothing was decoded: stage=pipeline, or stage=evaluate, measures the real acceptance length.")
        return lines


def _difference(best: Selection, rival: Selection) -> tuple[float, float | None]:
    """How far `best` is ahead, and half of that difference's 95 % interval over the seeds that both have."""
    common = [seed for seed in best.by_seed if seed in rival.by_seed]
    pairs = [best.by_seed[seed] - rival.by_seed[seed] for seed in common]
    if len(pairs) >= 2:
        return statistics.fmean(pairs), half_width(pairs)
    return (best.mean or 0.0) - (rival.mean or 0.0), None


def _close(best: Selection, rival: Selection) -> bool:
    lead, uncertainty = _difference(best, rival)
    return uncertainty is not None and lead <= uncertainty


def _lead(best: Selection, rival: Selection) -> str:
    lead, uncertainty = _difference(best, rival)
    if uncertainty is None:
        return f"It is {lead:.3f} ahead of {rival.label}; with one seed in common nobody knows how sure that is."
    verdict = "a difference" if lead > uncertainty else "no clear difference"
    return f"It is {lead:.3f} ± {uncertainty:.3f} ahead of {rival.label}: {verdict}."


def read_findings(folder: Path) -> Findings:
    """Reads a sweep folder."""
    index: Mapping[str, Sequence[str]] = read_json(folder / INDEX)
    jobs = [Record(folder / name, tuple(overrides)) for name, overrides in index.items()]
    measure = "acceptance_length"
    if all(job.headline(measure) is None for job in jobs):
        measure = "simulated_acceptance_length"
    varied = _varied([_given(job) for job in jobs])
    groups: dict[str, list[Record]] = {}
    for job in jobs:
        groups.setdefault(_label(job, varied), []).append(job)
    selections = [Selection(label, members, measure) for label, members in groups.items()]
    # Those without a result come last, in the order of the sweep.
    selections.sort(key=lambda selection: -(selection.mean or 0.0))
    return Findings(folder, jobs, selections, measure)


def _given(job: Record) -> dict[str, str]:
    return dict(o.lstrip("+").split("=", 1) for o in job.overrides if "=" in o)


def _seed(job: Record) -> str:
    return _given(job).get("seed", str(job.config.get("seed", 0)))


def _varied(given: Sequence[Mapping[str, str]]) -> list[str]:
    """The fields in which jobs differ, the seed left out."""
    keys = dict.fromkeys(key for overrides in given for key in overrides if key != "seed")
    return [key for key in keys if len({overrides.get(key) for overrides in given}) > 1]


def _label(job: Record, varied: Sequence[str]) -> str:
    given = _given(job)
    if not varied:
        return job.layers or "all jobs"
    if len(varied) == 1:
        key = varied[0]
        value = given.get(key, "default")
        return value if key.startswith("layers") else f"{key}={value}"
    return " ".join(f"{key.removeprefix('layers.')}={_short(given[key])}" for key in varied if key in given)


def _short(value: str) -> str:
    try:
        return f"{float(value):.3g}" if "." in value or "e" in value else value
    except ValueError:
        return value
