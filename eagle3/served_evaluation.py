"""An evaluation by the server itself: acceptance, speed and speed-up over k, batch size and temperature (walk: step 8).

The server without a drafter decodes first: it gives the speed to beat, the texts that drafts must not change, and which
texts run into a loop. Then one start for each k. Acceptance comes from the server's counters. Above temperature 0 the
server samples, and its own rejection sampling is what keeps the distribution; only speed and acceptance are measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eagle3.agreement import find_served_difference, pooled
from eagle3.checkpoint import Target
from eagle3.config import Config, EvaluateConfig
from eagle3.engines import Generation, Prompt
from eagle3.engines.vllm_serving import Served, ServedTarget
from eagle3.evaluation import Difference, impossible_speeds, loops

log = logging.getLogger("eagle3")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setting:
    """What a server was asked for: drafts a round, sampling temperature, prompts at once."""

    k: int
    temperature: float
    batch_size: int


def settings(cfg: EvaluateConfig) -> list[Setting]:
    """All settings of a config, the headline's first."""
    ks = dict.fromkeys([cfg.k, *cfg.also_k])
    temperatures = dict.fromkeys([cfg.temperature, *cfg.also_temperatures])
    sizes = dict.fromkeys(cfg.batch_sizes)
    return [Setting(*chosen) for chosen in itertools.product(ks, temperatures, sizes)]


@dataclass(frozen=True)
class Point:
    """One prompt set at one setting: with the drafter and, at the same temperature and batch size, without it.

    `looping` prompts are in neither. `differences` are those of greedy texts; None when the server sampled.
    """

    set: str
    setting: Setting
    served: Served
    plain: Served
    looping: int
    differences: Mapping[str, Difference] | None


@dataclass(frozen=True)
class Measured:
    """All points, the plain texts at the headline's temperature by key, and what served them."""

    points: list[Point]
    texts: dict[str, Generation]
    version: str
    dtype: str

    def at(self, setting: Setting) -> list[Point]:
        """The points of one setting, one for each set."""
        return [point for point in self.points if point.setting == setting]


def measure(
    cfg: Config,
    target: Target,
    drafter: Path,
    asked: Mapping[str, Sequence[Prompt]],
    stops: Sequence[int],
    log_file: Path,
) -> Measured:
    """Serves every set at every setting of `cfg.evaluate`: one start without the drafter, one for each k."""
    wanted = settings(cfg.evaluate)
    every = [prompt for prompts in asked.values() for prompt in prompts]
    largest = max(setting.batch_size for setting in wanted)
    longest = max(len(prompt.input_ids) for prompt in every) + cfg.evaluate.max_new_tokens
    temperatures = dict.fromkeys(setting.temperature for setting in wanted)
    sizes = dict.fromkeys(setting.batch_size for setting in wanted)
    texts: dict[float, dict[str, Generation]] = {}
    plain: dict[tuple[str, float, int], Served] = {}
    kept: dict[tuple[str, float], list[Prompt]] = {}
    with ServedTarget(cfg, target, log_file, longest=longest, batch_size=largest) as server:
        dtype, version = server.dtype, server.version
        for temperature in temperatures:
            found = _decode(cfg, server, every, stops, temperature, largest)
            texts[temperature] = found.texts
            for name, prompts in asked.items():
                kept[name, temperature] = [prompt for prompt in prompts if not looping(found.texts[prompt.key])]
        for (name, temperature), prompts in kept.items():
            for size in sizes:
                plain[name, temperature, size] = _decode(cfg, server, prompts, stops, temperature, size)
    points: list[Point] = []
    for k in dict.fromkeys(setting.k for setting in wanted):
        with ServedTarget(cfg, target, log_file, longest=longest, batch_size=largest, drafter=drafter, k=k) as server:
            for size in sizes:
                _warm_up(cfg, server, every, size)
            for (name, temperature), prompts in kept.items():
                for size in sizes:
                    served = _decode(cfg, server, prompts, stops, temperature, size)
                    before = plain[name, temperature, size]
                    left_out = len(asked[name]) - len(prompts)
                    differences = None if temperature else _differences(server, prompts, before, served)
                    setting = Setting(k, temperature, size)
                    points.append(Point(name, setting, served, before, left_out, differences))
    return Measured(points, texts[wanted[0].temperature], version, dtype)


def looping(text: Generation) -> bool:
    """Whether a text ends in a loop; the token that stopped it does not count."""
    return loops(text.token_ids[:-1] if text.finish == "stop" else text.token_ids)


