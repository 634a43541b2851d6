"""Stage adapters: the architecture families that have an adapter, and the override that chooses each."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from eagle3.adapter import families
from eagle3.config import Config
from eagle3.runs import Run


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Shows the table. Returns `adapters`: what each says of itself."""
    table = Table(title="adapters (adapters/README.md says how to add one)")
    for column in ("name", "architectures", "engines", "run on", "decoder layers", "model.adapter._target_"):
        table.add_column(column, overflow="fold")
    described = []
    for name, family in sorted(families().items()):
        answers = family().describe()
        described.append(answers)
        place = f"{family.__module__}.{family.__qualname__}"
        lists = [", ".join(answers[key]) for key in ("architectures", "engines", "ran_on")]
        table.add_row(name, *lists, answers["layers"], place)
    run.show(table)
    return {"adapters": described}
