"""Stage vocab: what draft vocabularies of several sizes would cover of the supervised tokens.

It reads the prepared set's counts and nothing else: no model is loaded, and hidden states do not depend on the size.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from eagle3.config import Config
from eagle3.prepared import Prepared
from eagle3.runs import Run
from eagle3.stages import extract
from eagle3.vocab import build_vocab


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Shows the table; returns the coverage by size, the configured one included, of both splits."""
    artifact = extract.source(cfg, run.artifacts)
    run.read(artifact)
    prepared = Prepared.open(artifact.folder)
    counts, special = prepared.token_counts(), prepared.special_ids
    held = prepared.token_counts("validation")
    configured = cfg.drafter.draft_vocab_size or prepared.vocab_size
    table = Table(
        *("size", "of training answers", "of validation answers", "of target's", "unseen fill", ""),
        title=f"draft vocabularies: {int(counts.sum()):,} supervised tokens, {int((counts > 0).sum()):,} distinct",
        caption="built from the training answers, which it covers best; drafts find what it covers of others",
    )
    coverage, validation = {}, {}
    for size in sizes(configured, prepared.vocab_size, len(special)):
        vocab = build_vocab(counts, size, prepared.vocab_size, special, prepared.tokenizer_hash)
        coverage[size] = round(vocab.coverage(counts), 6)
        validation[size] = round(vocab.coverage(held), 6) if held.any() else None
        table.add_row(
            f"{size:,}",
            f"{coverage[size]:.2%}",
            "-" if validation[size] is None else f"{validation[size]:.2%}",
            f"{size / prepared.vocab_size:.1%}",
            f"{vocab.padded:,}",
            "configured" if size == configured else "",
        )
    run.show(table)
    return {
        "supervised_tokens": int(counts.sum()),
        "coverage": {str(size): share for size, share in coverage.items()},
        "validation_coverage": {str(size): share for size, share in validation.items()},
    }


def sizes(configured: int, vocab_size: int, least: int) -> list[int]:
    """The configured size, the whole vocabulary, and powers of two between 1/64 of it and it."""
    powers = [2**n for n in range(1, 24) if max(vocab_size / 64, least) <= 2**n < vocab_size]
    return sorted({configured, vocab_size, *powers})
