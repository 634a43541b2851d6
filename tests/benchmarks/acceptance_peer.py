"""How long are accepted drafts after equal training: eagle3's drafters beside SpecForge's, several seeds of each.

    python -m tests.benchmarks.acceptance_peer --out results.json --folder /tmp/acceptance --prepared FOLDER \\
        model.path=FOLDER hardware=gpu_1 [more overrides]

Trained on the same stored states: eagle3 by stage=train, once as it is and once with a random head, and SpecForge's own
classes (`specforge_training`) on the same documents a step, for the same steps, with the same peak learning rate,
schedule, clipping, layers and draft vocabulary. All drafters, SpecForge's through our import of its published form, in
bf16, then draft beside the same target along the text that it writes (evaluate's decoder) and along the validation
samples (training's simulation). Each drafter is its last step's. Every part is a process of its own, many at once;
what one does not bring is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from eagle3.artifacts import Artifacts
from eagle3.assets import cache_folder
from eagle3.batches import PackedDataModule
from eagle3.benchmarks import prompt_sets, token_prompts
from eagle3.blueprint import new_drafter
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config
from eagle3.decoding import Acceptance, DrafterChain, LiveTarget, Recorder, decode, place
from eagle3.engines import open_engine
from eagle3.engines.transformers import TransformersEngine
from eagle3.prepared import Prepared
from eagle3.published import read_drafter
from eagle3.stages import extract, train
from eagle3.store import StatesStore
from eagle3.tokens import stop_ids
from eagle3.trainer import build_trainer, quiet_lightning
from eagle3.training import DrafterTraining
from tests.benchmarks.specforge_training import SpecForgeTraining
from tests.drafters import stored
from tests.stages import configure, run_stage

# The demo's recipe, but SpecForge's unroll and decay, which are also eagle3's defaults; no choice among checkpoints.
RECIPE = [
    "model=smollm2_135m",
    "model.dtype=bfloat16",
    "drafter.draft_vocab_size=6144",
    "trainer.max_epochs=4",
    "trainer.batch_tokens=512",
    "trainer.lr=1.0e-3",
    "trainer.validate_every_steps=1000000",
    "trainer.checkpoint_every_steps=1000000",
    "evaluate.sets=[heldout,mt_bench]",
    "evaluate.prompts_per_set=40",
    "evaluate.max_new_tokens=128",
    "evaluate.k=3",
]
# Who trains, with overrides of its own.
TRAINED: dict[str, list[str]] = {
    "eagle3": [],
    "eagle3_random_head": ["drafter.init_head=random"],
    "specforge": ["drafter.init_head=random"],
}
DIFFERENCES = [
    "heads: eagle3 starts from the target's rows, eagle3_random_head and SpecForge from random ones",
    "initialisation: eagle3 scales fc by the states' sizes, SpecForge draws everything with standard deviation 0.02",
    "weights: eagle3 trains fp32 masters with fp32 gradient sums; SpecForge trains bf16 weights, with bf16 gradients, "
    "beside fp32 masters of its optimizer",
    "rows: eagle3 supervises the drafts that serving can reach; SpecForge misses the first of an answer and takes two "
    "behind its end, and averages over padding too",
    "AdamW's betas: 0.9, 0.95 and 0.9, 0.999, each its own default",
]


def states_of(cfg: Config, target: Target) -> tuple[Prepared, StatesStore, tuple[int, ...]]:
    """What stage=train reads for this configuration, and the layers that the drafter reads."""
    artifacts = Artifacts(Path(cfg.output_dir) / "artifacts")
    store = StatesStore.open(train.source(cfg, artifacts).folder)
    return Prepared.open(extract.source(cfg, artifacts).folder), store, train.layer_ids(cfg, target)


def data_of(cfg: Config, prepared: Prepared, store: StatesStore, ids: Sequence[int], inside: Any) -> PackedDataModule:
    """The data module of stage=train: its plan says which documents a step takes."""
    drafter, recipe = cfg.drafter, cfg.trainer
    return PackedDataModule(
        prepared, store, ids, inside, drafter.unroll_steps, drafter.mask_alignment, recipe.batch_tokens,
        recipe.max_epochs, recipe.max_steps, recipe.accumulate, cfg.seed,
    )  # fmt: skip


def train_one(overrides: Sequence[str], who: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains one drafter; says its folder, its accuracies and simulated acceptance on the validation samples."""
    cfg = configure(*overrides, *TRAINED[who], f"seed={seed}")
    target = open_target(cfg)
    prepared, store, ids = states_of(cfg, target)
    fresh, vocab = new_drafter(cfg.drafter, target, prepared, ids, cfg.seed)
    data = data_of(cfg, prepared, store, ids, None if vocab.is_full else vocab.t2d.numpy())
    start = time.perf_counter()
    if who == "specforge":
        device = "cuda" if cfg.hardware.accelerator == "gpu" else "cpu"
        peer = SpecForgeTraining(fresh.shape, target, vocab, data.plan.steps, cfg.trainer.lr, seed, device)
        last: Any = None
        for index in range(data.plan.batches):
            rows = data.train_rows[data.plan.documents(index)[0]]
            last = peer.step([stored(data, row) for row in rows.tolist()])
        trained, last = folder / f"specforge-{seed}", float(last)
        peer.save(trained)
    else:
        metrics, run = run_stage("train", cfg)
        trained, last = train.drafter(cfg, run.artifacts).folder, metrics["loss"]
    seconds = time.perf_counter() - start
    drafter = read_drafter(trained, target, ids)
    assert (drafter.shape.rope_theta, drafter.shape.head_dim) == (fresh.shape.rope_theta, fresh.shape.head_dim)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())  # as it will draft
    module = DrafterTraining(drafter, target.teacher_head(), cfg.drafter, cfg.trainer, 1, lambda *_: None)
    exact = dataclasses.replace(cfg, hardware=dataclasses.replace(cfg.hardware, precision="32-true"))
    with quiet_lightning():
        build_trainer(exact, folder, [], []).validate(module, datamodule=data, verbose=False)
    return {
        "who": who,
        "seed": seed,
        "folder": str(trained),
        "steps": data.plan.steps,
        "seconds": round(seconds, 1),
        "last_loss": last,
        "validation": {name: round(value, 4) for name, value in module.validation.items() if _told(name)},
    }


