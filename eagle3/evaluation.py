"""What an evaluation says: results per prompt, their summary per set, the proof of losslessness, the final table.

Reads what `decoding` measured and is driven by `stages/evaluate`. The headline of a set leaves out prompts whose output
ran into a loop: a looping text is predicted easily by any drafter, so it would flatter acceptance and speed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eagle3.decoding import Acceptance, Decoded, LiveTarget
from eagle3.errors import RequestError, StageFailed

OURS = "drafter"
# What a run that evaluates leaves in its folder.
RESULT = "evaluation.json"

_LOOP_REPEATS = 4
_LOOP_TOKENS = 24
_LONGEST_PERIOD = 64
# Two forwards of one text through differently shaped batches agree to about this much of the largest logit.
_TIE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the text ends in a loop: at least 4 times the same piece of 1-64 tokens, at least 24 tokens in all."""
    n = len(token_ids)
    for period in range(1, min(_LONGEST_PERIOD, n // _LOOP_REPEATS) + 1):
        length = max(_LOOP_REPEATS * period, _LOOP_TOKENS)
        if length <= n and all(token_ids[i] == token_ids[i - period] for i in range(n - length + period, n)):
            return True
    return False


@dataclass(frozen=True)
class Difference:
    """Where drafting changed the text, and how sure the target was there.

    `margin` is what the target's best logit is above the lower of the two chosen tokens' logits; up to `tolerance`
    the two forwards of one text may disagree by rounding alone, and the difference is a tie.
    """

    position: int
    plain: int
    speculative: int
    margin: float
    tolerance: float

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= self.tolerance

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "tie": self.tie}

    def __str__(self) -> str:
        return (
            f"at new token {self.position} the target chose {self.plain} plainly, {self.speculative} with drafts; its "
            f"best logit is {self.margin:.2g} above the lower of the two, and rounding explains {self.tolerance:.2g}"
        )


def first_difference(plain: Sequence[int], drafted: Sequence[int], what: str) -> int | None:
    """The first position at which two texts differ, None when they are equal; StageFailed, about `what`, when one only
    ends earlier."""
    if list(plain) == list(drafted):
        return None
    pairs = enumerate(zip(plain, drafted, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None:
        raise StageFailed(
            f"{what} ended after {len(drafted)} tokens with the drafter, {len(plain)} without, and the ids before are "
            "equal; expected the same end. Please report this"
        )
    return position


def find_difference(
    target: LiveTarget, prompt_ids: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """None when both decodings wrote the same ids; else the first difference, judged by a forward without any cache."""
    position = first_difference(plain, speculative, "evaluate: decoding")
    if position is None:
        return None
    logits = target.next_logits([*prompt_ids, *plain[:position]])
    tolerance = _TIE_TOLERANCE[logits.dtype] * float(logits.abs().max())
    chosen = logits[[plain[position], speculative[position]]]
    margin = float(logits.max() - chosen.min())
    return Difference(position, plain[position], speculative[position], margin, tolerance)


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded plainly and with the drafter.

    `acceptance` holds the counts of the drafter and of its baselines by name, `text` is the plain output decoded.
    """

    key: str
    prompt_tokens: int
    plain: Decoded
    speculative: Decoded
    difference: Difference | None
    acceptance: Mapping[str, Acceptance]
    text: str

    @property
    def looping(self) -> bool:
        """Whether the plain output ran into a loop; the token that stopped it does not count."""
        ids = self.plain.token_ids
        return loops(ids[:-1] if self.plain.finish == "stop" else ids)

    def record(self) -> dict[str, Any]:
        """Plain values for evaluation.json."""
        difference = self.difference
        return {
            "key": self.key,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.speculative.token_ids),
            "finish": self.plain.finish,
            "looping": self.looping,
            "identical": difference is None,
            "difference": difference and difference.record(),
            "seconds": self.speculative.seconds,
            "seconds_plain": self.plain.seconds,
            "acceptance_length": {name: counts.acceptance_length for name, counts in self.acceptance.items()},
            "accepted_by_round": list(self.speculative.accepted),
            "text": self.text,
        }


def summarize(results: Sequence[PromptResult], k: int, temperature: float) -> dict[str, Any]:
    """The metrics of one prompt set (or of several together), over the prompts whose output did not loop.

    `acceptance_length_all` also counts the looping ones. A rate that nothing was measured for is None.
    """
    kept = [result for result in results if not result.looping]
    ours = pool(kept, OURS, k)
    tokens_per_s = _rate([result.speculative for result in kept])
    tokens_per_s_plain = _rate([result.plain for result in kept])
    differences = [result.difference for result in results if result.difference is not None]
    baselines = [name for name in (results[0].acceptance if results else ()) if name != OURS]
    return {
        "acceptance_length": ours.acceptance_length,
        "accepted_drafts": ours.accepted_drafts,
        "k": k,
        "temperature": temperature,
        "per_position": ours.conditional,
        "per_position_unconditional": ours.unconditional,
        "lossless": all(difference.tie for difference in differences),
        "ties": sum(difference.tie for difference in differences),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_plain": tokens_per_s_plain,
        "speedup": tokens_per_s / tokens_per_s_plain if tokens_per_s and tokens_per_s_plain else None,
        "prompts": len(results),
        "looping": len(results) - len(kept),
        "rounds": ours.rounds,
        "acceptance_length_all": pool(results, OURS, k).acceptance_length,
        "baselines": {name: pool(kept, name, k).acceptance_length for name in baselines},
    }


def pool(results: Sequence[PromptResult], name: str, k: int) -> Acceptance:
    """The counts of all rounds of all prompts together: a long answer weighs more than a short one, as in serving."""
    reached = [0] * (k + 1)
    for result in results:
        reached = [total + more for total, more in zip(reached, result.acceptance[name].reached, strict=True)]
    return Acceptance(tuple(reached))


def _rate(decodings: Sequence[Decoded]) -> float | None:
    seconds = sum(decoded.seconds for decoded in decodings)
    return sum(len(decoded.token_ids) for decoded in decodings) / seconds if seconds else None


def table(summaries: Mapping[str, dict[str, Any]], baselines: Sequence[str], k: int, title: str) -> Table:
    """The table that an evaluation ends with: one row a prompt set; at most 80 columns for three drafts."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title=title, caption=_caption(summaries, k))
    shown.title_justify = shown.caption_justify = "left"
    shown.add_column("set", no_wrap=True)
    headers = ["n", "acceptance\nlength", *baselines, f"accepted\nat 1..{k}", "tokens/s", "plain"]
    for header in headers:
        shown.add_column(header, justify="right", no_wrap=True, style="bold" if "length" in header else "")
    for name, summary in summaries.items():
        shown.add_row(
            name,
            str(summary["prompts"]),
            _number(summary["acceptance_length"], 3),
            *[_number(summary["baselines"].get(baseline), 3) for baseline in baselines],
            " ".join(_number(rate, 2) for rate in summary["per_position"]),
            _number(summary["tokens_per_s"], 1),
            _number(summary["tokens_per_s_plain"], 1),
        )
    return shown


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _caption(summaries: Mapping[str, dict[str, Any]], k: int) -> str:
    looping, ties = (sum(summary[count] for summary in summaries.values()) for count in ("looping", "ties"))
    lines = [f"Greedy, {k} drafts a round; 1.000 = no draft accepted."]
    if all(summary["lossless"] for summary in summaries.values()):
        tied = f", but for {ties} where the target's own choice hung on rounding" if ties else ""
        lines.append(f"Texts with and without the drafter are identical{tied}.")
    else:
        lines.append("Texts with and without the drafter DIFFER.")
    if looping:
        lines.append(f"Left out: {looping} outputs that ran into a loop.")
    slower = [name for name, summary in summaries.items() if summary["speedup"] is not None and summary["speedup"] < 1]
    useless = [name for name in slower if summaries[name]["acceptance_length"] == 1]
    if useless:
        lines.append(f"Slower than plain decoding in {', '.join(useless)}: no draft was accepted.")
    if paid := [name for name in slower if name not in useless]:
        lines.append(f"Slower than plain decoding in {', '.join(paid)}: drafting costs more here than it saves.")
    lines += impossible_speeds(summaries)
    return "\n".join(lines)


def impossible_speeds(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line, or none, about speed-ups that no drafter can have: a round takes at least one forward of the target, and
    yields the acceptance length in tokens on average."""
    pairs = {name: (summary["speedup"], summary["acceptance_length"]) for name, summary in summaries.items()}
    found = [name for name, (speedup, length) in pairs.items() if speedup and length and speedup > length]
    if not found:
        return []
    return [f"Faster than its acceptance length allows in {', '.join(found)}: was the machine busy? Measure again."]


def compare(first: Path, second: Path) -> dict[str, tuple[float | None, float | None]]:
    """Acceptance lengths of two evaluations (files or run folders) side by side, per set that both hold.

    Logs one warning that lists every setting in which they differ (engine, version, k, temperature, template, prompts),
    the drafter apart: such numbers must not be compared as if only it had changed. Raises RequestError for a file that
    is no evaluation.
    """
    loaded = [read_evaluation(path) for path in (first, second)]
    settings = [{name: value for name, value in found["setting"].items() if name != "drafter"} for found in loaded]
    if differing := differences(*settings):
        logging.getLogger("eagle3").warning(
            "%s and %s were measured differently: %s; compare them with care", first, second, "; ".join(differing)
        )
    sets = [loaded[0]["sets"], loaded[1]["sets"]]
    shared = [name for name in sets[0] if name in sets[1]]
    return {name: (sets[0][name]["acceptance_length"], sets[1][name]["acceptance_length"]) for name in shared}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The settings in which two evaluations differ, as "name: first, second"."""
    found = []
    for name in sorted({*first, *second}):
        a, b = first.get(name), second.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found.extend(f"{name}.{line}" for line in differences(a, b))
        elif a != b:
            found.append(f"{name}: {a}, {b}")
    return found


def read_evaluation(path: Path) -> dict[str, Any]:
    """The settings and sets of an evaluation.json, or of that in a run folder. RequestError when it is none."""
    path = path / RESULT if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
        return {"setting": found["setting"], "sets": found["sets"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path}: expected an evaluation.json of `eagle3 stage=evaluate`, found {type(error).__name__}: {error}; "
            "see `eagle3 stage=runs` for the runs that evaluated"
        ) from error
