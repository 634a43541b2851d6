"""Stage evaluate: real decoding with the drafter in the loop, beside its baselines (step 8 of the walk).

With the transformers engine the target decodes every prompt twice: plainly, which gives the text, the states along it
and the speed to beat; and with the drafter, which must give the same text. Baselines draft along the recorded text,
which needs no forward of the target. With vLLM the exported folder is served (`served_evaluation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import eagle3
from eagle3 import served_evaluation
from eagle3.artifacts import Artifact, Artifacts, write_json
from eagle3.assets import cache_folder
from eagle3.benchmarks import PromptSet, prompt_sets, token_prompts
from eagle3.bigram import BigramChain, count_successors
from eagle3.checkpoint import Target, adapter_of, open_target
from eagle3.config import Config
from eagle3.decoding import Decoded, DrafterChain, LiveTarget, Proposer, Recorder, Verifier, decode, place
from eagle3.drafter import Eagle3Drafter, load_drafter
from eagle3.engines import check_engine, open_engine
from eagle3.engines.transformers import TransformersEngine
from eagle3.engines.vllm_settings import installed_version
from eagle3.errors import RequestError, StageFailed
from eagle3.evaluation import (
    OURS,
    RESULT,
    PromptResult,
    compare,
    differences,
    find_difference,
    read_evaluation,
    summarize,
    table,
)
from eagle3.model_card import add_measurement
from eagle3.prepared import Prepared
from eagle3.published import import_drafter
from eagle3.runs import Run
from eagle3.stages import export, extract
from eagle3.tokens import stop_ids

BASELINES = ("untrained", "bigram")


def source(cfg: Config, artifacts: Artifacts) -> tuple[Artifact, dict[str, Any]]:
    """What is measured, with its manifest: the exported folder; a drafter that was named and not exported as it is."""
    drafter_only = cfg.inputs.export is None and cfg.inputs.drafter is not None
    if drafter_only and engine_name(cfg) != "vllm" and not export.exported(cfg, artifacts).complete:
        trained = export.trained(cfg, artifacts)
        return trained, trained.manifest()
    return export.given(cfg, artifacts)


def engine_name(cfg: Config) -> str:
    """What decodes."""
    return cfg.evaluate.engine or cfg.hardware.engine


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Measures, shows the table, writes evaluation.json into the run folder.

    Returns the summary over all sets, and that of each in `sets`. Raises StageFailed when the drafter changed a text
    where the target's choice was no tie; what was measured is on disk by then.
    """
    check_config(cfg)
    measured, manifest = source(cfg, run.artifacts)
    target = open_target(cfg)
    training = _Training(cfg, run)
    sets = prompt_sets(
        cfg.evaluate.sets,
        cfg.evaluate.prompts_per_set,
        cache_folder(cfg.cache_dir),
        lambda: training.prepared.heldout(),
    )
    names = ", ".join(f"{len(prompts.prompts)} of {prompts.name}" for prompts in sets)
    run.log.info("evaluate: %s/%s on %s, %d drafts a round", measured.kind, measured.id, names, cfg.evaluate.k)
    if cfg.dry_run:
        return {}

    run.read(measured)
    _warn_of_another_target(run, manifest, target)
    if engine_name(cfg) == "vllm":
        return _serve(cfg, run, target, sets, measured, manifest)
    embedding = target.embedding()
    if measured.kind == "export":
        drafter = import_drafter(measured.folder, embedding, target.shape.num_layers, cfg.layers.ids)
    else:
        drafter = load_drafter(measured.folder, embedding)
    trained = manifest.get("training" if measured.kind == "export" else "metrics", {})
    hardware = dataclasses.replace(cfg.hardware, engine="transformers")
    with open_engine(dataclasses.replace(cfg, hardware=hardware), target) as engine:
        assert isinstance(engine, TransformersEngine)
        run.note(engine=dataclasses.asdict(engine.info()), adapter=target.adapter.name)
        proposers = _proposers(cfg, target, drafter, training, engine, trained.get("state_scales"))
        live = LiveTarget(engine.model, target.adapter, drafter.shape.layer_ids)
        results, skipped = _measure(cfg, run, target, live, proposers, sets)
        info = engine.info()
        engine_facts = {"name": info.name, "version": info.version, "dtype": info.dtype}
        setting = _setting(cfg, target, engine_facts, sets, measured)

    k, temperature = cfg.evaluate.k, cfg.evaluate.temperature
    summaries = {
        name: {**summarize(found, k, temperature), "skipped": skipped[name]} for name, found in results.items()
    }
    every = summarize([result for found in results.values() for result in found], k, temperature)
    simulated = _simulated(trained, k)
    metrics = {
        **every,
        "skipped": sum(skipped.values()),
        "simulated_acceptance_length": simulated,
        "drafter": str(measured.folder),
        "sets": summaries,
    }
    records = [{"set": name, **result.record()} for name, found in results.items() for result in found]
    write_json(run.folder / RESULT, {"setting": setting, **metrics, "records": records})
    if measured.kind == "export":
        add_measurement(run.artifacts, measured, f"eagle3's decoder, {info.dtype}", k, temperature, summaries)
    run.show(table(summaries, cfg.evaluate.baselines, k, f"drafter {measured.folder}"))
    real = every["acceptance_length"]
    if real is not None and simulated is not None:
        words = "evaluate: acceptance length %.3f over all sets, %.3f simulated on validation samples while training"
        run.log.info(words, real, simulated)
    _compare(cfg, run)
    _check_lossless(run, results)
    return metrics


