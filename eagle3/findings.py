"""What a sweep found: its selections, their spread over seeds, and which one to use (beside the walk).

A selection is what its jobs share when the seed is left out. Numbers are acceptance lengths: those of decoding where
the sweep decoded, else the simulated ones of validation. Their uncertainty has two parts, which add up as squares:
other seeds would train other drafters, and other prompts would be easier or harder to draft for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eagle3.records import INDEX, Record, read_json

ENOUGH_PROMPTS = 8
# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; beyond, its expansion (Abramowitz and Stegun, 26.7.5)
# is good to 0.1 %.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    quantile = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + (2.3724 + 2.8224 / freedom) / freedom
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def together(*parts: float | None) -> float | None:
    """Half of an interval out of the halves of independent ones, of which some may be unknown."""
    known = [part for part in parts if part is not None]
    return math.hypot(*known) if known else None


def influences(job: Record) -> dict[str, float]:
    """How far each prompt pulls a job's acceptance length, 1 + accepted drafts / rounds, away from what it is.

    Times their number and as a sample of independent values, they have that ratio's uncertainty (the linearization that
    surveys use for ratios).
    """
    rounds = sum(count for _, count in job.prompts.values())
    rate = sum(accepted for accepted, _ in job.prompts.values()) / rounds if rounds else 0.0
    return {key: (accepted - rate * count) / rounds for key, (accepted, count) in job.prompts.items()}


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

    @cached_property
    def pulls(self) -> dict[str, float]:
        """The influence of each prompt that all its jobs decoded, averaged over them."""
        found = [influences(job) for job in self.jobs if job.prompts and job.headline(self.measure) is not None]
        common = [key for key in found[0] if all(key in other for other in found)] if found else []
        return {key: statistics.fmean(pulls[key] for pulls in found) for key in common}

    @cached_property
    def rounds(self) -> int:
        """How often its drafters drafted while they were measured."""
        return sum(rounds for _, rounds in map(_counts, self.jobs))

    @property
    def chance(self) -> float | None:
        """Half of the 95 % interval if each draft were accepted or not by itself; one more makes none count as few."""
        accepted = sum(accepted for accepted, _ in map(_counts, self.jobs))
        return 1.96 * math.sqrt(accepted + 1) / self.rounds if self.rounds else None

    @property
    def spread(self) -> float | None:
        """Half of the 95 % interval of its mean, over seeds and prompts as far as they are known."""
        return together(half_width(self.values), over_prompts(self.pulls.values(), self.chance))

    @property
    def basis(self) -> str:
        """What its mean rests on, in words."""
        seeds = f"{len(self.values)} seeds" if len(self.values) > 1 else "one seed"
        prompts = f", {len(self.pulls)} prompts" if self.pulls else ""
        return f"{seeds}{prompts}" + (f", {self.rounds:,} rounds" if self.rounds else "")

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


def over_prompts(pulls: Iterable[float], chance: float | None) -> float | None:
    """Half of the 95 % interval that the choice of prompts makes, from their influences.

    Few prompts can agree by luck: then, and where nobody counted by prompt, it is `chance` at least.
    """
    pulls = list(pulls)
    known = [half_width([pull * len(pulls) for pull in pulls])]
    if len(pulls) < ENOUGH_PROMPTS:
        known.append(chance)
    return max((width for width in known if width is not None), default=None)


def _counts(job: Record) -> tuple[float, int]:
    """Accepted drafts and rounds of a job's evaluation."""
    for found in job.metrics_of("evaluate"):
        if found.get("rounds") and found.get("accepted_drafts") is not None:
            return found["accepted_drafts"] * found["rounds"], found["rounds"]
    return 0.0, 0


