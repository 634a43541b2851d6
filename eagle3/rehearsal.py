"""The dress rehearsal before an expensive load: the same engine on a few layers with random weights (before step 3).

Everything that a real extraction goes through is gone through in a minute or two: the engine's start with the same
settings, model class, quantization and tensor parallelism; the hooks; the store; the backends. What it measures tells
whether the whole model will fit, how much disk and time the whole extraction will take.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.capture import Capture
from eagle3.engines.backends import expected_backends, mismatches
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_capture import ShardWork, batch_bytes, memory_bytes
from eagle3.engines.vllm_seams import check_version
from eagle3.engines.vllm_settings import check_devices, engine_arguments, installed_version
from eagle3.errors import Eagle3Error, RequestError
from eagle3.host_memory import capture_need, host_memory
from eagle3.memory import Footprint, key_value_bytes, weight_bytes
from eagle3.progress import duration, size_text
from eagle3.shards import Layout, ShardPlan, ShardWriter, data_start, plan_shards, read_rows
from eagle3.tokens import Sample, sample_id
from eagle3.weights import read_json

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.config import Config

# What vLLM leaves to others unless engine_options.gpu_memory_utilization says otherwise.
MEMORY_SHARE = 0.9
SHORTEST = 32


@dataclass(frozen=True)
class Check:
    """One thing that the rehearsal proves, and how it turned out."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Extraction:
    """The extraction that is rehearsed for: layers to capture, lengths of the samples (None: not prepared yet)."""

    layer_ids: tuple[int, ...]
    lengths: tuple[int, ...] | None
    free_bytes: int
    """Room on the disk that the states will go to."""


