"""Stage train: stored states → drafter artifact (steps 5 and 6 of the walk).

Everything that can be wrong is found before the first batch: states of other tokens or of another target, layers that
are not stored, a data set without supervised text, a checkpoint that is not there. What is being trained grows in the
artifact's `.partial` folder, where an interrupted run finds its checkpoints again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import layers
from eagle3.artifacts import Artifact, Artifacts
from eagle3.blueprint import warm_shape
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config
from eagle3.drafter import WEIGHTS
from eagle3.errors import RequestError
from eagle3.prepared import Prepared
from eagle3.published import is_published, refuse_half
from eagle3.records import sweep_of
from eagle3.runs import Run
from eagle3.stages import extract, prepare
from eagle3.store import StatesStore
from eagle3.weights import Weights

# What trains imports Lightning, which takes seconds; whoever only asks for a drafter (export, evaluate) need not wait.
if TYPE_CHECKING:
    from eagle3.checkpoints import Checkpoint
    from eagle3.training_job import TrainingInputs

MAKE = "eagle3 stage=train"
# What may differ between two runs of one artifact: it changes how the work is done, not what comes out.
OPERATIONAL = {
    "drafter": ("name",),
    "trainer": (
        *("name", "checkpoint_every_steps", "keep_checkpoints", "log_every_steps", "deterministic"),
        *("resume", "num_workers", "profile", "checkpoint_activations"),
    ),
}


def drafter(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The drafter artifact that this config leads to, made or not. RequestError when there are no states."""
    return _drafter(cfg, artifacts, open_target(cfg), source(cfg, artifacts))


