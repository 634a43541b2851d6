"""Stage serve_check: the exported folder in the real vLLM, against our own decoder and the forecast (end of the walk).

vLLM serves the target with the drafter and answers every prompt by itself; then it answers plainly, which must give the
same texts, and hands out the states along those that it served, on which our decoder walks with the same folder. So
rounds are compared for all prompts, also where rounding made a text take another turn. Two starts of the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.agreement import FORECAST_SHARE, CheckedPrompt, faults, find_served_difference, summarize, table
from eagle3.artifacts import write_json
from eagle3.assets import cache_folder
from eagle3.benchmarks import prompt_sets, token_prompts
from eagle3.checkpoint import Target, adapter_of, open_target
from eagle3.config import Config
from eagle3.decoding import DrafterChain, Recording, decode, place
from eagle3.engines import Prompt, check_engine
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_serving import Served, ServedTarget
from eagle3.engines.vllm_settings import installed_version
from eagle3.errors import RequestError, StageFailed
from eagle3.evaluation import Difference
from eagle3.model_card import add_measurement
from eagle3.prepared import Prepared
from eagle3.published import import_drafter
from eagle3.runs import Run
from eagle3.stages import export, extract
from eagle3.tokens import Sample, stop_ids

RESULT = "serve_check.json"


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Serves, compares, shows the table, writes serve_check.json into the run folder.

    Returns the summary over all sets, and that of each in `sets`. Raises StageFailed when a text is not the target's
    own or when the server accepts other drafts than our decoder; what was measured is on disk by then.
    """
    installed_version("stage=serve_check")
    if cfg.evaluate.temperature > 0:
        raise RequestError(
            f"evaluate.temperature: found {cfg.evaluate.temperature}, expected 0: rounds are compared on greedy texts; "
            "try evaluate.temperature=0, or stage=evaluate evaluate.engine=vllm for sampled ones"
        )
    check_engine(adapter_of(cfg.model), "vllm", "stage=serve_check")
    exported, manifest = export.given(cfg, run.artifacts)
    target = open_target(cfg)
    k = cfg.evaluate.k
    asked = _asked(cfg, run, target)
    prompts = [prompt for found in asked.values() for prompt in found]
    words = ", ".join(f"{len(found)} of {name}" for name, found in asked.items())
    run.log.info("serve_check: %s on %s, %d drafts a round", exported.folder, words, k)
    if cfg.dry_run:
        return {}
    if not prompts:
        raise RequestError("evaluate.sets: no prompt leaves room for its answer; try evaluate.max_new_tokens=64")

    run.read(exported)
    check = _Check(cfg, run, target, exported.folder, prompts)
    check.serve()
    check.capture()
    checked, dtype, version = check.walked(), check.dtype, check.version

    forecast = manifest.get("training", {}).get("validation", {}).get(f"simulated_acceptance_length/k_{k}")
    summaries = {
        name: summarize([checked[prompt.key] for prompt in found], k, dtype, forecast) for name, found in asked.items()
    }
    every = summarize(list(checked.values()), k, dtype, forecast)
    metrics = {**every, "engine": f"vllm {version}", "drafter": str(exported.folder), "sets": summaries}
    records = [checked[prompt.key].record() for prompt in prompts]
    write_json(run.folder / RESULT, {**metrics, "records": records})
    add_measurement(run.artifacts, exported, f"vllm {version}, {dtype}", k, 0.0, summaries)
    run.show(table(summaries, f"vllm {version} on {dtype}, drafter {exported.folder}, {k} drafts a round"))
    _judge(run, list(checked.values()), every)
    return metrics


def _asked(cfg: Config, run: Run, target: Target) -> dict[str, list[Prompt]]:
    """The prompts of every set; a text that is there twice is asked once."""

    def heldout() -> Sequence[Any]:
        artifact = run.read(extract.source(cfg, run.artifacts))
        return Prepared.open(artifact.folder).heldout()

    sets = prompt_sets(cfg.evaluate.sets, cfg.evaluate.prompts_per_set, cache_folder(cfg.cache_dir), heldout)
    tokenizer, new = target.tokenizer(), cfg.evaluate.max_new_tokens
    room = target.shape.max_position_embeddings - new - cfg.evaluate.k - 1
    seen: set[tuple[int, ...]] = set()
    found: dict[str, list[Prompt]] = {}
    for prompts in sets:
        found[prompts.name] = []
        for prompt in token_prompts(prompts, tokenizer, target.adapter, new, room):
            if tuple(prompt.input_ids) not in seen:
                seen.add(tuple(prompt.input_ids))
                found[prompts.name].append(prompt)
    return found