def _told(name: str) -> bool:
    return name.startswith(("simulated_acceptance_length/", "accuracy_unconditional/"))


def evaluate(overrides: Sequence[str], folders: dict[str, str], part: int, parts: int) -> dict[str, Any]:
    """Every `parts`-th prompt from `part` on: the target writes each answer once, along which every drafter drafts.

    By set and drafter the counts of `Acceptance.reached`.
    """
    cfg = configure(*overrides)
    target = open_target(cfg)
    prepared, _, ids = states_of(cfg, target)
    settings, tokenizer = cfg.evaluate, target.tokenizer()
    new, k = settings.max_new_tokens, settings.k
    sets = prompt_sets(settings.sets, settings.prompts_per_set, cache_folder(cfg.cache_dir), prepared.heldout)
    stops = frozenset(stop_ids(tokenizer, target.adapter))
    counts: dict[str, dict[str, list[int]]] = {}
    with open_engine(cfg, target) as engine:
        assert isinstance(engine, TransformersEngine)
        live = LiveTarget(engine.model, target.adapter, ids)
        chains = {
            name: DrafterChain(place(read_drafter(Path(folder), target, ids), engine.device, engine.dtype))
            for name, folder in folders.items()
        }
        for prompts in sets:
            found = counts[prompts.name] = {name: [0] * (k + 1) for name in [*chains, "prompts", "tokens"]}
            room = target.shape.max_position_embeddings - new - k
            for prompt in token_prompts(prompts, tokenizer, target.adapter, new, room)[part::parts]:
                recorder = Recorder(live)
                text = decode(recorder, prompt.input_ids, max_new_tokens=new, stop_ids=stops)
                found["prompts"][0] += 1
                found["tokens"][0] += len(text.token_ids)
                recording = recorder.recording(k)
                for name, chain in chains.items():
                    drafted = decode(
                        recording, prompt.input_ids, max_new_tokens=new, stop_ids=stops, proposer=chain, k=k
                    )
                    assert drafted.token_ids == text.token_ids
                    reached = drafted.acceptance.reached
                    found[name] = [a + b for a, b in zip(found[name], reached, strict=True)]
    return counts


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation over the seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.fmean(values), 4), "deviation": round(deviation, 4)}