def source(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The states to train on."""
    return artifacts.resolve("states", cfg.inputs.states, lambda: extract.states(cfg, artifacts), extract.MAKE)


def _drafter(cfg: Config, artifacts: Artifacts, target: Target, states: Artifact) -> Artifact:
    settings = {
        group: {key: value for key, value in dataclasses.asdict(getattr(cfg, group)).items() if key not in without}
        for group, without in OPERATIONAL.items()
    }
    for group, field in (("drafter", "warm_start"), ("trainer", "resume_from")):
        given = settings[group][field]
        settings[group][field] = None if given is None else _trained(artifacts, given, f"{group}.{field}").id
    identity = {
        "states": states.id,
        "layer_ids": list(layer_ids(cfg, target)),
        **settings,
        "seed": cfg.seed,
        "ranks": ranks(cfg),
        "precision": cfg.hardware.precision,
    }
    return artifacts.of("drafter", identity)


def _trained(artifacts: Artifacts, given: str, where: str) -> Artifact:
    """A complete drafter artifact by id or folder; for a warm start also a published drafter's folder."""
    folder = Path(given).expanduser().resolve()
    if where == "drafter.warm_start" and is_published(folder):
        return Artifact("drafter", Weights(folder).digest(), folder)
    if where == "drafter.warm_start":
        refuse_half(folder, where)
    found = artifacts.resolve("drafter", given, None, MAKE, where)
    if not (found.folder / WEIGHTS).is_file():
        raise RequestError(f"{where}: {found.folder} holds no {WEIGHTS}, expected a trained drafter; see stage=runs")
    return found


def _origin(cfg: Config, artifacts: Artifacts, target: Target) -> Artifact | None:
    """The drafter that this one goes on from."""
    given, longer = cfg.drafter.warm_start, cfg.trainer.resume_from
    if longer is None:
        return None if given is None else _trained(artifacts, given, "drafter.warm_start")
    if given is not None:
        raise RequestError(
            "drafter.warm_start: cannot go with trainer.resume_from, which brings its own weights; leave one out"
        )
    origin = _trained(artifacts, longer, "trainer.resume_from")
    if differing := _other_target(origin, target):
        raise RequestError(
            f"trainer.resume_from: {origin.folder} was trained for another target ({differing}), expected the same; "
            "configure that one, or take only its weights with drafter.warm_start"
        )
    return origin


def _other_target(origin: Artifact, target: Target) -> str:
    """How the target that a drafter was trained for differs; what others have published does not say which it was."""
    trained_for = origin.manifest().get("target") if origin.complete else None
    return "" if trained_for is None else target.differences(trained_for)


def _previous(cfg: Config, origin: Artifact | None) -> Checkpoint | None:
    """The checkpoint of `trainer.resume_from`."""
    if cfg.trainer.resume_from is None or origin is None:
        return None
    from eagle3.checkpoints import checkpoint_to_resume

    checkpoint = checkpoint_to_resume(origin.folder, "trainer.resume_from")
    before, now = checkpoint.manifest["accumulate"], cfg.trainer.accumulate
    if before != now:
        raise RequestError(
            f"trainer.accumulate: found {now}, expected {before}, with which trainer.resume_from="
            f"{cfg.trainer.resume_from} counted its steps; try trainer.accumulate={before}"
        )
    if cfg.trainer.max_steps is not None and cfg.trainer.max_steps <= checkpoint.step:
        raise RequestError(
            f"trainer.resume_from: {cfg.trainer.resume_from} was trained for {checkpoint.step} steps, this run ends at "
            f"{cfg.trainer.max_steps}; expected more: raise trainer.max_steps"
        )
    return checkpoint


def layer_ids(cfg: Config, target: Target) -> tuple[int, ...]:
    """The layers that this drafter reads."""
    return extract.selections(cfg.layers, target.shape.num_layers)[0]


def ranks(cfg: Config) -> int:
    """The number of training processes."""
    return cfg.hardware.devices * int(cfg.trainer.lightning.get("num_nodes", 1))


def check_config(cfg: Config) -> None:
    """RequestError for what can be wrong with the training before there are states to train on."""
    from eagle3.training_job import check_settings, origin_field

    check_settings(cfg)
    artifacts, target = Artifacts(Path(cfg.output_dir).absolute() / "artifacts", attached=True), open_target(cfg)
    origin = _origin(cfg, artifacts, target)
    _previous(cfg, origin)
    if origin is not None:
        warm_shape(cfg.drafter, target, layer_ids(cfg, target), origin.folder, origin_field(cfg))


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Trains. Returns `steps, tokens, tokens_per_s, loss, simulated_acceptance_length, peak_memory_bytes` and more."""
    target = open_target(cfg)
    if _awaits_sweep(cfg, run, target):
        run.log.info("train: would train on layers %s, once the sweep has stored them", list(layer_ids(cfg, target)))
        return {}
    states = source(cfg, run.artifacts)
    artifact = _drafter(cfg, run.artifacts, target, states)
    if artifact.complete or not (cfg.dry_run or run.artifacts.claim(artifact)):
        artifact.check_sizes(MAKE)
        run.log.info("train: hit, %s is complete", artifact.folder)
        run.wrote(artifact)
        return artifact.manifest()["metrics"]
    from eagle3.training_job import TrainingJob

    job = TrainingJob(cfg, run, artifact, _inputs(cfg, run, target, states))
    job.announce()
    if cfg.dry_run:
        return {}
    return job.train()


def _awaits_sweep(cfg: Config, run: Run, target: Target) -> bool:
    """Whether this is the dry run of a sweep's job, whose states the sweep would make before it."""
    if extract.awaits_sweep(cfg, run):
        return True
    if not cfg.dry_run or cfg.inputs.states is not None or sweep_of(run.folder) is None:
        return False
    states = extract.states(cfg, run.artifacts)
    return not states.complete or not {*layer_ids(cfg, target)} <= {*states.manifest()["layer_ids"]}


def _inputs(cfg: Config, run: Run, target: Target, states: Artifact) -> TrainingInputs:
    """Everything that is read, each held against the others."""
    from eagle3.training_job import TrainingInputs, check_settings

    check_settings(cfg)
    run.read(states)
    store, ids = StatesStore.open(states.folder), layer_ids(cfg, target)
    store.check_target(target)
    absent = [i for i in ids if i not in store.layer_ids]
    if absent:
        raise RequestError(
            f"layers: {states.folder} holds layers {list(store.layer_ids)}, the drafter reads {list(ids)}; run "
            f"`{extract.MAKE} {layers.override(ids)}` to add {absent}"
        )
    given = cfg.inputs.prepared or store.manifest["prepared"]
    prepared = Prepared.open(run.read(run.artifacts.resolve("prepared", given, None, prepare.MAKE)).folder)
    store.verify(prepared)
    store.check_sizes([*ids, store.final_id])
    origin = _origin(cfg, run.artifacts, target)
    previous = _previous(cfg, origin)
    if origin is not None and previous is not None:
        run.read(origin)
    elif origin is not None and (differing := _other_target(origin, target)):
        run.log.warning("drafter.warm_start: %s was trained for another target: %s", origin.folder, differing)
    return TrainingInputs(target, states, store, prepared, ids, origin, previous, ranks(cfg))
