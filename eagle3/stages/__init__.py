"""The programs that walk through the rooms, one file a stage; each has `run(cfg, run)` and returns its metrics."""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """The names of all stages; none is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
