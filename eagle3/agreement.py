"""Whether a server does with a drafter what our decoder does with it: texts, rounds, accepted drafts (walk: step 8).

The server's rounds come from its own counters, ours from walking the server's text with the same exported folder.
A server that reads other layers, another vocabulary map or unset weights still answers, and accepts next to nothing: it
shows here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table

from eagle3.decoding import Acceptance
from eagle3.evaluation import Difference, first_difference

# Up to which difference in log probability two forwards of differently shaped batches may choose another token.
TIE_MARGIN = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
# Accepted tokens that may differ by rounding, as a share of the drafted ones.
ALLOWED_SHARE = {"float32": 0.001, "float16": 0.01, "bfloat16": 0.03}
# Serving that accepts less than this share of the drafts that training foretold deserves a warning.
FORECAST_SHARE = 0.7


class Judge(Protocol):
    """Who knows how sure the target was."""

    def margin(self, token_ids: Sequence[int], chosen: int) -> float:
        """How much more probable (natural logarithm) the target's choice after `token_ids` is than `chosen`."""
        ...


def find_served_difference(
    judge: Judge, prompt_ids: Sequence[int], plain: Sequence[int], served: Sequence[int], dtype: str
) -> Difference | None:
    """None when the server wrote the same ids with drafts and without; else the first difference and its margin."""
    position = first_difference(plain, served, "vllm: a text")
    if position is None:
        return None
    before = [*prompt_ids, *plain[:position]]
    margin = max(judge.margin(before, token) for token in (plain[position], served[position]))
    return Difference(position, plain[position], served[position], margin, TIE_MARGIN[dtype])


@dataclass(frozen=True)
class CheckedPrompt:
    """One prompt: the server's text with drafts (`token_ids`) against that without, its counts of the rounds against
    ours."""

    key: str
    prompt_tokens: int
    token_ids: list[int]
    difference: Difference | None
    server: Acceptance
    ours: Acceptance

    @property
    def apart(self) -> int:
        """Accepted drafts that only one of the two counted, position by position."""
        return sum(abs(a - b) for a, b in zip(self.server.reached[1:], self.ours.reached[1:], strict=True))

    def record(self) -> dict[str, Any]:
        """Plain values for serve_check.json."""
        difference = self.difference
        return {
            "key": self.key,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.token_ids),
            "identical": difference is None,
            "difference": difference and difference.record(),
            "reached_server": list(self.server.reached),
            "reached_ours": list(self.ours.reached),
        }


def summarize(prompts: Sequence[CheckedPrompt], k: int, dtype: str, forecast: float | None) -> dict[str, Any]:
    """The metrics of a check.

    `apart` counts accepted drafts that only one side has, `apart_allowed` what rounding in `dtype` explains; `forecast`
    is the acceptance length that training simulated for k drafts.
    """
    server, ours = (pooled([getattr(prompt, side) for prompt in prompts], k) for side in ("server", "ours"))
    drafted = k * server.rounds
    return {
        "acceptance_length": server.acceptance_length,
        "acceptance_length_ours": ours.acceptance_length,
        "forecast": forecast,
        "accepted_drafts": server.accepted_drafts,
        "per_position": server.conditional,
        "per_position_ours": ours.conditional,
        "k": k,
        "dtype": dtype,
        "prompts": len(prompts),
        "identical": sum(prompt.difference is None for prompt in prompts),
        "ties": sum(prompt.difference is not None and prompt.difference.tie for prompt in prompts),
        "drafted": drafted,
        "rounds": [server.rounds, ours.rounds],
        "apart": sum(prompt.apart for prompt in prompts),
        "apart_allowed": max(1, int(drafted * ALLOWED_SHARE[dtype])),
    }


def pooled(counts: Sequence[Acceptance], k: int) -> Acceptance:
    """The rounds of all texts together."""
    return Acceptance(tuple(sum(c.reached[i] for c in counts) for i in range(k + 1)))


def faults(prompts: Sequence[CheckedPrompt], summary: Mapping[str, Any]) -> list[str]:
    """What is wrong, in words; empty when the server does what our decoder does."""
    found = [
        f"{prompt.key}: the text with drafts is not the target's own: {prompt.difference}"
        for prompt in prompts
        if prompt.difference is not None and not prompt.difference.tie
    ]
    if summary["apart"] > summary["apart_allowed"]:
        found.append(
            f"the server counted an acceptance length of {summary['acceptance_length']:.3f}, our decoder "
            f"{summary['acceptance_length_ours']:.3f} on the same texts: {summary['apart']} accepted drafts of "
            f"{summary['drafted']} differ, expected at most {summary['apart_allowed']}; a server that reads other "
            "layers, another vocabulary map or unset weights looks like this"
        )
    return found


def table(summaries: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """One row a prompt set: what the server counted, what our decoder counts, what training foretold."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title=title)
    shown.title_justify = "left"
    shown.add_column("set", no_wrap=True)
    for header in ("n", "identical", "ties", "server", "ours", "forecast", "drafted", "apart", "at 1..k"):
        shown.add_column(header, justify="right", no_wrap=True, style="bold" if header == "server" else "")
    for name, summary in summaries.items():
        lengths = (summary["acceptance_length"], summary["acceptance_length_ours"], summary["forecast"])
        shown.add_row(
            name,
            *(str(summary[count]) for count in ("prompts", "identical", "ties")),
            *("-" if length is None else f"{length:.3f}" for length in lengths),
            *(str(summary[count]) for count in ("drafted", "apart")),
            " ".join("-" if rate is None else f"{rate:.2f}" for rate in summary["per_position"]),
        )
    return shown
