"""Stage evaluate: real decoding with the drafter in the loop, beside its baselines (step 8 of the walk).

The target decodes every prompt twice: plainly, which gives the text, the states along it and the speed to beat; and
with the drafter, which must give the same text. Baselines draft along the recorded text, which needs no forward of the
target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import eagle3
from eagle3.assets import cache_folder
from eagle3.benchmarks import PromptSet, prompt_sets
from eagle3.bigram import BigramChain, count_successors
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config
from eagle3.decoding import Decoded, DrafterChain, LiveTarget, Proposer, Recorder, decode, place
from eagle3.drafter import Eagle3Drafter, load_drafter
from eagle3.engines import EngineInfo, open_engine
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import RequestError, StageFailed
from eagle3.evaluation import OURS, PromptResult, differences, find_difference, summarize, table
from eagle3.export import import_drafter
from eagle3.runs import Artifact, Artifacts, Run, write_json
from eagle3.stages import export, extract
from eagle3.tokens import Prepared, prompt_ids, stop_ids

RESULT = "evaluation.json"
BASELINES = ("untrained", "bigram")


def source(cfg: Config, artifacts: Artifacts) -> Artifact:
    """What is measured: the exported folder; a drafter that was named and not exported is measured as it is."""
    if cfg.inputs.export is not None:
        expected = Artifact("export", cfg.inputs.export, artifacts.root)
    else:
        expected = export.exported(cfg, artifacts)
        if cfg.inputs.drafter is not None and not expected.complete:
            return export.trained(cfg, artifacts)
    return artifacts.resolve("export", cfg.inputs.export, expected, export.MAKE)


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Measures, shows the table, writes evaluation.json into the run folder.

    Returns the summary over all sets, and that of each in `sets`. Raises StageFailed when the drafter changed a text
    where the target's choice was no tie; what was measured is on disk by then.
    """
    _check(cfg)
    measured = source(cfg, run.artifacts)
    target = open_target(cfg)
    manifest = measured.manifest()
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
    embedding = target.embedding()
    read = import_drafter if measured.kind == "export" else load_drafter
    drafter = read(measured.folder, embedding)
    trained = manifest["training" if measured.kind == "export" else "metrics"]
    with open_engine(cfg, target) as engine:
        assert isinstance(engine, TransformersEngine)
        run.note(engine=dataclasses.asdict(engine.info()), adapter=target.adapter.name)
        proposers = _proposers(cfg, target, drafter, training, engine, trained.get("state_scales"))
        live = LiveTarget(engine.model, target.adapter, drafter.shape.layer_ids)
        results, skipped = _measure(cfg, run, target, live, proposers, sets)
        setting = _setting(cfg, target, engine.info(), sets, measured)

    k, temperature = cfg.evaluate.k, cfg.evaluate.temperature
    summaries = {
        name: {**summarize(found, k, temperature), "skipped": skipped[name]} for name, found in results.items()
    }
    every = summarize([result for found in results.values() for result in found], k, temperature)
    simulated = trained.get("validation", {}).get(f"simulated_acceptance_length/k_{k}")
    metrics = {
        **every,
        "skipped": sum(skipped.values()),
        "simulated_acceptance_length": simulated,
        "drafter": str(measured.folder),
        "sets": summaries,
    }
    records = [{"set": name, **result.record()} for name, found in results.items() for result in found]
    write_json(run.folder / RESULT, {"setting": setting, **metrics, "records": records})
    run.show(table(summaries, cfg.evaluate.baselines, k, f"drafter {measured.folder}"))
    real = every["acceptance_length"]
    if real is not None and simulated is not None:
        words = "evaluate: acceptance length %.3f over all sets, %.3f simulated on validation samples while training"
        run.log.info(words, real, simulated)
    _check_lossless(run, results)
    return metrics


class _Training:
    """The prepared set behind the drafter, opened when something asks for it."""

    def __init__(self, cfg: Config, run: Run) -> None:
        self._cfg, self._run = cfg, run

    @cached_property
    def prepared(self) -> Prepared:
        artifact = extract.source(self._cfg, self._run.artifacts)
        self._run.read(artifact)
        return Prepared.open(artifact.folder)


def _check(cfg: Config) -> None:
    if cfg.hardware.engine != "transformers":
        raise RequestError(
            f"hardware.engine: found '{cfg.hardware.engine}', expected transformers, the engine that decodes with a "
            "drafter today; try hardware=cpu or hardware=gpu_1"
        )
    if cfg.evaluate.temperature > 0:
        raise RequestError(
            f"evaluate.temperature: found {cfg.evaluate.temperature}, expected 0: decoding with a drafter is greedy "
            "today, where outputs with and without it can be compared; try evaluate.temperature=0"
        )
    unknown = [name for name in cfg.evaluate.baselines if name not in BASELINES]
    if unknown:
        raise RequestError(
            f"evaluate.baselines: found {unknown}, expected some of {list(BASELINES)}; "
            f"try evaluate.baselines=[{','.join(BASELINES)}]"
        )
    if not cfg.evaluate.sets:
        raise RequestError("evaluate.sets: found no set, expected at least one; try evaluate.sets=[heldout,mt_bench]")


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
    stops = frozenset(stop_ids(tokenizer, target.adapter))
    longest = target.shape.max_position_embeddings - cfg.evaluate.max_new_tokens - cfg.evaluate.k
    results: dict[str, list[PromptResult]] = {prompts.name: [] for prompts in sets}
    skipped = dict.fromkeys(results, 0)
    asked = [(prompts.name, prompt) for prompts in sets for prompt in prompts.prompts]
    warm = False
    with run.progress(len(asked), "prompts", "evaluate") as advance:
        for name, prompt in asked:
            ids = prompt_ids(tokenizer, target.adapter, prompt.messages)
            if len(ids) > longest:
                skipped[name] += 1
                run.log.warning(
                    "%s: prompt of %d tokens, more than the %d that leave room for evaluate.max_new_tokens=%d; skipped",
                    *(prompt.key, len(ids), longest, cfg.evaluate.max_new_tokens),
                )
            else:
                if not warm:
                    # The first forwards of a process are slow and belong to nobody's speed.
                    decode(live, ids, max_new_tokens=4, stop_ids=(), proposer=proposers[OURS], k=cfg.evaluate.k)
                    warm = True
                results[name].append(_decode_prompt(cfg, live, prompt.key, ids, stops, proposers, tokenizer))
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

    def run_with(verifier: Any, proposer: Proposer | None = None) -> Decoded:
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
    cfg: Config, target: Target, info: EngineInfo, sets: Sequence[PromptSet], measured: Artifact
) -> dict[str, Any]:
    """Everything that two evaluations must share before their numbers can be compared."""
    return {
        "eagle3": eagle3.__version__,
        "engine": {"name": info.name, "version": info.version, "dtype": info.dtype},
        "target": target.fingerprint(),
        "k": cfg.evaluate.k,
        "temperature": cfg.evaluate.temperature,
        "max_new_tokens": cfg.evaluate.max_new_tokens,
        "prompts": {prompts.name: prompts.digest for prompts in sets},
        "drafter": f"{measured.kind}/{measured.id}",
    }


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
    if broken:
        raise StageFailed(
            f"evaluate: {len(broken)} outputs are not the target's own, expected none: {broken[0]}; all are in "
            f"{run.folder / RESULT}. Please report this"
        )