@dataclass
class Rehearsal:
    """The outcome: checks in their order, measured numbers and forecasts (plain values)."""

    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the real extraction may start."""
        return all(check.passed for check in self.checks)

    def add(self, name: str, passed: bool, detail: str) -> None:
        """Adds a check."""
        self.checks.append(Check(name, passed, detail))


def rehearse(cfg: Config, target: Target, extraction: Extraction, folder: Path, log_file: Path) -> Rehearsal:
    """Rehearses the extraction in `folder` (on the disk of the store; emptied afterwards).

    A check that fails is in the result, with its reason; only a wrong request is raised, as RequestError.
    """
    outcome, started = Rehearsal(), time.monotonic()
    version = installed_version()
    check_devices(cfg, cfg.hardware.data_parallel_size)
    _check_checkpoint(target, outcome)
    in_range, detail = check_version(version)
    outcome.add("vllm version", in_range, detail)
    _check_host_memory(cfg, target, extraction, folder, outcome)
    if not outcome.passed:
        return outcome
    model = folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        depth = shrunken_checkpoint(target, len(extraction.layer_ids), model, cfg.rehearse.layers)
        _with_engine(cfg, target, extraction, outcome, folder, model, depth, log_file)
    except RequestError:
        raise
    except Eagle3Error as error:
        outcome.add("engine", False, str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.numbers["seconds"] = round(time.monotonic() - started, 1)
    return outcome


def shrunken_checkpoint(target: Target, captured: int, folder: Path, layers: int | None = None) -> int:
    """Writes the target's config with few layers, and what lies beside it, but no weights; returns the layers.

    `layers` or the fewest: each kind of layer, and enough that as many states can be captured as in the real run.
    RequestError when `layers` are fewer than those, or more than the target has.
    """
    folder.mkdir(parents=True)
    config = read_json(target.folder / "config.json")
    text = target.adapter.text_section(config)
    fewest = min(max(target.adapter.rehearsal_layers(text), captured - 1), target.shape.num_layers)
    depth = fewest if layers is None else layers
    if not fewest <= depth <= target.shape.num_layers:
        raise RequestError(
            f"rehearse.layers: found {layers}, expected {fewest} (every kind of layer, and {captured} states) to "
            f"{target.shape.num_layers} (all of the target); null takes the fewest"
        )
    shrunk = json.dumps(target.adapter.shrink(config, depth), indent=1)
    (folder / "config.json").write_text(shrunk, encoding="utf-8")
    for file in target.folder.iterdir():
        beside = file.suffix in (".json", ".jinja", ".py", ".model", ".txt")
        if beside and file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    return depth


def rehearsal_samples(lengths: Sequence[int], vocab_size: int, tokens: int, longest: int) -> list[Sample]:
    """Random documents of about `tokens` tokens with the spread of the given lengths (or one of 32 to `longest`)."""
    random = np.random.default_rng(0)
    spread = np.sort(np.minimum(np.asarray(lengths), longest)) if len(lengths) else np.geomspace(SHORTEST, longest, 64)
    chosen: list[int] = []
    while sum(chosen) < tokens:
        # Evenly through the sorted lengths, so that a few documents have the spread of all.
        place = (len(chosen) * 0.618033988749895) % 1.0
        chosen.append(int(spread[int(place * len(spread))]))
    samples: list[Sample] = []
    for length in chosen:
        ids = random.integers(0, vocab_size, length).astype(np.int32)
        samples.append(Sample(sample_id(ids), ids, np.ones(length, dtype=bool), "train", f"rehearsal:{len(samples)}"))
    return list({sample.id: sample for sample in samples}.values())


def _check_checkpoint(target: Target, outcome: Rehearsal) -> None:
    """The shards were checked when the target was opened; here the tokenizer and the template."""
    files = set(target.weights.files.values())
    size = sum(path.stat().st_size for path in files)
    outcome.add("checkpoint", True, f"{len(files)} shards, {size / 1e9:,.1f} GB, all there with the right sizes")
    try:
        tokenizer = target.tokenizer()
        template = "a chat template" if target.chat_template else "no chat template (given answers only)"
        outcome.add("tokenizer", True, f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens, {template}")
    except (Eagle3Error, OSError, ValueError, ImportError) as error:
        outcome.add("tokenizer", False, f"{type(error).__name__}: {error}")


def _check_host_memory(cfg: Config, target: Target, extraction: Extraction, folder: Path, outcome: Rehearsal) -> None:
    layout = Layout(target.shape.hidden_size, cfg.store.dtype, target.shape.num_layers)
    captured = len(extraction.layer_ids)
    states_bytes = sum(extraction.lengths or ()) * captured * layout.row_bytes
    need, memory = capture_need(cfg, target, captured, states_bytes, folder), host_memory()
    if memory is not None:
        problem = need.problem(memory)
        outcome.add("host memory", problem is None, problem or f"{need.describe()} of {size_text(memory.available)}")


def _with_engine(
    cfg: Config,
    target: Target,
    extraction: Extraction,
    outcome: Rehearsal,
    folder: Path,
    model: Path,
    depth: int,
    log_file: Path,
) -> None:
    settings = engine_arguments(cfg, target, model, "dummy")
    longest = min(settings["max_model_len"] - 1, cfg.dataset.max_length)
    tokens = cfg.rehearse.batches * settings["max_num_batched_tokens"]
    samples = rehearsal_samples(extraction.lengths or (), target.shape.vocab_size, tokens, longest)
    layer_ids = tuple(range(depth + 1 - len(extraction.layer_ids), depth + 1))
    layout = Layout(target.shape.hidden_size, cfg.store.dtype, depth)
    with VllmEngine(cfg, target, folder=model, load_format="dummy", log_file=log_file) as engine:
        info = engine.info()
        outcome.add("engine", True, f"vllm {info.version} started in {duration(engine.load_seconds)}")
        outcome.add("layers", info.num_layers == depth, f"{info.num_layers} of {depth} x {info.details['layer_class']}")
        _check_backends(cfg, target, engine, outcome)
        if info.num_layers != depth:
            # What is asked for below may not be there, which would be told as a wrong request.
            return
        # Once to warm up: kernels are compiled and chosen at the first batches.
        list(engine.capture(samples[: max(len(samples) // 4, 1)], layer_ids))
        first = _store_pass(engine, target, samples, layer_ids, layout, folder / "first", outcome)
        report = engine.last_capture
        _compare_ranks(engine, samples, layer_ids, layout, first, folder / "second", outcome)
        _forecast(cfg, target, extraction, engine, report, depth, outcome)
    outcome.numbers.update(layers=depth, samples=len(samples), tokens=sum(len(sample.input_ids) for sample in samples))


def _check_backends(cfg: Config, target: Target, engine: VllmEngine, outcome: Rehearsal) -> None:
    """The engine has stopped by itself on a mismatch unless it was told to warn."""
    expected = expected_backends(target.adapter.expected_backends(), cfg.hardware.expected_backends)
    found = engine.ranks[0]["backends"]
    problems = mismatches(expected, found)
    shown = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    passed = not problems or cfg.hardware.on_backend_mismatch == "warn"
    outcome.add("backends", passed, "; ".join(problems) or (shown or "nothing special"))
    outcome.numbers["backends"] = found


def _store_pass(
    engine: VllmEngine,
    target: Target,
    samples: list[Sample],
    layer_ids: tuple[int, ...],
    layout: Layout,
    folder: Path,
    outcome: Rehearsal,
) -> Capture:
    """The product's own capture into a store, timed, then everything read back."""
    folder.mkdir(parents=True)
    lengths = [len(sample.input_ids) for sample in samples]
    token_bytes = len(layer_ids) * layout.row_bytes
    plans = plan_shards(lengths, [sample.id for sample in samples], token_bytes, 1_500_000_000, None, 60.0)
    capture = Capture(folder, layout, tuple(plans), layer_ids, target.shape.max_position_embeddings)
    count = capture.run(engine, samples, capture.missing(), len(samples), lambda tokens: None)
    report = engine.last_capture
    lost = ", ".join(f"{number} {reason}" for reason, number in count.rejected.items())
    detail = f"of {len(samples)} samples lost: {lost}" if lost else f"{count.tokens:,} tokens, finite, ids as sent"
    outcome.add("states", not lost, detail)
    faults = [fault for plan in capture.plans for fault in capture.faults(plan)]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    kept = f"{size / 1e9:.2f} GB written and read back, {token_bytes:,} B a token in {len(layer_ids)} states"
    outcome.add("store", not faults, faults[0] if faults else kept)
    outcome.numbers.update(
        tokens_per_s=round(count.tokens / report["seconds"]),
        model_tokens_per_s=round(
            count.tokens * len(report["ranks"]) / sum(rank["model_s"] for rank in report["ranks"])
        ),
        bytes_per_token=round(size / max(count.tokens, 1)),
        bytes_per_state=sum(rank["bytes"] for rank in report["ranks"]) / sum(lengths) / len(layer_ids),
        written_bytes_per_s=round(size / report["seconds"]),
        working_bytes=batch_bytes(report, engine.ranks),
        ring_bytes=max(rank["ring_bytes"] for rank in report["ranks"]),
    )
    return capture