class _Training:
    """The prepared set behind the drafter, opened when something asks for it."""

    def __init__(self, cfg: Config, run: Run) -> None:
        self._cfg, self._run = cfg, run

    @cached_property
    def prepared(self) -> Prepared:
        try:
            artifact = extract.source(self._cfg, self._run.artifacts)
        except RequestError as error:
            raise RequestError(
                f"{error}, or leave out what is measured with it: the set heldout in evaluate.sets and bigram in "
                "evaluate.baselines"
            ) from None
        self._run.read(artifact)
        return Prepared.open(artifact.folder)


def _serve(
    cfg: Config, run: Run, target: Target, sets: Sequence[PromptSet], measured: Artifact, manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """The same by vLLM: the headline's metrics, `sets` at the headline's setting, and every setting in `points`."""
    tokenizer, new, largest_k = (
        target.tokenizer(),
        cfg.evaluate.max_new_tokens,
        max([cfg.evaluate.k, *cfg.evaluate.also_k]),
    )
    room = target.shape.max_position_embeddings - new - largest_k - 1
    asked = {prompts.name: token_prompts(prompts, tokenizer, target.adapter, new, room) for prompts in sets}
    skipped = sum(len(prompts.prompts) - len(asked[prompts.name]) for prompts in sets)
    if not any(asked.values()):
        raise RequestError("evaluate.sets: no prompt leaves room for its answer; try evaluate.max_new_tokens=64")
    if cfg.evaluate.baselines:
        run.log.info("evaluate: baselines draft beside the transformers engine only; left out here")
    stops = stop_ids(tokenizer, target.adapter, target.shape.eos_token_ids)
    found = served_evaluation.measure(cfg, target, measured.folder, asked, stops, run.folder / "engine.log")
    wanted = served_evaluation.settings(cfg.evaluate)
    points = found.at(wanted[0])
    simulated = _simulated(manifest.get("training", {}), cfg.evaluate.k)
    metrics = {
        **served_evaluation.summarize(points),
        "skipped": skipped,
        "simulated_acceptance_length": simulated,
        "drafter": str(measured.folder),
        "sets": {point.set: served_evaluation.summarize([point]) for point in points},
        "points": [served_evaluation.summarize(found.at(setting)) for setting in wanted],
    }
    info = {"name": "vllm", "version": found.version, "dtype": found.dtype}
    run.note(engine=info, adapter=target.adapter.name)
    records = [served_evaluation.record(point, key, tokenizer) for point in points for key in point.served.texts]
    looping = [key for key, text in found.texts.items() if served_evaluation.looping(text)]
    setting = _setting(cfg, target, info, sets, measured)
    write_json(run.folder / RESULT, {"setting": setting, **metrics, "looping_prompts": looping, "records": records})
    add_measurement(
        run.artifacts,
        measured,
        f"vllm {found.version}, {found.dtype}",
        cfg.evaluate.k,
        cfg.evaluate.temperature,
        metrics["sets"],
    )
    run.show(served_evaluation.table(found, f"vllm {found.version} on {found.dtype}, drafter {measured.folder}"))
    changed = [
        f"{point.set} {key} (k {point.setting.k}, {point.setting.batch_size} at once): {difference}"
        for point in found.points
        for key, difference in (point.differences or {}).items()
        if not difference.tie
    ]
    _compare(cfg, run)
    _refuse_changed(run, changed)
    return metrics


def _simulated(training: Mapping[str, Any], k: int) -> float | None:
    """The acceptance length that training foretold for k drafts."""
    return training.get("validation", {}).get(f"simulated_acceptance_length/k_{k}")


def check_config(cfg: Config) -> None:
    """RequestError when the engine that decodes is absent, does not run the target's family or cannot do what
    `evaluate` asks, or what it is to be compared with is no evaluation."""
    asked_by = "hardware.engine" if cfg.evaluate.engine is None else "evaluate.engine"
    if engine_name(cfg) == "vllm":
        installed_version(asked_by)  # any family that the server knows: it is asked for text, not for states
    else:
        check_engine(adapter_of(cfg.model), engine_name(cfg), asked_by)
        for field, expected in (("temperature", 0.0), ("batch_sizes", [1]), ("also_k", []), ("also_temperatures", [])):
            found = getattr(cfg.evaluate, field)
            if found != expected:
                raise RequestError(
                    f"evaluate.{field}: found {found}, expected {expected}: the transformers engine decodes greedily, "
                    f"one prompt at a time; try evaluate.engine=vllm, or evaluate.{field}={expected}"
                )
    for field, least in (("batch_sizes", 1), ("also_k", 1), ("also_temperatures", 0)):
        wrong = [value for value in getattr(cfg.evaluate, field) if value < least]
        if wrong:
            raise RequestError(f"evaluate.{field}: found {wrong}, expected numbers of at least {least}")
    if not cfg.evaluate.batch_sizes:
        raise RequestError("evaluate.batch_sizes: found none, expected at least one; try evaluate.batch_sizes=[1,8,32]")
    unknown = [name for name in cfg.evaluate.baselines if name not in BASELINES]
    if unknown:
        raise RequestError(
            f"evaluate.baselines: found {unknown}, expected some of {list(BASELINES)}; "
            f"try evaluate.baselines=[{','.join(BASELINES)}]"
        )
    if not cfg.evaluate.sets:
        raise RequestError("evaluate.sets: found no set, expected at least one; try evaluate.sets=[heldout,mt_bench]")
    if cfg.evaluate.compare_with is not None:
        read_evaluation(Path(cfg.evaluate.compare_with))


def _warn_of_another_target(run: Run, manifest: Mapping[str, Any], target: Target) -> None:
    """A drafter can be measured on another form of its target (quantized, say), but not by accident."""
    found = differences(manifest.get("target", target.fingerprint()), target.fingerprint())
    if found:
        run.log.warning("evaluate: the drafter was made for another target: %s", "; ".join(found))


def _proposers(
    cfg: Config,
    target: Target,
    drafter: Eagle3Drafter,
    training: _Training,
    engine: TransformersEngine,
    scales: Sequence[float] | None,
) -> dict[str, Proposer]:
    """The drafter and its baselines, ready to draft beside the engine's model."""

    def placed(module: Eagle3Drafter) -> DrafterChain:
        return DrafterChain(place(module, engine.device, engine.dtype))

    untrained = _untrained(cfg, target, drafter, scales) if "untrained" in cfg.evaluate.baselines else None
    proposers: dict[str, Proposer] = {OURS: placed(drafter)}
    if untrained is not None:
        proposers["untrained"] = placed(untrained)
    if "bigram" in cfg.evaluate.baselines:
        prepared = training.prepared
        samples = (prepared.samples[int(i)] for i in prepared.split_indices("train"))
        proposers["bigram"] = BigramChain(count_successors(samples, prepared.vocab_size))
    return proposers


def _untrained(cfg: Config, target: Target, drafter: Eagle3Drafter, scales: Sequence[float] | None) -> Eagle3Drafter:
    """A drafter of the same shape and vocabulary with the weights that training starts from."""
    untrained = Eagle3Drafter(drafter.shape, target.embedding())
    untrained.set_vocabulary(drafter.d2t, drafter.t2d)
    head = None
    if cfg.drafter.init_head == "target":
        head = target.head() if drafter.target_ids is None else target.head()[drafter.target_ids]
    untrained.initialise(cfg.seed, head, scales)
    return untrained


def _measure(
    cfg: Config,
    run: Run,
    target: Target,
    live: LiveTarget,
    proposers: Mapping[str, Proposer],
    sets: Sequence[PromptSet],
) -> tuple[dict[str, list[PromptResult]], dict[str, int]]:
    """Every prompt's result, and how many prompts of each set were too long for the target."""
    tokenizer = target.tokenizer()
    stops = frozenset(stop_ids(tokenizer, target.adapter, target.shape.eos_token_ids))
    new = cfg.evaluate.max_new_tokens
    longest = target.shape.max_position_embeddings - new - cfg.evaluate.k
    asked = {prompts.name: token_prompts(prompts, tokenizer, target.adapter, new, longest) for prompts in sets}
    skipped = {prompts.name: len(prompts.prompts) - len(asked[prompts.name]) for prompts in sets}
    results: dict[str, list[PromptResult]] = {name: [] for name in asked}
    warm = False
    with run.progress(sum(map(len, asked.values())), "prompts", "evaluate") as advance:
        for name, prompts in asked.items():
            for prompt in prompts:
                if not warm:
                    # The first forwards of a process are slow and belong to nobody's speed.
                    first = prompt.input_ids
                    decode(live, first, max_new_tokens=4, stop_ids=(), proposer=proposers[OURS], k=cfg.evaluate.k)
                    warm = True
                results[name].append(
                    _decode_prompt(cfg, live, prompt.key, prompt.input_ids, stops, proposers, tokenizer)
                )
                advance(1)
    return results, skipped


def _decode_prompt(
    cfg: Config,
    live: LiveTarget,
    key: str,
    ids: Sequence[int],
    stops: frozenset[int],
    proposers: Mapping[str, Proposer],
    tokenizer: Any,
) -> PromptResult:
    """One prompt, plainly and with everybody who drafts."""
    k = cfg.evaluate.k

    def run_with(verifier: Verifier, proposer: Proposer | None = None) -> Decoded:
        drafts = 0 if proposer is None else k
        new = cfg.evaluate.max_new_tokens
        return decode(verifier, ids, max_new_tokens=new, stop_ids=stops, proposer=proposer, k=drafts)

    recorder = Recorder(live)
    plain = run_with(recorder)
    recording = recorder.recording(k)
    speculative = run_with(live, proposers[OURS])
    acceptance = {
        name: (speculative if name == OURS else run_with(recording, proposer)).acceptance
        for name, proposer in proposers.items()
    }
    difference = find_difference(live, ids, plain.token_ids, speculative.token_ids)
    return PromptResult(key, len(ids), plain, speculative, difference, acceptance, tokenizer.decode(plain.token_ids))


def _setting(
    cfg: Config, target: Target, engine: dict[str, Any], sets: Sequence[PromptSet], measured: Artifact
) -> dict[str, Any]:
    """Everything that two evaluations must share before their numbers can be compared."""
    return {
        "eagle3": eagle3.__version__,
        "engine": engine,
        "target": target.fingerprint(),
        "k": cfg.evaluate.k,
        "temperature": cfg.evaluate.temperature,
        "max_new_tokens": cfg.evaluate.max_new_tokens,
        "prompts": {prompts.name: prompts.digest for prompts in sets},
        "drafter": f"{measured.kind}/{measured.id}",
    }


def _compare(cfg: Config, run: Run) -> None:
    """Says each set's acceptance length beside that of an earlier evaluation."""
    if cfg.evaluate.compare_with is None:
        return
    for name, lengths in compare(Path(cfg.evaluate.compare_with), run.folder / RESULT).items():
        before, now = ("none" if length is None else f"{length:.3f}" for length in lengths)
        run.log.info("evaluate: %s: acceptance length %s, %s in %s", name, now, before, cfg.evaluate.compare_with)


def _check_lossless(run: Run, results: Mapping[str, Sequence[PromptResult]]) -> None:
    """Explains each tie; StageFailed when a text was changed where there was none."""
    broken: list[str] = []
    for name, found in results.items():
        for result in found:
            difference = result.difference
            if difference is None:
                continue
            if difference.tie:
                run.log.info("evaluate: tie in %s %s: %s", name, result.key, difference)
            else:
                broken.append(f"{name} {result.key}: {difference}")
    _refuse_changed(run, broken)


def _refuse_changed(run: Run, changed: Sequence[str]) -> None:
    """StageFailed when drafting changed a text beyond a tie."""
    if changed:
        raise StageFailed(
            f"evaluate: {len(changed)} outputs are not the target's own, expected none: {changed[0]}; all are in "
            f"{run.folder / RESULT}. Please report this"
        )
