"""Stage extract: runs the target over the prepared samples and stores its hidden states (steps 3 and 4 of the walk).

Everything that can be known is known before the target loads: the shards, their bytes, what is on disk already, and
whether the disk has room. Layers are columns of one artifact: asking for more of them later adds files.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from eagle3 import host_memory, layers
from eagle3.artifacts import Artifact, Artifacts, write_json
from eagle3.capture import Capture, CaptureCount
from eagle3.checkpoint import Target, adapter_of, open_target
from eagle3.config import Config, LayersConfig
from eagle3.engines import check_engine, compute_dtype, expected_tokens_per_s
from eagle3.engines.vllm_capture import memory_bytes, throughput
from eagle3.engines.vllm_settings import dummy_weights, engine_arguments
from eagle3.errors import RequestError
from eagle3.prepared import Prepared
from eagle3.progress import duration
from eagle3.records import sweep_of
from eagle3.runs import Run
from eagle3.shards import Layout, plan_shards, shards_at
from eagle3.stages import prepare, rehearse

MAKE = "eagle3 stage=extract"
PLAN = "plan.json"


def states(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The states artifact that this config leads to, made or not. RequestError when there is no prepared set."""
    return _states(cfg, artifacts, open_target(cfg), source(cfg, artifacts))


def source(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The prepared set to capture."""
    given = cfg.inputs.prepared
    return artifacts.resolve("prepared", given, lambda: prepare.prepared(cfg, artifacts), prepare.MAKE)


def _states(cfg: Config, artifacts: Artifacts, target: Target, prepared: Artifact) -> Artifact:
    identity = {
        "prepared": prepared.id,
        "target": target.fingerprint(),
        "engine": cfg.hardware.engine,
        "compute_dtype": compute_dtype(cfg.hardware, target),
        "dtype": cfg.store.dtype,
        **dummy_weights(cfg.hardware),
    }
    return artifacts.of("states", identity)


def awaits_sweep(cfg: Config, run: Run) -> bool:
    """Whether this is the dry run of a sweep's job, whose prepared set the sweep would make before it."""
    if not cfg.dry_run or cfg.inputs.prepared is not None or cfg.inputs.states is not None:
        return False
    return sweep_of(run.folder) is not None and not prepare.prepared(cfg, run.artifacts).complete


def selections(cfg: LayersConfig, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """The selection to train on, then those of `layers.also`, as checked ids. RequestError for an impossible one."""
    chosen = [layers.select(num_layers, cfg.ids, cfg.fractions)]
    for entry in cfg.also:
        whole = entry is not None and all(isinstance(number, int) for number in entry)
        chosen.append(layers.select(num_layers, entry if whole else None, None if whole else entry))
    return tuple(chosen)


def wanted_ids(cfg: LayersConfig, num_layers: int) -> tuple[int, ...]:
    """All layer ids to capture: those of every selection, and the final state's id n."""
    return tuple(sorted({num_layers, *(i for chosen in selections(cfg, num_layers) for i in chosen)}))


def check_config(cfg: Config) -> None:
    """RequestError when the engine that reads the target does not run its family."""
    check_engine(adapter_of(cfg.model), cfg.hardware.engine)


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Captures what is not stored yet. Returns `samples, tokens, skipped, tokens_per_s, bytes`."""
    check_config(cfg)
    target = open_target(cfg)
    if awaits_sweep(cfg, run):
        run.log.info("extract: would capture what the sweep prepares first")
        return {}
    prepared_artifact = source(cfg, run.artifacts)
    artifact = _states(cfg, run.artifacts, target, prepared_artifact)
    wanted = wanted_ids(cfg.layers, target.shape.num_layers)
    run.read(prepared_artifact)
    listed = artifact.complete and {*wanted} <= {*artifact.manifest()["layer_ids"]}
    # Held from before the look at what is there: what another run adds meanwhile would be lost from the manifest.
    with nullcontext() if listed or cfg.dry_run else run.artifacts.lock(artifact, wait=True):
        return _extract(cfg, run, target, prepared_artifact, artifact, wanted)


def _extract(
    cfg: Config, run: Run, target: Target, prepared_artifact: Artifact, artifact: Artifact, wanted: tuple[int, ...]
) -> dict[str, Any]:
    prepared = Prepared.open(prepared_artifact.folder)
    stored = artifact.manifest() if artifact.complete else None
    ids = wanted if stored is None else tuple(sorted({*wanted, *stored["layer_ids"]}))
    capture = plan_capture(cfg, target, prepared, artifact, ids)
    # Stored layers are known by sizes and headers, which finds torn files at once; stage=verify reads them all.
    missing = capture.missing(unproven=set(ids) - set(stored["layer_ids"] if stored else ()))
    if stored is not None and not missing:
        run.log.info("extract: hit, %s holds layers %s", artifact.folder, stored["layer_ids"])
        run.wrote(artifact)
        return stored["metrics"]
    run.log.info("extract: %s", describe(cfg, target, capture, missing))
    if dummy_weights(cfg.hardware):
        run.log.warning(
            "hardware.engine_options.load_format=dummy: random weights, whose states are no one's to train on"
        )
    if cfg.dry_run:
        return {}
    check_lengths(cfg, target, capture)
    capture.check_space(missing, cfg.store.free_space_margin)
    states_bytes = capture.size_bytes(missing)
    host_memory.check(host_memory.capture_need(cfg, target, len(ids), states_bytes, capture.folder))
    if stored is None:
        folder = run.artifacts.begin(artifact, resume=True)
        write_json(folder / PLAN, {"first_rows": [plan.rows[0] for plan in capture.plans]})
    with run.artifacts.lock(artifact):
        count = _capture(cfg, run, target, capture, prepared, missing)
        if stored is None:
            capture.drop_other_layers()
        manifest = _manifest(cfg, target, prepared_artifact.id, capture, count, stored)
        write = run.artifacts.commit if stored is None else run.artifacts.amend
        write(artifact, manifest)
    run.wrote(artifact)
    counts = manifest["counts"]
    rejected = "".join(f" + {n} rejected ({reason})" for reason, n in counts["rejected"].items())
    run.log.info("extract: %d prepared samples = %d stored%s", counts["prepared"], counts["stored"], rejected)
    return manifest["metrics"]


def plan_capture(
    cfg: Config, target: Target, prepared: Prepared, artifact: Artifact, layer_ids: Sequence[int]
) -> Capture:
    """The capture of these layers into the artifact, along the plan that it was begun with if it was."""
    shape = target.shape
    layout = Layout(shape.hidden_size, cfg.store.dtype, shape.num_layers)
    folder = artifact.folder if artifact.complete else artifact.partial
    sample_ids = [sample.id for sample in prepared.samples]
    lengths = [int(length) for length in prepared.lengths]
    if not lengths:
        raise RequestError(f"{prepared.folder}: holds no sample, expected at least one; look at its prepare report")
    if (folder / PLAN).is_file():
        try:
            plans = shards_at(
                json.loads((folder / PLAN).read_text(encoding="utf-8"))["first_rows"], lengths, sample_ids
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{folder / PLAN}: is no shard plan ({error}); delete {folder} and run again") from error
    else:
        plans = plan_shards(
            lengths,
            sample_ids,
            bytes_per_token=len(layer_ids) * layout.row_bytes,
            shard_bytes=cfg.store.shard_bytes,
            tokens_per_s=expected_tokens_per_s(cfg.hardware, target),
            shard_seconds=cfg.store.shard_seconds,
        )
    return Capture(folder, layout, plans, tuple(sorted(layer_ids)), shape.max_position_embeddings)


def allowed_failures(cfg: Config, capture: Capture) -> int:
    """How many samples of the whole set may be lost."""
    return int(cfg.store.max_failed_fraction * sum(len(plan.rows) for plan in capture.plans))


def check_lengths(cfg: Config, target: Target, capture: Capture) -> None:
    """RequestError when more samples than may be lost are too long for the model or the engine."""
    longest, setting = capture.max_length, "a model that reads more"
    if cfg.hardware.engine == "vllm":
        room = engine_arguments(cfg, target, target.folder, "auto")["max_model_len"]
        if isinstance(room, int) and 0 < room <= longest:  # vLLM has words for it, too
            # A request has room for one new token.
            longest, setting = room - 1, "hardware.engine_options.max_model_len of one more than the longest"
    lengths = [length for plan in capture.plans for length in plan.lengths]
    too_long, allowed = sum(length > longest for length in lengths), allowed_failures(cfg, capture)
    if too_long > allowed:
        raise RequestError(
            f"dataset.max_length: {too_long} of {len(lengths)} prepared samples have more than the {longest} tokens "
            f"that this target takes, up to {max(lengths)}; {allowed} may be lost (store.max_failed_fraction): prepare "
            f"with dataset.max_length={longest}, or take {setting}"
        )


def describe(cfg: Config, target: Target, capture: Capture, missing: dict[int, list[int]]) -> str:
    """What an extraction will do, in one line."""
    tokens, speed = capture.tokens(missing), expected_tokens_per_s(cfg.hardware, target)
    time = f", about {duration(tokens / speed)}" if speed else ""
    engines = f", {cfg.hardware.data_parallel_size} engines side by side" if cfg.hardware.data_parallel_size > 1 else ""
    return (
        f"{len(missing)} of {len(capture.plans)} shards, {tokens:,} tokens, layers {list(capture.layer_ids)} "
        f"({target.shape.num_layers} = final, pre-norm), {capture.size_bytes(missing) / 1e6:,.1f} MB{time}{engines}"
    )


def _capture(
    cfg: Config, run: Run, target: Target, capture: Capture, prepared: Prepared, missing: dict[int, list[int]]
) -> CaptureCount:
    """Opens the engine only when something is missing."""
    if not missing:
        return CaptureCount()
    max_failed = allowed_failures(cfg, capture)
    lengths = [length for number in missing for length in capture.plans[number].lengths]
    with rehearse.open_rehearsed(cfg, run, target, lengths) as engine:
        run.note(adapter=target.adapter.name, engine=dataclasses.asdict(engine.info()))
        foretold = rehearse.forecast(cfg, run, target)
        with run.progress(capture.tokens(missing), "tokens", "extract") as advance:
            bytes_per_state, opened = foretold.get("bytes_per_state"), run.seconds
            count = capture.run(engine, prepared.samples, missing, max_failed, advance, bytes_per_state)
        if report := getattr(engine, "last_capture", None):
            _say_throughput(run, report, foretold, opened + count.first_seconds, cfg.hardware.data_parallel_size)
        return count


def _say_throughput(
    run: Run, report: dict[str, Any], forecast: dict[str, Any], first_states_s: float, engines: int
) -> None:
    """Where the engines' time and memory went, beside what the rehearsal foretold of each; when the first states were
    there.
    """
    found = throughput(report, engines * forecast.get("forecast_tokens_per_s", 0))
    key_values = forecast.get("key_value_bytes_per_gpu", 0)
    memory, taken = (memory_bytes(report, key_values, name) for name in ("needed_bytes", "device_bytes"))
    measured = {"first_states_s": round(first_states_s, 1), "memory_bytes": memory, "device_bytes": taken}
    run.record({"extract": {**found, **measured}})
    shares = ", ".join(f"{name} {found[f'{name}_share']:.0%}" for name in ("model", "copy", "wait", "write"))
    foretold = f", {found['of_forecast']:.2f} of the rehearsal's forecast" if "of_forecast" in found else ""
    run.log.info(
        "extract: %s tokens/s, %.2f GB/s (%s of the time%s); buffers of a rank: %.2f GB host, %.2f GB device",
        f"{found['tokens_per_s']:,.0f}",
        found["bytes_per_s"] / 1e9,
        shares,
        foretold,
        found["ring_bytes"] / 1e9,
        found["working_bytes"] / 1e9,
    )
    parts = "/".join(f"{part:.0%}" for part in found["written_share"])
    run.log.info("extract: first states after %s, written by the ranks %s", duration(first_states_s), parts)
    if memory and (expected := forecast.get("memory_bytes_per_gpu")):
        run.log.info(
            "extract: %.1f GB of a GPU needed, %+.1f%% of the forecast (%.1f with what the allocator keeps for later)",
            memory / 1e9,
            100 * (memory / expected - 1),
            taken / 1e9,
        )


def _manifest(
    cfg: Config, target: Target, prepared_id: str, capture: Capture, count: CaptureCount, before: dict[str, Any] | None
) -> dict[str, Any]:
    """The manifest of the whole artifact as it now lies on disk; `before` is the one that it replaces."""
    samples, tokens, rejected = capture.kept()
    speed = round(count.tokens / count.seconds, 1) if count.tokens else None
    return {
        "format": 1,
        "model": cfg.model.name,
        "target": target.fingerprint(),
        "prepared": prepared_id,
        "adapter": target.adapter.name,
        "engine": cfg.hardware.engine,
        "compute_dtype": compute_dtype(cfg.hardware, target),
        "layer_ids": list(capture.layer_ids),
        "layer_convention": layers.CONVENTION,
        "final_id": capture.layout.final_id,
        "final_state": "pre-norm",
        "dtype": capture.layout.dtype,
        "hidden_size": capture.layout.hidden_size,
        "checksum": "crc32 of each sample's rows",
        "counts": {
            "prepared": sum(len(plan.rows) for plan in capture.plans),
            "stored": samples,
            "rejected": dict(sorted(Counter(rejected.values()).items())),
        },
        "rejected": rejected,
        "shards": [{"name": plan.name, "samples": len(plan.rows), "tokens": plan.tokens} for plan in capture.plans],
        "metrics": {
            "samples": samples,
            "tokens": tokens,
            "skipped": len(rejected),
            "tokens_per_s": speed or (before or {}).get("metrics", {}).get("tokens_per_s"),
            "bytes": sum(
                path.stat().st_size for plan in capture.plans for path in (capture.folder / plan.name).iterdir()
            ),
        },
    }