def _compare_ranks(
    engine: VllmEngine,
    samples: list[Sample],
    layer_ids: tuple[int, ...],
    layout: Layout,
    first: Capture,
    folder: Path,
    outcome: Rehearsal,
) -> None:
    """A second pass in which each rank writes another's part: ranks that differed would show."""
    worst, equal, rows = 0.0, 0, 0
    plan: ShardPlan = first.plans[0]
    members = [samples[row] for row in plan.rows]
    with ShardWriter(folder, layout, plan, layer_ids) as writer:
        for _ in engine.capture_shards([ShardWork(writer, members)], layer_ids, layout, rotation=1):
            for layer_id, file in writer.files.items():
                before = _rows_of(first, plan, layer_id)
                now = file.read(0, plan.tokens).float()
                worst = max(worst, float(((now - before).norm(dim=1) / before.norm(dim=1).clamp_min(1e-12)).max()))
                equal += int((now == before).all(dim=1).sum())
                rows += plan.tokens
    # Rounded down: a single row that differs must not read as none.
    share = 1000 * equal // rows / 10
    detail = f"{share}% of the rows to the bit, largest relative difference {worst:.1e}"
    outcome.add(f"{len(engine.ranks)} ranks agree" if len(engine.ranks) > 1 else "repeatable", worst < 0.1, detail)


