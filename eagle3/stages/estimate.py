"""Stage estimate: what extraction will write and how long it will take, from prepared lengths, before a model loads."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table

from eagle3.checkpoint import Target, open_target
from eagle3.config import Config, LayersConfig
from eagle3.engines import expected_tokens_per_s
from eagle3.errors import RequestError
from eagle3.memory import weight_bytes
from eagle3.prepared import Prepared
from eagle3.progress import duration
from eagle3.runs import Run
from eagle3.stages import extract, rehearse


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Shows bytes and time of this selection and of every preset, and what the target's weights take of a GPU.

    Returns `samples, tokens, bytes, seconds`, on GPUs also `weight_bytes_per_gpu`.
    """
    target = open_target(cfg)
    prepared = Prepared.open(run.read(extract.source(cfg, run.artifacts)).folder)
    artifact = extract.states(cfg, run.artifacts)
    num_layers = target.shape.num_layers
    measured = artifact.manifest()["metrics"]["tokens_per_s"] if artifact.complete else None
    foretold = None if measured else _foretold(cfg, run, target)
    speed = measured or foretold or expected_tokens_per_s(cfg.hardware, target)
    origin = "as measured" if measured else "as a rehearsal foretold" if foretold else "a cautious guess"
    rate = f"{speed:,.0f} tokens/s, {origin}" if speed else "unknown"
    table = Table(title=f"extraction of {len(prepared.lengths):,} samples ({rate})")
    for column in ("layers", "ids", "bytes", "a token", "time"):
        table.add_column(column, justify="left" if column in ("layers", "ids") else "right")
    metrics: dict[str, Any] = {}
    mine = "layers.ids" if cfg.layers.ids is not None else cfg.layers.name
    for name, chosen in [(mine, cfg.layers), *_presets(without=mine)]:
        try:
            ids = extract.wanted_ids(chosen, num_layers)
        except RequestError:
            if not metrics:
                raise
            table.add_row(name, f"not possible with {num_layers} layers")
            continue
        capture = extract.plan_capture(cfg, target, prepared, artifact, ids)
        size, tokens = capture.size_bytes(), capture.tokens()
        seconds = tokens / speed if speed else None
        per_token = f"{len(ids) * capture.layout.row_bytes:,} B"
        shown = ", ".join(map(str, ids[:-1])) + f" + {ids[-1]} (final)"
        total = f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
        table.add_row(name, shown, total, per_token, duration(seconds) if seconds else "unknown")
        if not metrics:
            metrics = {
                "samples": len(prepared.lengths),
                "tokens": tokens,
                "bytes": size,
                "seconds": round(seconds, 1) if seconds else None,
            }
    run.show(table)
    if cfg.hardware.gpu_memory_gb is not None:
        weights, room = weight_bytes(target, cfg.hardware.tensor_parallel_size), cfg.hardware.gpu_memory_gb
        metrics["weight_bytes_per_gpu"] = weights
        run.log.info("estimate: the target's weights take %.1f of the %g GB of a GPU", weights / 1e9, room)
        if weights > room * 1e9:
            run.log.warning(
                "hardware.gpu_memory_gb: they do not fit; raise hardware.tensor_parallel_size, or choose other hardware"
            )
    return metrics


def _foretold(cfg: Config, run: Run, target: Target) -> float | None:
    """Tokens a second of all engines, of a rehearsal of these settings that has passed on this machine."""
    try:
        numbers = rehearse.forecast(cfg, run, target)
    except RequestError:
        # Sizes are told without vLLM, and for settings that it would refuse.
        return None
    return cfg.hardware.data_parallel_size * numbers["forecast_tokens_per_s"] if numbers else None


def _presets(without: str) -> Iterator[tuple[str, LayersConfig]]:
    """The selections that ship in conf/layers, but for the one that is shown already."""
    for file in sorted(resources.files("eagle3.conf").joinpath("layers").iterdir(), key=lambda entry: entry.name):
        name = file.name.removesuffix(".yaml")
        if file.name.endswith(".yaml") and name != without:
            fields: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
            fields.pop("defaults", None)
            yield name, LayersConfig(**fields)
