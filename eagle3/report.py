"""One page that shows a sweep's answer, or a run's story: report.html and its pictures as PNG (beside the walk).

The page needs no network and no other file: its pictures are in it as SVG. It is made at the end of each sweep and by
`stage=report`, from what lies in the folder at that moment.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from eagle3 import figures
from eagle3.errors import RequestError
from eagle3.findings import Findings, Selection, read_findings
from eagle3.progress import duration, size_text
from eagle3.records import HEADLINES, INDEX, Record, folder_bytes, read_json

FILE = "report.html"
PICTURES = "report"
CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 960px; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
.meta, figcaption { color: #555; font-size: .9rem; } .verdict { background: #eef5fb; border-left: 4px solid #0072b2;
  padding: .7rem 1rem; margin: 1rem 0; } .verdict p { margin: .15rem 0; } .verdict p:first-child { font-weight: 600; }
.verdict p:last-child { margin-top: .5rem; } figure { margin: .6rem 0 0; } img { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #e2e2e2; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
.bad { color: #a11; } code { font-size: .88em; }
th { color: #555; font-weight: 600; } tbody tr:hover { background: #f6f8fa; } .dot { font-size: 1.1em; }
"""


def write_report(folder: Path) -> Path:
    """Writes the report of a sweep folder or of a run folder into it; returns the page.

    RequestError when the folder is neither.
    """
    is_sweep = (folder / INDEX).is_file()
    if not is_sweep and not (folder / "config.yaml").is_file():
        raise RequestError(
            f"report.folder: {folder} holds neither {INDEX} of a sweep nor config.yaml of a run; see stage=runs"
        )
    with figures.style():
        title, body, pictures = _sweep(folder) if is_sweep else _run(folder)
        (folder / PICTURES).mkdir(exist_ok=True)
        for old in (folder / PICTURES).glob("*.png"):
            old.unlink()
        for name, figure in pictures.items():
            figure.savefig(folder / PICTURES / f"{name}.png", dpi=150)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )
    temporary = folder / f".{FILE}"
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, folder / FILE)
    return folder / FILE


def _sweep(folder: Path) -> tuple[str, str, dict[str, Figure]]:
    findings = read_findings(folder)
    pictures = {
        "acceptance": figures.acceptance(findings) if findings.measured else None,
        "layers": figures.layer_map(findings),
        "fields": figures.fields(findings),
        "positions": figures.positions(findings.measured),
        "losses": figures.losses(findings.selections),
        "costs": figures.costs(findings.jobs),
    }
    drawn = {name: figure for name, figure in pictures.items() if figure is not None}
    counts: dict[str, int] = {}
    for job in findings.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    title = "Sweep over " + (" and ".join(findings.varied[-3:]) or "nothing")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="meta">{escape(_about(findings.jobs))} · {escape(folder.name)} · {len(findings.jobs)} jobs: '
        f"{', '.join(f'{count} {status}' for status, count in counts.items())}</p>",
        '<div class="verdict">' + "".join(f"<p>{escape(line)}</p>" for line in findings.verdict()),
        f"{_best(findings)}</div>",
        _section("Acceptance length", drawn.get("acceptance"), _acceptance_words(findings)),
        _section("Selections", None, "", _selection_table(findings)),
        _section(
            "Layers",
            drawn.get("layers"),
            "Each row is a selection, the best on top; its dots stand at the layers that its drafters read.",
        ),
        _section("Fields", drawn.get("fields"), "A dot for each job, in its selection's colour."),
        _section(
            "Positions",
            drawn.get("positions"),
            "Of the rounds whose earlier drafts were all accepted, the share in which this one was; mean over seeds.",
        ),
        _section("Loss", drawn.get("losses"), "One line for each job. Losses of different unrolls do not compare."),
        _section(
            "Time and bytes",
            drawn.get("costs"),
            "Of each job's last attempt, by stage; what all jobs share was made before the first. Bytes of the stored "
            "states that its drafter read, and of the drafter and export that it made or found.",
        ),
        _section(
            "Jobs",
            None,
            "Length is the decoded acceptance length; tokens/s are those of training.",
            _job_table(findings),
        ),
    ]
    return title, "\n".join(filter(None, parts)), drawn


