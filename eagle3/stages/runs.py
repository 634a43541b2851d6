"""`stage=runs`: what has been run and what has been made, with status, size and lineage.

Beside the walk: it reads run folders and manifests and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from eagle3.artifacts import MANIFEST, Artifact
from eagle3.config import Config
from eagle3.errors import StoreError
from eagle3.progress import duration, size_text
from eagle3.records import folder_bytes, read_json, unfinished
from eagle3.runs import Run

KINDS = ("prepared", "states", "drafter", "export")
# The columns of the two tables; those that a narrow terminal has no room for go, in this order.
RUN_COLUMNS = ("run", "stage", "model", "status", "time", "read", "wrote")
RUN_EXTRAS = ("model", "read", "time", "wrote")
MADE_COLUMNS = ("artifact", "status", "size", "made", "from", "by run")
MADE_EXTRAS = ("made", "by run", "from")
# Rich's frame of a column.
FRAME = 3


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Prints the two tables; returns how many runs and artifacts there are."""
    root = Path(cfg.output_dir).absolute()
    runs = [row for row in run_rows(root) if row["folder"] != run.folder]
    shown = runs[-cfg.runs.limit :]
    cells = [
        {
            **{key: row[key] for key in ("stage", "model", "status")},
            "run": _name(row["folder"], root),
            "time": "" if row["seconds"] is None else duration(row["seconds"]),
            **{way: " ".join(row[way]) for way in ("read", "wrote")},
        }
        for row in shown
    ]
    width = run.console.width
    table = _table(f"runs in {cfg.output_dir}", cells, RUN_COLUMNS, RUN_EXTRAS, width)
    captions = [f"eagle3 -cp {Path(cfg.output_dir) / cells[-1]['run']} repeats the last"] if cells else []
    if len(shown) < len(runs):
        captions.append(f"{len(runs) - len(shown)} older ones left out; runs.limit={len(runs)} shows all")
    table.caption = "\n".join(captions)
    run.show(table)
    artifacts = artifact_rows(run.artifacts.root)
    cells = [{**row, "artifact": row["name"], "by run": row["run"]} for row in artifacts]
    run.show(_table(f"artifacts in {cfg.output_dir}", cells, MADE_COLUMNS, MADE_EXTRAS, width))
    return {"runs": len(runs), "artifacts": len(artifacts), "bytes": sum(row["bytes"] for row in artifacts)}


def _table(title: str, cells: list[dict[str, str]], columns: Sequence[str], extras: Sequence[str], width: int) -> Table:
    """The columns that fit beside each other without breaking a word: names are there to be copied."""
    texts = {column: [column, *(row[column] for row in cells)] for column in columns}
    widths = {column: max(len(word) for text in texts[column] for word in text.split(" ")) for column in columns}
    for extra in extras:
        if _room(widths, width) < 0:
            del widths[extra]
    kept = list(widths)
    for column in kept:
        more = min(_room(widths, width), max(map(len, texts[column])) - widths[column])
        # Negative for a name too long for any terminal, that of a sweep's job: then it is broken.
        widths[column] = max(widths[column] + more, len(column))
    table = Table(title=title)
    for column in kept:
        table.add_column(column, overflow="fold", width=widths[column])
    for row in cells:
        table.add_row(*(row[column] for column in kept))
    return table


def _room(widths: Mapping[str, int], width: int) -> int:
    """What columns of these widths leave of a terminal's; negative when they do not fit."""
    return width - 1 - sum(each + FRAME for each in widths.values())


def _name(folder: Path, root: Path) -> str:
    """A run below the output folder, as `-cp` takes it; stage and model, its folder's last words, have columns."""
    if not folder.is_relative_to(root):
        return str(folder)
    relative = folder.relative_to(root)
    return str(relative) if relative.parts[0] == "sweeps" else "-".join(str(relative).split("-")[:6])


def run_rows(root: Path) -> list[dict[str, Any]]:
    """One row for each run folder, oldest first; a run without a result is running, or was killed."""
    folders = [
        path.parent for pattern in ("runs/*/*", "sweeps/*/*") for path in root.glob(f"{pattern}/provenance.json")
    ]
    rows = []
    for folder in folders:
        facts, result = read_json(folder / "provenance.json"), read_json(folder / "result.json")
        lineage = facts.get("artifacts", {"read": [], "wrote": []})
        rows.append(
            {
                "folder": folder,
                "started": facts.get("started", ""),
                "stage": facts.get("stage", "?"),
                "model": facts.get("model", "?"),
                "status": result.get("status") or ("broken" if not facts else unfinished(facts)),
                "seconds": result.get("seconds"),
                **{way: [f"{e['kind']}/{e['id'][:8]}" for e in lineage[way]] for way in ("read", "wrote")},
            }
        )
    return sorted(rows, key=lambda row: (row["started"], row["folder"]))


def artifact_rows(root: Path) -> list[dict[str, Any]]:
    """One row for each artifact folder: complete, partial, or broken (unreadable, or without a manifest)."""
    rows = []
    for kind in sorted(root.iterdir() if root.is_dir() else [], key=lambda k: (_rank(k.name), k.name)):
        for folder in sorted(path for path in kind.iterdir() if path.is_dir()):
            partial = folder.name.endswith(".partial")
            size = folder_bytes(folder)
            name = f"{kind.name}/{folder.name.removesuffix('.partial')}"
            row = {"name": name, "bytes": size, "size": size_text(size)}
            row |= {"made": "", "from": "", "run": "", "status": "partial" if partial else "complete"}
            if not partial:
                try:
                    manifest = Artifact(kind.name, folder.name, folder).manifest()
                    row["made"] = str(manifest.get("created", ""))[:16].replace("T", " ")
                    row["from"] = " ".join(name[: name.find("/") + 9] for name in manifest.get("made_from", []))
                    maker = manifest.get("run")
                    row["run"] = "" if maker is None else _name((root / maker).resolve(), root.parent.resolve())
                except StoreError:
                    row["status"] = f"broken: {'unreadable' if (folder / MANIFEST).exists() else 'no'} {MANIFEST}"
            rows.append(row)
    return rows


def _rank(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)