def _rows_of(capture: Capture, plan: ShardPlan, layer_id: int) -> Any:
    path = capture.folder / plan.name / capture.layout.file_name(layer_id)
    return read_rows(path, capture.layout, data_start(path), 0, plan.tokens).float()


def _forecast(
    cfg: Config,
    target: Target,
    extraction: Extraction,
    engine: VllmEngine,
    report: dict[str, Any],
    depth: int,
    outcome: Rehearsal,
) -> None:
    """Memory of each GPU, bytes on the disk, and time, of the whole extraction; `report` is the first pass's."""
    ranks, num_layers, numbers = cfg.hardware.tensor_parallel_size, target.shape.num_layers, outcome.numbers
    first = engine.ranks[0]
    itemsize = 4 if first["dtype"] == "float32" else 2
    token_bytes = key_value_bytes(target, ranks, itemsize)

    def need_of(layers: int) -> Footprint:
        return Footprint(
            weights=weight_bytes(target, ranks, layers),
            key_values=token_bytes * (first["batch_tokens"] + first["max_model_len"]) * layers // num_layers,
            working=numbers["working_bytes"],
            context=max(rank["context_bytes"] for rank in engine.ranks),
        )

    need, rehearsed = need_of(num_layers), need_of(depth)
    numbers.update(memory_bytes_per_gpu=need.total, key_value_bytes_per_gpu=need.key_values)
    if total := min(rank["memory_total_bytes"] for rank in engine.ranks):
        share = cfg.hardware.engine_options.get("gpu_memory_utilization", MEMORY_SHARE)
        outcome.add("memory", *need.verdict(int(total * share)))
        measured = memory_bytes(report, rehearsed.key_values)
        numbers.update(rehearsed_memory_bytes=measured, rehearsed_memory_forecast_bytes=rehearsed.total)
        detail = f"{measured / 1e9:.1f} GB with these {depth} layers, foretold {rehearsed.total / 1e9:.1f}"
        outcome.add("memory measured", True, f"{detail} ({measured / rehearsed.total - 1:+.1%})")
    # Layers cost alike; what is there once (embedding, scheduling) is counted with them, which errs on the slow side.
    # The disk has as many states a token to write as now, so it can only be as slow as it was.
    computed, written = numbers["model_tokens_per_s"] * depth / num_layers, numbers["tokens_per_s"]
    speed = min(computed, written)
    numbers["forecast_tokens_per_s"] = round(speed)
    numbers["forecast_bytes_per_s"] = round(speed * numbers["bytes_per_token"])
    if extraction.lengths is None:
        return
    tokens, engines = sum(extraction.lengths), cfg.hardware.data_parallel_size
    size, seconds = tokens * numbers["bytes_per_token"], tokens / speed / engines
    numbers.update(forecast_bytes=size, forecast_seconds=round(seconds, 1))
    fits = size <= extraction.free_bytes
    outcome.add("disk", fits, f"{size / 1e9:,.1f} GB of states, {extraction.free_bytes / 1e9:,.1f} GB free")
    each = f"{engines} engines of {speed:,.0f} tokens/s each" if engines > 1 else f"{speed:,.0f} tokens/s"
    detail = f"about {duration(seconds)} for {tokens:,} tokens at {each}"
    outcome.add("time", True, f"{detail}: the model alone {computed:,.0f}, as it was written here {written:,.0f}")
