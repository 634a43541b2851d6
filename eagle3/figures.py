"""The pictures of a report, drawn with matplotlib (beside the walk).

Each function draws one question's answer and returns its figure; `report` saves it as PNG and puts it into the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eagle3.findings import Findings, Selection
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
# As wide as the page, so that its letters have the page's size.
WIDTH = 10.0
SMALL = 9
MARKERS = "oDs^vPX"
TIMES = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
# The colours of what is stacked: softer than those of selections, which they do not stand for.
PARTS = {
    "start": "#cccccc",
    "prepare": "#e5c494",
    "extract": "#fc8d62",
    "train": "#66c2a5",
    "export": "#e78ac3",
    "evaluate": "#a6d854",
    "states read": "#8da0cb",
    "drafter": "#66c2a5",
}


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
    figure, (axes,) = _figure(1.4 + 0.46 * len(shown))
    palette = colours(findings.selections)
    simulated = "simulated_acceptance_length"
    low, high = _frame(findings, shown)
    axes.set_xlim(low, high)
    for row, selection in enumerate(shown):
        colour, mean, spread = palette[selection.label], selection.mean, selection.spread
        assert mean is not None
        if spread is not None:
            # No length is below 1.
            axes.errorbar(
                mean, row, xerr=[[min(spread, mean - 1)], [spread]], color=colour, capsize=4, lw=1.2, zorder=2
            )
            # One from two seeds can be wider than the picture: arrows say that it runs on.
            for edge, marker, beyond in ((low, "<", max(mean - spread, 1) < low), (high, ">", mean + spread > high)):
                if beyond:
                    axes.plot(edge, row, marker, color=colour, ms=7, clip_on=False, zorder=5)
        axes.plot(selection.values, [row] * len(selection.values), "o", color=colour, alpha=0.45, ms=6, zorder=3)
        axes.plot(mean, row, "|", color=colour, ms=20, mew=3, zorder=4)
        words = f"{mean:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
        axes.annotate(words, (mean, row), xytext=(7, 8), textcoords="offset points", fontsize=SMALL)
        if findings.real and (estimates := selection.others(simulated)):
            axes.plot(estimates, [row] * len(estimates), "o", mfc="none", mec="#888888", ms=6, zorder=1)
    for name, dashes in (("untrained", ":"), ("bigram", "--")):
        # Where it lies outside, it would push what is compared into a corner; the page's text names it.
        value = findings.baseline(name)
        if value is not None and low <= value <= high:
            axes.axvline(value, color="#888888", ls=dashes, lw=1, label=f"{name} drafter")
    axes.set_yticks(range(len(shown)), [s.label for s in shown])
    axes.set_ylim(len(shown) - 0.4, -0.7)
    axes.set_xlabel(_measure_name(findings) + ("; hollow: simulated" if findings.real else ""))
    axes.set_title("Dots are seeds, bars their mean and its 95 % interval")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=SMALL)
    return figure


def _frame(findings: Findings, shown: Sequence[Selection]) -> tuple[float, float]:
    """The x axis holds every dot and interval, but no interval that would press all dots into one."""
    values = [value for selection in shown for value in selection.values]
    if findings.real:
        values += [value for selection in shown for value in selection.others("simulated_acceptance_length")]
    reach = max((selection.spread or 0.0 for selection in shown), default=0.0)
    room = max(min(reach, max(values) - min(values)), 0.1 * (max(values) - min(values)), 0.005)
    return max(min(values) - 1.1 * room, 1 - 0.1 * room), max(values) + 1.1 * room


def _measure_name(findings: Findings) -> str:
    if not findings.real:
        return "simulated acceptance length (validation samples)"
    for job in findings.jobs:
        for found in job.metrics_of("evaluate"):
            if "temperature" in found:
                return f"acceptance length (decoded, k = {found['k']}, temperature {found['temperature']:g})"
    return "acceptance length (decoded)"


def positions(selections: Sequence[Selection]) -> Figure | None:
    """The share of drafts accepted at each position, of those whose earlier drafts were accepted."""
    figure, (axes,) = _figure(3.6)
    palette = colours(selections)
    real, most = True, 0
    for number, selection in enumerate(selections[:MOST]):
        found = selection.positions()
        if found is None:
            continue
        rates, real = found
        look = {"marker": MARKERS[number % len(MARKERS)], "color": palette[selection.label], "alpha": 0.85}
        axes.plot(range(1, len(rates) + 1), rates, label=selection.label, ms=6, clip_on=False, **look)
        most = max(most, len(rates))
    if not most:
        return None
    axes.set_xlabel("position of the draft in its round" + ("" if real else " (validation samples)"))
    axes.set_ylabel("accepted, given all before it")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_ylim(0, max(axes.get_ylim()[1], 0.05))
    axes.set_xticks(range(1, most + 1))
    axes.set_xlim(0.9, most + 0.1)
    axes.legend(fontsize=SMALL)
    return figure


def losses(selections: Sequence[Selection]) -> Figure | None:
    """Training and validation loss over optimizer steps, a line for each job."""
    figure, pair = _figure(3.6, 2, sharex=True)
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
                    marker = "o" if len(points) < 10 else "." if len(points) < 40 else ""
                    axes.plot(steps, values, marker=marker, ms=5, lw=1.2, color=palette[selection.label], label=label)
        axes.set_title({"train": "On training batches", "validation": "On validation samples"}[split])
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not drawn:
        return None
    pair[0].legend(fontsize=SMALL)
    return figure


def layer_map(findings: Findings) -> Figure | None:
    """Which layers each selection reads, coloured by its acceptance length, the best on top."""
    shown = [selection for selection in findings.measured if selection.layer_ids][:MOST]
    if not shown:
        return None
    figure, (axes,) = _figure(1.5 + 0.42 * len(shown))
    means = [selection.mean or 0.0 for selection in shown]
    points = [(i, row, means[row]) for row, selection in enumerate(shown) for i in selection.layer_ids or ()]
    for row, selection in enumerate(shown):
        ids = selection.layer_ids or []
        axes.plot([min(ids), max(ids)], [row, row], color="#cccccc", lw=1, zorder=1)
    x, y, values = zip(*points, strict=True)
    dots = axes.scatter(x, y, c=values, cmap="viridis", s=150, zorder=2, edgecolors="white")
    for i, row, _ in points:
        axes.annotate(str(i), (i, row), xytext=(0, -16), textcoords="offset points", ha="center", fontsize=SMALL)
    axes.set_yticks(range(len(shown)), [selection.label for selection in shown])
    axes.set_ylim(len(shown) - 0.3, -0.6)
    axes.set_xlim(-1, max(max(x) + 1, _depth(findings) + 1))
    axes.set_xlabel("layer id: the stream that enters this decoder layer")
    name = "acceptance length" if findings.real else "simulated\nacceptance length"
    figure.colorbar(dots, ax=axes, label=name, shrink=0.9)
    return figure


def _depth(findings: Findings) -> int:
    """The target's number of layers, when the jobs' configurations say it."""
    return max((int((job.config.get("model") or {}).get("num_hidden_layers") or 0) for job in findings.jobs), default=0)


def fields(findings: Findings) -> Figure | None:
    """Acceptance length against each number that the sweep varies, in the selections' colours."""
    numbers = dict(list(findings.numbers().items())[:3])
    if not numbers:
        return None
    figure, row = _figure(3.4, len(numbers), sharey=True)
    palette = colours(findings.selections)
    for axes, (key, points) in zip(row, numbers.items(), strict=True):
        for value, selection in points:
            axes.plot([value] * len(selection.values), selection.values, "o", color=palette[selection.label], ms=7)
        values = [value for value, _ in points]
        if min(values) > 0 and max(values) > 20 * min(values):
            axes.set_xscale("log")
        axes.set_xlabel(key)
    row[0].set_ylabel("acceptance length" if findings.real else "simulated acceptance length")
    return figure


