"""`stage=runs`: what has been run and what has been made, with status, size and lineage.

Beside the walk: it reads run folders and manifests and changes nothing.
"""

from __future__ import annotations

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


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Prints the two tables; returns how many runs and artifacts there are."""
    root = Path(cfg.output_dir).absolute()
    runs = [row for row in run_rows(root) if row["folder"] != run.folder]
    shown = runs[-cfg.runs.limit :]
    table = _table(f"runs in {cfg.output_dir}", "run", "stage", "model", "status", "time", "read", "wrote")
    for row in shown:
        table.add_row(
            _name(row["folder"], root),
            *(row["stage"], row["model"], row["status"]),
            "" if row["seconds"] is None else duration(row["seconds"]),
            *(" ".join(row["read"]), " ".join(row["wrote"])),
        )
    if len(shown) < len(runs):
        table.caption = f"{len(runs) - len(shown)} older ones left out; runs.limit={len(runs)} shows all"
    run.show(table)
    artifacts = artifact_rows(run.artifacts.root)
    table = _table(f"artifacts in {cfg.output_dir}", "artifact", "status", "size", "made", "from", "by run")
    for row in artifacts:
        table.add_row(*(row[key] for key in ("name", "status", "size", "made", "from", "run")))
    run.show(table)
    return {"runs": len(runs), "artifacts": len(artifacts), "bytes": sum(row["bytes"] for row in artifacts)}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _name(folder: Path, root: Path) -> str:
    """A run as one finds it below the output folder; stage and model stand in columns of their own."""
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
                    row["run"] = "-".join(Path(manifest.get("run", "")).name.split("-")[:4])
                except StoreError:
                    row["status"] = f"broken: {'unreadable' if (folder / MANIFEST).exists() else 'no'} {MANIFEST}"
            rows.append(row)
    return rows


def _rank(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)