@dataclass
class Findings:
    """A sweep folder as it is now: `jobs` in the order of its index, `selections` the best first, `varied` the fields
    in which jobs differ."""

    folder: Path
    jobs: list[Record]
    selections: list[Selection]
    measure: str
    varied: list[str]

    @property
    def measured(self) -> list[Selection]:
        """The selections with at least one finished job."""
        return [selection for selection in self.selections if selection.mean is not None]

    @property
    def best(self) -> Record | None:
        """The best job of the best selection."""
        jobs = [job for job in self.measured[0].jobs if job.headline(self.measure)] if self.measured else []
        return max(jobs, key=lambda job: job.headline(self.measure) or 0.0, default=None)

    @property
    def real(self) -> bool:
        """Whether acceptance was measured by decoding."""
        return self.measure == "acceptance_length"

    def numbers(self) -> dict[str, list[tuple[float, Selection]]]:
        """The fields that the sweep varies over at least three numbers, each with its value for every selection."""
        found: dict[str, list[tuple[float, Selection]]] = {}
        for key in self.varied:
            points = [(_as_number(s.jobs[0].given.get(key)), s) for s in self.measured]
            known = [(value, selection) for value, selection in points if value is not None]
            if key != "seed" and len({value for value, _ in known}) >= 3:
                found[key] = known
        return found

    def baseline(self, name: str) -> float | None:
        """The mean acceptance length of a baseline drafter over the jobs that measured it."""
        found = [f for job in self.jobs for f in job.metrics_of("evaluate") if f.get("baselines")]
        values = [facts["baselines"][name] for facts in found if facts["baselines"].get(name) is not None]
        return statistics.fmean(values) if values else None

    def verdict(self) -> list[str]:
        """The recommendation in sentences: what leads, how sure that is, and what would make it surer."""
        name = "acceptance length" if self.real else "simulated acceptance length"
        ranked = self.measured
        if not ranked:
            return ["No job has measured an acceptance length yet."]
        best = ranked[0]
        assert best.mean is not None
        sure = f" ± {best.spread:.3f} (95 %, {best.basis})" if best.spread is not None else f" ({best.basis})"
        layer_ids = f", layers {best.layer_ids}" if best.layer_ids else ""
        lines = [f"Use {best.label}{layer_ids}: {name} {best.mean:.3f}{sure}."]
        for baseline in ("untrained", "bigram"):
            beaten = self.baseline(baseline)
            if self.real and beaten is not None and best.mean <= beaten:
                lines.append(f"That is no better than the {baseline} drafter, {beaten:.3f}: train longer.")
        lines += self._compared(best, ranked[1:])
        if not self.real:
            lines.append("Nothing was decoded: stage=pipeline, or stage=evaluate, measures the real acceptance length.")
        return lines

    def _compared(self, best: Selection, rivals: Sequence[Selection]) -> list[str]:
        if not rivals:
            return []
        lines = [_lead(best, rival) for rival in rivals[:3]]
        if len(best.values) == 1 and all(len(rival.values) == 1 for rival in rivals):
            lines.append("One seed cannot tell a difference from luck: add seed=0,1,2 to the sweep.")
        elif any(_close(best, rival) for rival in rivals):
            more = "more seeds and prompts (evaluate.prompts_per_set)" if best.pulls else "more seeds"
            lines.append(f"Where the lead is smaller than its uncertainty the order may be luck; {more} narrow it.")
        return lines


def _difference(best: Selection, rival: Selection) -> tuple[float, float | None]:
    """How far `best` is ahead, and half of the difference's 95 % interval over the seeds and prompts that both have."""
    common = [seed for seed in best.by_seed if seed in rival.by_seed]
    pairs = [best.by_seed[seed] - rival.by_seed[seed] for seed in common]
    pulls = [pull - rival.pulls[key] for key, pull in best.pulls.items() if key in rival.pulls]
    prompts = over_prompts(pulls, together(best.chance, rival.chance))
    if len(pairs) >= 2:
        return statistics.fmean(pairs), together(half_width(pairs), prompts)
    return (best.mean or 0.0) - (rival.mean or 0.0), prompts


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
    every = _varied([job.given for job in jobs])
    varied = [key for key in every if key != "seed"]
    groups: dict[str, list[Record]] = {}
    for job in jobs:
        groups.setdefault(_label(job, varied), []).append(job)
    selections = [Selection(label, members, measure) for label, members in groups.items()]
    # Those without a result come last, in the order of the sweep.
    selections.sort(key=lambda selection: -(selection.mean or 0.0))
    return Findings(folder, jobs, selections, measure, every)


def _seed(job: Record) -> str:
    return job.given.get("seed", str(job.config.get("seed", 0)))


def _varied(given: Sequence[Mapping[str, str]]) -> list[str]:
    """The fields in which jobs differ."""
    keys = dict.fromkeys(key for overrides in given for key in overrides)
    return [key for key in keys if len({overrides.get(key) for overrides in given}) > 1]


def _label(job: Record, varied: Sequence[str]) -> str:
    given = job.given
    if not varied:
        return job.layers or "all jobs"
    if len(varied) == 1:
        key = varied[0]
        value = given.get(key, "default")
        return value if key.startswith("layers") else f"{key}={value}"
    return " ".join(f"{key.removeprefix('layers.')}={_short(given[key])}" for key in varied if key in given)


def _as_number(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _short(value: str) -> str:
    try:
        return f"{float(value):.3g}" if "." in value or "e" in value else value
    except ValueError:
        return value
