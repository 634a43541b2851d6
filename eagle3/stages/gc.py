"""Stage gc: lists runs and artifacts that nothing complete refers to, and deletes them on request (beside the walk)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from eagle3.config import Config
from eagle3.errors import RequestError, StageFailed
from eagle3.garbage import Garbage, delete, survey
from eagle3.progress import duration, size_text
from eagle3.runs import Run

DAY_S = 86400.0


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Shows what can go, and deletes it with `gc.delete`. Returns `found, bytes, deleted, freed_bytes, kept`.

    Raises StageFailed when something could not be deleted; the rest is gone by then.
    """
    younger_s = cfg.gc.older_than_days * DAY_S
    found = survey(Path(cfg.output_dir), younger_s)
    size = sum(each.size_bytes for each in found.garbage)
    metrics = {"found": len(found.garbage), "bytes": size, "deleted": 0, "freed_bytes": 0, "kept": found.kept}
    days = cfg.gc.older_than_days
    kept = f"{found.kept} artifacts, {size_text(found.kept_bytes)}, in use"
    kept += f" or younger than {days:g} days" if days else ""
    if not found.garbage:
        run.log.info("gc: nothing to delete; kept: %s", kept)
        return metrics
    run.show(_table(cfg, found.garbage, kept))
    if cfg.dry_run or not cfg.gc.delete:
        run.log.info("gc: %s can go; gc.delete=true deletes them", _amount(len(found.garbage), size))
        return metrics
    failures: list[str] = []
    for each, problem in delete(run.artifacts, found.garbage, younger_s):
        if isinstance(problem, RequestError):
            run.log.info("gc: %s", problem)
        elif problem is not None:
            failures.append(f"{problem.filename or each.folder}: {problem.strerror or problem}")
        else:
            metrics["deleted"] += 1
            metrics["freed_bytes"] += each.size_bytes
            run.log.debug("gc: deleted %s", each.folder)
    run.log.info("gc: deleted %s", _amount(metrics["deleted"], metrics["freed_bytes"]))
    if failures:
        raise StageFailed(
            f"gc: {len(failures)} of {len(found.garbage)} folders could not be deleted: {failures[0]}; correct the "
            "permissions and run the same command again"
        )
    return metrics


def _amount(count: int, size: int) -> str:
    return f"{count} {'folder' if count == 1 else 'folders'}, {size_text(size)}"


def _table(cfg: Config, garbage: list[Garbage], kept: str) -> Table:
    table = Table(title=f"held by nothing in {cfg.output_dir}", caption=f"kept: {kept}")
    table.add_column("what", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("unused for", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for each in garbage:
        days = each.idle_s / DAY_S
        table.add_row(
            each.name, size_text(each.size_bytes), f"{days:.0f} days" if days >= 2 else duration(each.idle_s), each.why
        )
    return table
