"""Beside the walk: what became of the rows that `stage=prepare` read, in counts that add up.

For each source: read = kept + the sum of skipped. Every skip has a reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from eagle3.answers import AnswerCount
from eagle3.prepared import PreparedWriter
from eagle3.prompts import Conversation, SourceCount


@dataclass
class Counts:
    """What became of everything that was read.

    `truncated` and `split` count samples cut to the longest length and conversations of more than one sample;
    `special_token_text` those whose texts spell a special token, `reasoning_dropped` those whose last answer lost its
    reasoning to the template.
    """

    sources: dict[str, SourceCount]
    answers: AnswerCount = field(default_factory=AnswerCount)
    truncated: int = 0
    split: int = 0
    special_token_text: int = 0
    reasoning_dropped: int = 0

    def drop(self, conversation: Conversation, reason: str) -> None:
        """Takes a conversation that its source kept back out, under a reason."""
        count = self.sources[conversation.source]
        count.kept -= 1
        count.skipped[reason] += 1


def make_report(counts: Counts, writer: PreparedWriter, heldout: int) -> dict[str, Any]:
    """Plain values for the manifest: `totals` (the stage's metrics), `sources` and `notes`."""
    sources = {
        name: {
            "format": count.format,
            "role": count.role,
            "read": count.read,
            "kept": count.kept,
            "skipped": dict(count.skipped),
        }
        for name, count in counts.sources.items()
    }
    for name, count in counts.sources.items():
        if count.read != count.kept + count.skipped.total():
            raise AssertionError(f"dataset.sources.{name}: {count} does not add up")
    answers = counts.answers
    totals: dict[str, Any] = {
        "rows": sum(count.read for count in counts.sources.values()),
        "kept": sum(count.kept for count in counts.sources.values()),
        "skipped": sum(count.skipped.total() for count in counts.sources.values()),
        "heldout": heldout,
        "samples": len(writer.lengths),
        "validation_samples": writer.validation_samples,
        "tokens": sum(writer.lengths),
        "supervised_tokens": writer.supervised,
        "truncated": counts.truncated,
    }
    if answers.seconds:
        totals["answer_tokens"] = answers.tokens
        totals["answer_tokens_per_s"] = round(answers.tokens / answers.seconds, 1)
    notes = {
        "samples cut to dataset.max_length": counts.truncated,
        "answers cut off by a length limit": answers.cut,
        "conversations of several samples, one a turn": counts.split,
        "conversations whose text spells a special token": counts.special_token_text,
        "last answers whose reasoning the chat template leaves out": counts.reasoning_dropped,
        **{f"conversations that end before {reason}": n for reason, n in answers.shortened.items()},
    }
    return {"totals": totals, "sources": sources, "notes": {name: n for name, n in notes.items() if n}}


def report_table(report: dict[str, Any]) -> Table:
    """The report for the terminal."""
    totals = report["totals"]
    share = totals["supervised_tokens"] / totals["tokens"]
    table = Table(
        "source",
        "rows",
        title="prepared",
        min_width=64,
        caption=(
            f"{totals['samples']:,} samples ({totals['validation_samples']:,} for validation)\n"
            f"{totals['tokens']:,} tokens, {totals['supervised_tokens']:,} of them supervised ({share:.0%})"
        ),
    )
    for name, source in report["sources"].items():
        table.add_row(f"{name} ({source['format']})", f"{source['read']:,} read")
        table.add_row("  kept", f"{source['kept']:,}")
        for reason, count in sorted(source["skipped"].items(), key=lambda item: -item[1]):
            table.add_row(f"  skipped: {reason}", f"{count:,}")
    for note, count in report["notes"].items():
        table.add_row(note, f"{count:,}")
    return table


# What to do about the reason for which most rows were dropped, by words in it.
HINTS = {
    "no assistant turn": "try dataset.answers=regenerate, if the sources hold only prompts",
    "dataset.max_length": "raise dataset.max_length",
    "held-out prompt": "give the sources with role=heldout other rows than the others, by skip and limit",
    "looping answer": "does the target answer sensibly with its chat template? dataset.answers=given asks it nothing",
}


def reasons(skipped: Counter[str]) -> str:
    """Why rows were dropped, the commonest first; the numbers add up to all."""
    shown = skipped.most_common(6)
    rest = skipped.total() - sum(n for _, n in shown)
    return ", ".join([f"{n} x {reason}" for reason, n in shown] + ([f"{rest} x other reasons"] if rest else []))


def nothing_left(counts: Counts) -> str:
    """The message when every conversation was dropped."""
    skipped: Counter[str] = Counter()
    for count in counts.sources.values():
        if count.role == "train":
            skipped += count.skipped
    commonest = skipped.most_common(1)[0][0] if skipped else ""
    retry = next((hint for words, hint in HINTS.items() if words in commonest), "try other sources")
    return (
        f"dataset.sources: no conversation is left of {skipped.total()} rows to learn from: "
        f"{reasons(skipped)}; expected at least one; {retry}"
    )
