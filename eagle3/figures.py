"""The pictures of a report, drawn with matplotlib (beside the walk).

Each function draws one question's answer and returns its figure; `report` saves it as PNG and puts it into the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eagle3.findings import Findings, Selection, half_width
from eagle3.records import Record

# Okabe and Ito's colours, which stay apart for colour-blind eyes; the pale yellow is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
# More rows than this are no picture; the page's table has them all.
MOST = 24
WIDTH = 8.2


def style() -> AbstractContextManager[None]:
    """How all pictures look; holds while it is entered."""
    return mpl.rc_context(STYLE)


def _figure(height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


def colours(selections: Sequence[Selection]) -> dict[str, str]:
    """A colour for each selection, the same in all pictures; those beyond the palette share grey."""
    return {s.label: COLOURS[i] if i < len(COLOURS) else "#999999" for i, s in enumerate(selections)}


def acceptance(findings: Findings) -> Figure:
    """Acceptance length of each selection: a dot for each seed, the mean, and its 95 % interval."""
    shown = findings.measured[:MOST]
    figure, (axes,) = _figure(1.3 + 0.42 * len(shown))
    palette = colours(findings.selections)
    simulated = "simulated_acceptance_length"
    for row, selection in enumerate(shown):
        colour = palette[selection.label]
        mean = selection.mean
        assert mean is not None
        spread = half_width(selection.values)
        reach = max(abs(value - mean) for value in selection.values)
        if spread is not None:
            # An interval from two seeds can be wider than the picture: it then runs out of it.
            axes.errorbar(mean, row, xerr=spread, color=colour, capsize=4, lw=1.2, zorder=2)
        axes.plot(selection.values, [row] * len(selection.values), "o", color=colour, alpha=0.45, ms=6, zorder=3)
        axes.plot(mean, row, "|", color=colour, ms=20, mew=3, zorder=4)
        axes.annotate(f"{mean:.3f}", (mean + reach, row), xytext=(8, 7), textcoords="offset points", fontsize=9)
        if findings.real and (estimates := selection.others(simulated)):
            axes.plot(estimates, [row] * len(estimates), "o", mfc="none", mec="#888888", ms=6, zorder=1)
    _frame_values(axes, findings, shown)
    for name, dashes in (("untrained", ":"), ("bigram", "--")):
        # Where it lies outside, it would push what is compared into a corner; the page's text names it.
        value = baseline(findings, name)
        if value is not None and axes.get_xlim()[0] <= value <= axes.get_xlim()[1]:
            axes.axvline(value, color="#888888", ls=dashes, lw=1, label=name)
    axes.set_yticks(range(len(shown)), [s.label for s in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(_measure_name(findings) + ("; hollow: simulated" if findings.real else ""))
    axes.set_title("Acceptance length: dots are seeds, bars their mean and its 95 % interval")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=8)
    return figure


def _frame_values(axes: Axes, findings: Findings, shown: Sequence[Selection]) -> None:
    """The x axis holds every dot; not every interval, which for two seeds says only that two are few."""
    values = [value for selection in shown for value in selection.values]
    if findings.real:
        values += [value for selection in shown for value in selection.others("simulated_acceptance_length")]
    room = max((max(values) - min(values)) * 0.15, 0.005)
    axes.set_xlim(min(values) - room, max(values) + room)


def baseline(findings: Findings, name: str) -> float | None:
    """The mean acceptance length of a baseline drafter over the jobs that measured it."""
    found = [f for job in findings.jobs for f in (job.metrics.get("evaluate") or {}, job.metrics) if f.get("baselines")]
    values = [facts["baselines"][name] for facts in found if facts["baselines"].get(name) is not None]
    return statistics.fmean(values) if values else None


def _measure_name(findings: Findings) -> str:
    if not findings.real:
        return "simulated acceptance length (validation samples)"
    for job in findings.jobs:
        for found in (job.metrics.get("evaluate") or {}, job.metrics):
            if "temperature" in found:
                return f"acceptance length (decoded, k = {found['k']}, temperature {found['temperature']:g})"
    return "acceptance length (decoded)"


def positions(selections: Sequence[Selection]) -> Figure | None:
    """The share of drafts accepted at each position, of those whose earlier drafts were accepted."""
    figure, (axes,) = _figure(3.6)
    palette = colours(selections)
    real, most = True, 0
    for selection in selections[:MOST]:
        found = selection.positions()
        if found is None:
            continue
        rates, real = found
        axes.plot(range(1, len(rates) + 1), rates, "o-", color=palette[selection.label], label=selection.label, ms=5)
        most = max(most, len(rates))
    if not most:
        return None
    axes.set_xlabel("position of the draft in its round")
    axes.set_ylabel("accepted, given all before it")
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, most + 1))
    axes.set_title("Acceptance by position" + ("" if real else " (validation samples)"))
    axes.legend(fontsize=8)
    return figure


def losses(selections: Sequence[Selection]) -> Figure | None:
    """Training and validation loss over optimizer steps, a line for each job."""
    figure, pair = _figure(3.4, 2)
    palette = colours(selections)
    drawn = False
    for axes, split in zip(pair, ("train", "validation"), strict=True):
        for selection in selections[:MOST]:
            for number, job in enumerate(selection.jobs):
                points = job.curve(f"{split}/loss")
                label = selection.label if number == 0 else None
                if points:
                    drawn = True
                    steps, values = zip(*points, strict=True)
                    marker = "." if len(points) < 40 else ""
                    axes.plot(steps, values, marker=marker, lw=1.2, color=palette[selection.label], label=label)
        axes.set_title(f"{split} loss")
        axes.set_xlabel("optimizer step")
    if not drawn:
        return None
    pair[0].legend(fontsize=8)
    return figure


def layer_map(findings: Findings) -> Figure | None:
    """Which layers each selection reads, coloured by its acceptance length, the best on top."""
    shown = [selection for selection in findings.measured if selection.layer_ids][:MOST]
    if not shown:
        return None
    figure, (axes,) = _figure(1.4 + 0.36 * len(shown))
    means = [selection.mean or 0.0 for selection in shown]
    points = [(i, row, means[row]) for row, selection in enumerate(shown) for i in selection.layer_ids or ()]
    for row, selection in enumerate(shown):
        ids = selection.layer_ids or []
        axes.plot([min(ids), max(ids)], [row, row], color="#cccccc", lw=1, zorder=1)
    x, y, values = zip(*points, strict=True)
    dots = axes.scatter(x, y, c=values, cmap="viridis", s=150, zorder=2, edgecolors="white")
    for i, row, _ in points:
        axes.annotate(str(i), (i, row), xytext=(0, -13), textcoords="offset points", ha="center", fontsize=7)
    axes.set_yticks(range(len(shown)), [selection.label for selection in shown])
    axes.set_ylim(len(shown) - 0.3, -0.6)
    axes.set_xlim(-1, max(max(x) + 1, _depth(findings) + 1))
    axes.set_xlabel("layer id: the stream that enters this decoder layer")
    axes.set_title("Layers against acceptance length")
    figure.colorbar(dots, ax=axes, label="acceptance length", shrink=0.9)
    return figure


def _depth(findings: Findings) -> int:
    """The target's number of layers, when the jobs' configurations say it."""
    return max((int((job.config.get("model") or {}).get("num_hidden_layers") or 0) for job in findings.jobs), default=0)


def costs(jobs: Sequence[Record]) -> Figure | None:
    """Time by stage, and bytes read (the states' layers) and made (drafter and export), for each job."""
    shown = [job for job in jobs if job.seconds_of()][:MOST]
    if not shown:
        return None
    figure, (time_axes, byte_axes) = _figure(1.7 + 0.32 * len(shown), 2, sharey=True)
    stages = dict.fromkeys(stage for job in shown for stage in job.seconds_of())
    rows = list(range(len(shown)))
    _stack(time_axes, rows, {stage: [job.seconds_of().get(stage, 0.0) for job in shown] for stage in stages})
    sizes = {
        "states read": [job.bytes_read() / 1e6 for job in shown],
        "made": [job.bytes_made() / 1e6 for job in shown],
    }
    _stack(byte_axes, rows, sizes)
    time_axes.set_yticks(rows, [job.name if len(job.name) <= 48 else f"{job.name[:47]}…" for job in shown], fontsize=8)
    time_axes.set_ylim(len(shown) - 0.5, -0.5)
    time_axes.set_xlabel("seconds")
    byte_axes.set_xlabel("MB")
    time_axes.set_title("Time")
    byte_axes.set_title("Bytes")
    figure.legend(*time_axes.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=4)
    figure.legend(*byte_axes.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=2)
    return figure


def _stack(axes: Axes, rows: Sequence[int], parts: Mapping[str, Sequence[float]]) -> None:
    left = [0.0] * len(rows)
    for number, (name, values) in enumerate(parts.items()):
        axes.barh(rows, values, left=left, color=COLOURS[number % len(COLOURS)], label=name, height=0.65)
        left = [a + b for a, b in zip(left, values, strict=True)]


def lengths(job: Record) -> Figure | None:
    """One run's simulated acceptance length over optimizer steps, for each number of drafts."""
    figure, (axes,) = _figure(3.4)
    for k in range(1, 33):
        points = job.curve(f"validation/simulated_acceptance_length/k_{k}")
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, "o-", ms=4, color=COLOURS[(k - 1) % len(COLOURS)], label=f"k = {k}")
    if not axes.lines:
        return None
    axes.set_xlabel("optimizer step")
    axes.set_title("Simulated acceptance length on validation samples, k drafts a round")
    axes.legend(fontsize=8)
    return figure