def _run(folder: Path) -> tuple[str, str, dict[str, Figure]]:
    record = Record(folder)
    alone = [Selection(record.layers or record.name, [record], "acceptance_length")]
    pictures = {
        "lengths": figures.lengths(record),
        "positions": figures.positions(alone),
        "losses": figures.losses(alone),
        "costs": figures.costs([record]),
    }
    drawn = {name: figure for name, figure in pictures.items() if figure is not None}
    numbers = [(name.replace("_", " "), record.headline(name)) for name in HEADLINES]
    facts = [(name, f"{value:,.3f}") for name, value in numbers if value is not None]
    if (spread := alone[0].spread) is not None:
        facts.insert(1, ("its uncertainty", f"± {spread:.3f} (95 %, {alone[0].basis})"))
    named = dict.fromkeys((record.layers, str(record.layer_ids or "")))
    facts += [("status", record.status), ("layers", " ".join(named).strip())]
    if record.result.get("seconds") is not None:
        facts.append(("time", duration(record.result["seconds"])))
    title = f"Run {folder.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="meta">{escape(_about([record]))}</p>',
        _table(("", ""), [[escape(name), escape(str(value))] for name, value in facts]),
        _error(record),
        _section("Simulated acceptance length", drawn.get("lengths")),
        _section("Positions", drawn.get("positions")),
        _section("Loss", drawn.get("losses")),
        _section("Time and bytes", drawn.get("costs")),
        _section("Walk", None, "What it read and wrote, and what that was made from.", _walk(record)),
    ]
    return title, "\n".join(filter(None, parts)), drawn


def _about(jobs: Sequence[Record]) -> str:
    """Model, machine and versions, from the first job that has begun."""
    facts = next((job.provenance for job in jobs if job.provenance), {})
    versions = facts.get("versions", {})
    named = [f"{name} {versions[name]}" for name in ("eagle3", "torch") if name in versions]
    words = [facts.get("model"), facts.get("stage"), facts.get("started", "")[:16].replace("T", " "), *named]
    return " · ".join(str(word) for word in words if word)


def _best(findings: Findings) -> str:
    """Where the drafter to serve is: the export of the best job, or its drafter when it exported none."""
    job = findings.best
    folder = None if job is None else job.artifact("export") or job.artifact("drafter")
    if job is None or folder is None:
        return ""
    path = escape(os.path.relpath(folder, findings.folder))
    return f'<p>Its best job: {_link(job)}; its {folder.parent.name}: <a href="{path}/"><code>{path}</code></a>.</p>'


def _link(job: Record) -> str:
    return f'<a href="{escape(job.name)}/">{escape(job.name)}</a>' if job.folder.is_dir() else escape(job.name)


def _acceptance_words(findings: Findings) -> str:
    sure = " Intervals are over seeds and, where prompts were decoded, over prompts; one that ends in an arrow runs on."
    if findings.real:
        found = [(name, findings.baseline(name)) for name in ("untrained", "bigram")]
        baselines = ", ".join(f"{name} {value:.3f}" for name, value in found if value is not None)
        words = "Tokens that each forward of the target yields when the drafter is in the loop; 1 is no help at all."
        return words + (f" Baselines: {baselines}." if baselines else "") + sure
    return (
        "What serving would accept, walked over validation samples with the states that are stored; nothing decoded."
        + sure
    )


def _section(title: str, figure: Figure | None, words: str = "", content: str = "") -> str:
    if figure is None and not content:
        return ""
    picture = "" if figure is None else f'<figure><img alt="{escape(title)}" src="{_data(figure)}"></figure>'
    return f"<h2>{escape(title)}</h2>\n<p class='meta'>{escape(words)}</p>{picture}{content}"