def costs(jobs: Sequence[Record]) -> Figure | None:
    """Time by stage, and bytes read (the states' layers) and made (drafter and export), for each job."""
    shown = [job for job in jobs if job.seconds_of()][:MOST]
    if not shown:
        return None
    figure, (time_axes, byte_axes) = _figure(1.8 + 0.34 * len(shown), 2, sharey=True)
    rows = list(range(len(shown)))
    seconds = {stage: [job.seconds_of().get(stage, 0.0) for job in shown] for stage in _stages(shown)}
    # What no stage took: the imports before the first.
    totals = [float(job.result.get("seconds") or 0.0) for job in shown]
    rest = [max(total - sum(job.seconds_of().values()), 0.0) for total, job in zip(totals, shown, strict=True)]
    unit, per = _unit(max(map(sum, zip(*seconds.values(), rest, strict=True))), TIMES)
    _stack(time_axes, rows, ({"start": rest} if any(rest) else {}) | seconds, per)
    sizes = {
        "states read": [float(job.bytes_read()) for job in shown],
        "drafter": [float(job.bytes_of("drafter")) for job in shown],
        "export": [float(job.bytes_of("export")) for job in shown],
    }
    size_unit, per = _unit(max(map(sum, zip(*sizes.values(), strict=True))), SIZES)
    _stack(byte_axes, rows, {name: values for name, values in sizes.items() if any(values)}, per)
    time_axes.set_yticks(rows, [job.name if len(job.name) <= 40 else f"{job.name[:39]}…" for job in shown])
    time_axes.set_ylim(len(shown) - 0.5, -0.5)
    time_axes.set_xlabel(unit)
    byte_axes.set_xlabel(size_unit)
    for axes, title in ((time_axes, "Time"), (byte_axes, "Bytes")):
        axes.set_title(title)
        axes.grid(visible=False, axis="y")
    figure.legend(*time_axes.get_legend_handles_labels(), fontsize=SMALL, loc="outside lower left", ncols=6)
    figure.legend(*byte_axes.get_legend_handles_labels(), fontsize=SMALL, loc="outside lower right", ncols=3)
    return figure


def _stages(jobs: Sequence[Record]) -> list[str]:
    """The stages that took any time worth a bar in one of the jobs."""
    stages = dict.fromkeys(stage for job in jobs for stage in job.seconds_of())
    longest = max(sum(job.seconds_of().values()) for job in jobs)
    return [stage for stage in stages if any(job.seconds_of().get(stage, 0.0) > 0.005 * longest for job in jobs)]


def _unit(most: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit of which `most` is at least two."""
    return next(((name, size) for name, size in units if most >= 2 * size), units[-1])


def _stack(axes: Axes, rows: Sequence[int], parts: Mapping[str, Sequence[float]], unit: float) -> None:
    left = [0.0] * len(rows)
    for number, (name, given) in enumerate(parts.items()):
        values = [value / unit for value in given]
        axes.barh(rows, values, left=left, color=PARTS.get(name, COLOURS[number % 7]), label=name, height=0.65)
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
    axes.set_ylabel("simulated acceptance length")
    axes.set_title("On validation samples, k drafts a round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=SMALL)
    return figure