class _Check:
    """The three looks at the same prompts: served with drafts, plainly with states, and walked by our decoder."""

    def __init__(self, cfg: Config, run: Run, target: Target, folder: Path, prompts: Sequence[Prompt]) -> None:
        self.cfg, self.run, self.target, self.folder, self.prompts = cfg, run, target, folder, prompts
        self.drafter = import_drafter(folder, target.embedding(), target.shape.num_layers, cfg.layers.ids)
        self.stops = stop_ids(target.tokenizer(), target.adapter, target.shape.eos_token_ids)
        self.longest = max(len(prompt.input_ids) for prompt in prompts) + cfg.evaluate.max_new_tokens
        self.log_file = run.folder / "engine.log"
        # By key: the server's text and rounds, how the plain text differs, what our decoder walks on.
        self.served: dict[str, Served] = {}
        self.differences: dict[str, Difference | None] = {}
        self.recordings: dict[str, Recording] = {}
        self.dtype = self.version = ""

    def serve(self) -> None:
        """One prompt at a time, so that the counters tell the rounds of each."""
        k = self.cfg.evaluate.k
        with ServedTarget(
            self.cfg, self.target, self.log_file, longest=self.longest, drafter=self.folder, k=k
        ) as server:
            self.dtype, self.version = server.dtype, server.version
            for prompt in self.prompts:
                self.served[prompt.key] = server.decode(
                    [prompt], batch_size=1, temperature=0.0, seed=self.cfg.seed, stop_ids=self.stops
                )

    def capture(self) -> None:
        """The texts without drafts, and the states along the served ones and the tokens that a last round may draft."""
        k, ids = self.cfg.evaluate.k, self.drafter.shape.layer_ids
        lengths = dataclasses.replace(self.cfg.dataset, max_length=self.longest, max_new_tokens=k)
        with VllmEngine(dataclasses.replace(self.cfg, dataset=lengths), self.target, log_file=self.log_file) as engine:
            self.run.note(engine=dataclasses.asdict(engine.info()), adapter=self.target.adapter.name)
            found = engine.generate(self.prompts, temperature=0.0, seed=self.cfg.seed, stop_ids=self.stops)
            plain = {text.key: text.token_ids for text in found}
            for prompt in self.prompts:
                texts = (plain[prompt.key], self._text(prompt))
                self.differences[prompt.key] = find_served_difference(engine, prompt.input_ids, *texts, self.dtype)
            more = [Prompt(prompt.key, [*prompt.input_ids, *self._text(prompt)], k) for prompt in self.prompts]
            after = {text.key: text.token_ids for text in engine.generate(more, temperature=0.0, seed=0, stop_ids=())}
            texts = {prompt.key: [*prompt.input_ids, *after[prompt.key]] for prompt in more}
            for captured in engine.capture([_sample(key, text) for key, text in texts.items()], ids):
                rows = torch.cat([captured.states[i] for i in ids], dim=-1)
                self.recordings[captured.sample_id] = Recording(texts[captured.sample_id], rows[:-1])

    def walked(self) -> dict[str, CheckedPrompt]:
        """Our decoder along every served text, in the server's dtype and on its device, which is free again."""
        device = torch.device("cuda" if self.cfg.hardware.accelerator == "gpu" else "cpu")
        chain = DrafterChain(place(self.drafter, device, getattr(torch, self.dtype)))
        checked: dict[str, CheckedPrompt] = {}
        for prompt in self.prompts:
            key = prompt.key
            ours = decode(
                self.recordings[key].to(device),
                prompt.input_ids,
                max_new_tokens=prompt.max_new_tokens,
                stop_ids=self.stops,
                proposer=chain,
                k=self.cfg.evaluate.k,
            )
            counted = self.served[key].acceptance
            assert counted is not None
            tokens = len(prompt.input_ids)
            text, difference = self._text(prompt), self.differences[key]
            checked[key] = CheckedPrompt(key, tokens, text, difference, counted, ours.acceptance)
        return checked

    def _text(self, prompt: Prompt) -> list[int]:
        """What the server wrote with drafts."""
        return self.served[prompt.key].texts[prompt.key].token_ids


def _sample(key: str, text: Sequence[int]) -> Sample:
    return Sample(key, np.asarray(text, dtype=np.int32), np.ones(len(text), dtype=bool), "validation", key)


def _judge(run: Run, checked: Sequence[CheckedPrompt], summary: Mapping[str, Any]) -> None:
    """Says how it went; StageFailed when the server does something else than our decoder."""
    for prompt in checked:
        if prompt.difference is not None and prompt.difference.tie:
            run.log.info("serve_check: tie in %s: %s", prompt.key, prompt.difference)
    found = faults(checked, summary)
    if found:
        raise StageFailed(f"serve_check: {'; '.join(found)}; all is in {run.folder / RESULT}")
    run.log.info(
        "serve_check: acceptance length %.3f in the server, %.3f by our decoder on the same texts (%d of %d apart)",
        *(summary["acceptance_length"], summary["acceptance_length_ours"], summary["apart"], summary["drafted"]),
    )
    forecast, accepted = summary["forecast"], summary["accepted_drafts"]
    if forecast is None:
        return
    run.log.info("serve_check: training foretold %.3f on its validation samples", forecast)
    if accepted < FORECAST_SHARE * (forecast - 1):
        run.log.warning(
            "serve_check: the server accepts %.3f drafts a round, training foretold %.3f; our decoder agrees with the "
            "server, so these prompts are harder than the training data: compare evaluate.sets=[heldout]",
            *(accepted, forecast - 1),
        )