def _decode(
    cfg: Config, server: ServedTarget, prompts: Sequence[Prompt], stops: Sequence[int], temperature: float, size: int
) -> Served:
    return server.decode(prompts, batch_size=size, temperature=temperature, seed=cfg.seed, stop_ids=stops)


def _warm_up(cfg: Config, server: ServedTarget, prompts: Sequence[Prompt], size: int) -> None:
    """The first steps of a shape compile kernels and belong to nobody's speed."""
    short = [dataclasses.replace(prompt, max_new_tokens=WARM_UP_TOKENS) for prompt in prompts[:size]]
    _decode(cfg, server, short, (), 0.0, size)


def _differences(
    server: ServedTarget, prompts: Sequence[Prompt], plain: Served, served: Served
) -> dict[str, Difference]:
    found = {}
    for prompt in prompts:
        texts = (plain.texts[prompt.key].token_ids, served.texts[prompt.key].token_ids)
        difference = find_served_difference(server, prompt.input_ids, *texts, server.dtype)
        if difference is not None:
            found[prompt.key] = difference
    return found


def summarize(points: Sequence[Point]) -> dict[str, Any]:
    """The metrics of one setting over one set or several, named as those of the transformers engine."""
    setting = points[0].setting
    acceptance = pooled([p.served.acceptance for p in points if p.served.acceptance is not None], setting.k)
    rates = [_rate([getattr(point, side) for point in points]) for side in ("served", "plain")]
    found = [d for point in points for d in (point.differences or {}).values()]
    return {
        "acceptance_length": acceptance.acceptance_length,
        "accepted_drafts": acceptance.accepted_drafts,
        **dataclasses.asdict(setting),
        "per_position": acceptance.conditional,
        "per_position_unconditional": acceptance.unconditional,
        "lossless": None if points[0].differences is None else all(difference.tie for difference in found),
        "ties": sum(difference.tie for difference in found),
        "tokens_per_s": rates[0],
        "tokens_per_s_plain": rates[1],
        "speedup": rates[0] / rates[1] if rates[0] and rates[1] else None,
        "prompts": sum(len(point.served.texts) + point.looping for point in points),
        "looping": sum(point.looping for point in points),
        "rounds": acceptance.rounds,
    }


def record(point: Point, key: str, tokenizer: Any) -> dict[str, Any]:
    """Plain values of one prompt at one setting for evaluation.json."""
    text, plain = point.served.texts[key], point.plain.texts[key]
    difference = (point.differences or {}).get(key)
    return {
        "set": point.set,
        "key": key,
        "new_tokens": len(text.token_ids),
        "finish": text.finish,
        "identical": text.token_ids == plain.token_ids,
        "difference": difference and difference.record(),
        "text": tokenizer.decode(text.token_ids),
    }


def _rate(served: Sequence[Served]) -> float | None:
    seconds = sum(each.seconds for each in served if each.texts)
    return sum(len(text.token_ids) for each in served for text in each.texts.values()) / seconds if seconds else None


def table(measured: Measured, title: str) -> Table:
    """One row for each set and setting."""
    sampled = any(point.setting.temperature for point in measured.points)
    looping = max((point.looping for point in measured.points), default=0)
    notes = ["Speed-up: against the same server without the drafter, same temperature and prompts at once."]
    notes += ["Left out: outputs that ran into a loop."] if looping else []
    notes += ["Above temperature 0 texts are sampled and not compared."] if sampled else []
    # Plain batches are put together otherwise than those with drafts, so only single prompts have the bound.
    alone = [point for point in measured.points if point.setting.batch_size == 1]
    notes += impossible_speeds({f"{point.set} at batch 1": summarize([point]) for point in alone})
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title=title, caption="\n".join(notes))
    shown.title_justify = shown.caption_justify = "left"
    shown.add_column("set", no_wrap=True)
    for header in (
        "k",
        "temp.",
        "batch",
        "n",
        "acceptance\nlength",
        "accepted\nat 1..k",
        "tokens/s",
        "plain",
        "speed-up",
    ):
        shown.add_column(header, justify="right", no_wrap=True, style="bold" if "length" in header else "")
    for point in measured.points:
        summary = summarize([point])
        shown.add_row(
            point.set,
            *(str(summary[name]) for name in ("k", "temperature", "batch_size")),
            str(len(point.served.texts)),
            _number(summary["acceptance_length"], 3),
            " ".join(_number(rate, 2) for rate in summary["per_position"]),
            *(_number(summary[name], 1) for name in ("tokens_per_s", "tokens_per_s_plain")),
            _number(summary["speedup"], 2),
        )
    return shown


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