def summarize(trained: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]], k: int) -> dict[str, Any]:
    """Acceptance lengths of every drafter, and mean and spread over the seeds of whoever trained it."""
    sets = list(parts[0])
    for found in trained:
        name = f"{found['who']}-{found['seed']}"
        reached = {s: [sum(counts) for counts in zip(*(p[s][name] for p in parts), strict=True)] for s in sets}
        reached["all"] = [sum(counts) for counts in zip(*reached.values(), strict=True)]
        lengths = {s: Acceptance(tuple(counts)).acceptance_length for s, counts in reached.items()}
        found["acceptance_length"] = {s: length and round(length, 4) for s, length in lengths.items()}
    means: dict[str, Any] = {}
    for who in dict.fromkeys(found["who"] for found in trained):
        mine = [found for found in trained if found["who"] == who]
        means[who] = {s: spread([found["acceptance_length"][s] for found in mine]) for s in [*sets, "all"]}
        key = f"simulated_acceptance_length/k_{k}"
        means[who]["simulated"] = spread([found["validation"][key] for found in mine])
    asked = {s: {what: sum(p[s][what][0] for p in parts) for what in ("prompts", "tokens")} for s in sets}
    return {"means": means, "asked": asked, "drafters": list(trained)}


def child(request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """A step in a process of its own; None, and the end of what it said, when it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.acceptance_peer", "--child", json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"{request['do']} {request.get('who', '')}: not done after {timeout_s:.0f} s", flush=True)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"result"')]
    if done.returncode or not lines:
        print(f"{request['do']} {request.get('who', '')}: {done.stderr[-2000:]}", flush=True)
        return None
    return json.loads(lines[-1])["result"]


def work(request: dict[str, Any]) -> dict[str, Any]:
    """What a child does."""
    overrides = request["overrides"]
    if request["do"] == "extract":
        return run_stage("extract", configure(*overrides))[0]
    if request["do"] == "train":
        return train_one(overrides, request["who"], request["seed"], Path(request["folder"]))
    return evaluate(overrides, request["folders"], request["part"], request["parts"])


def versions() -> dict[str, str]:
    """Versions of what took part, as far as it is installed."""
    found = {}
    for name in ("torch", "transformers", "specforge", "eagle3"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from source"
    return found


def main() -> None:
    """Extracts, trains all side by side, evaluates side by side, writes one file."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps({"result": work(json.loads(sys.argv[2]))}), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--who", nargs="*", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--processes", type=int, default=9, help="at once; the prompts are shared out among so many")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each process")
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    paths = [f"inputs.prepared={chosen.prepared.resolve()}", f"output_dir={chosen.folder.resolve() / 'outputs'}"]
    overrides = [*RECIPE, *paths, *chosen.overrides]
    start = time.perf_counter()

    def all_of(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(chosen.processes) as pool:
            done = pool.map(lambda request: child({"overrides": overrides, **request}, chosen.timeout), requests)
            found = [result for result in done if result is not None]
        shown = f"{len(found)} of {len(requests)} done"
        print(f"[{time.perf_counter() - start:.0f} s] {requests[0]['do']}: {shown}", flush=True)
        if not found:
            raise SystemExit(1)
        return found

    all_of([{"do": "extract"}])
    jobs = [
        {"do": "train", "who": w, "seed": s, "folder": str(chosen.folder)} for w in chosen.who for s in chosen.seeds
    ]
    trained = all_of(jobs)
    folders = {f"{found['who']}-{found['seed']}": found["folder"] for found in trained}
    parts = max(chosen.processes, 1)
    measured = all_of([{"do": "evaluate", "folders": folders, "part": p, "parts": parts} for p in range(parts)])
    cfg = configure(*overrides)
    result = {
        "what": "acceptance length after equal training on the same states",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(),
        "recipe": [*RECIPE, *chosen.overrides],
        "differences": DIFFERENCES,
        "k": cfg.evaluate.k,
        **summarize(trained, measured, cfg.evaluate.k),
        "seconds": round(time.perf_counter() - start, 1),
    }
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    for who, means in result["means"].items():
        print(who, {s: f"{x['mean']:.4f} ± {x['deviation']:.4f}" for s, x in means.items()}, flush=True)


if __name__ == "__main__":
    main()
