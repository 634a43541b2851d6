"""`stage=report`: the page and the pictures of a sweep or of a run (beside the walk).

It reads what the folder holds and writes report.html and report/*.png there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.config import Config
from eagle3.errors import RequestError
from eagle3.records import INDEX, Record, read_json
from eagle3.report import write_report
from eagle3.runs import Run


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Writes the report; returns where the page lies. RequestError when there is nothing to report on."""
    folder = Path(cfg.report.folder).absolute() if cfg.report.folder is not None else newest(cfg, run)
    page = write_report(folder)
    run.log.info("report: %s", page)
    return {"page": str(page)}


def newest(cfg: Config, run: Run) -> Path:
    """The sweep that was worked on last; without one, the newest run that trained or evaluated."""
    root = Path(cfg.output_dir).absolute()
    sweeps = sorted(root.glob(f"sweeps/*/{INDEX}"), key=lambda path: path.stat().st_mtime)
    worked = [path.parent for path in sweeps if not any(_dry(path.parent / name) for name in read_json(path))]
    if worked:
        return worked[-1]
    kinds = (["pipeline"], ["train"], ["evaluate"])
    runs = [path for path in root.glob("runs/*/*") if path.name.split("-")[4:5] in kinds]
    runs = [path for path in runs if path != run.folder and not _dry(path)]
    if not runs:
        raise RequestError(
            f"report.folder: {root} holds no sweep and no run that trained or evaluated; run one, or name a folder "
            "with report.folder=FOLDER"
        )
    return max(runs, key=lambda path: (path.parent.name, path.name))


def _dry(folder: Path) -> bool:
    """Whether a run only said what it would do."""
    return Record(folder).status == "dry run"