def _data(figure: Figure) -> str:
    """A figure as an SVG that stands in the page itself."""
    buffer = io.BytesIO()
    # The same results give the same page.
    with mpl.rc_context({"svg.hashsalt": "eagle3"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; columns whose head starts with '#' hold numbers."""
    kinds = [' class="n"' if name.startswith("#") else "" for name in head]
    heads = "".join(f"<th{kind}>{escape(name.lstrip('#'))}</th>" for name, kind in zip(head, kinds, strict=True))
    lines = ["".join(f"<td{kind}>{c}</td>" for c, kind in zip(row, kinds, strict=True)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    top = f"<thead><tr>{heads}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def _number(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _selection_table(findings: Findings) -> str:
    rows = []
    colours = figures.colours(findings.selections)
    for selection in findings.selections:
        spread = selection.spread
        simulated = selection.others("simulated_acceptance_length")
        losses = selection.others("loss")
        ids = "" if selection.layer_ids is None else ", ".join(map(str, selection.layer_ids))
        rows.append(
            [
                f'<span class="dot" style="color:{colours[selection.label]}">●</span> {escape(selection.label)}',
                *(escape(ids), str(len(selection.values)), f"{selection.rounds:,}" if selection.rounds else ""),
                _number(selection.mean),
                "" if spread is None else f"± {spread:.3f}",
                *("" if not found else _number(sum(found) / len(found)) for found in (simulated, losses)),
            ]
        )
    head = ("selection", "layers", "#seeds", "#rounds", "#acceptance length", "#95 %", "#simulated", "#train loss")
    return _table(head, rows)


def _job_table(findings: Findings) -> str:
    rows = []
    for job in findings.jobs:
        seconds = job.result.get("seconds")
        bad = "" if job.status in ("done", "dry run", "running", "waiting", "starting") else ' class="bad"'
        rows.append(
            [
                _link(job) + _error(job),
                f"<span{bad}>{escape(job.status)}</span>",
                *(_number(job.headline(name)) for name in ("acceptance_length", "simulated_acceptance_length", "loss")),
                _number(job.headline("tokens_per_s"), 0),
                "" if seconds is None else duration(seconds),
                *(size_text(size) if size else "" for size in (job.bytes_read(), job.bytes_made())),
            ]
        )
    head = ("job", "status", "#length", "#simulated", "#train loss", "#tokens/s", "#time", "#states read", "#made")
    return _table(head, rows)


def _error(job: Record) -> str:
    message = job.result.get("error")
    if not message:
        return ""
    logs = [name for name in ("run.log", "console.log") if (job.folder / name).is_file()]
    links = " ".join(f'<a href="{escape(job.name)}/{name}">{name}</a>' for name in logs)
    return f'<br><span class="bad">{escape(message)}</span> {links}'


def _walk(record: Record) -> str:
    """The artifacts of a run and, recursively, what they were made from, the latest first."""
    found: dict[str, tuple[Path, str]] = {}
    for entry in reversed(record.lineage):
        found.setdefault(f"{entry['kind']}/{entry['id']}", (Path(entry["folder"]), entry["way"]))
    queue = list(found)
    rows = []
    while queue:
        name = queue.pop(0)
        folder, way = found[name]
        manifest: Mapping[str, Any] = read_json(folder / "manifest.json")
        for source in manifest.get("made_from", []):
            if source not in found:
                found[source] = (folder.parent.parent / source, "before")
                queue.append(source)
        link = escape(os.path.relpath(folder, record.folder))
        made_from = ", ".join(str(source)[: str(source).find("/") + 9] for source in manifest.get("made_from", []))
        size = size_text(folder_bytes(folder)) if folder.is_dir() else "gone"
        created = str(manifest.get("created", ""))[:16].replace("T", " ")
        label = f'<a href="{link}/">{escape(name)}</a>'
        rows.append([label, way, size, escape(created), escape(made_from)])
    return _table(("artifact", "by this run", "#size", "made", "from"), rows)
