"""Stage inspect: prints prepared samples with the supervised text marked, so that a mask can be seen to be right."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.text import Text

from eagle3.checkpoint import open_target
from eagle3.config import Config
from eagle3.encoding import decode
from eagle3.errors import RequestError
from eagle3.prepared import Prepared
from eagle3.runs import Run
from eagle3.stages import extract
from eagle3.tokens import Sample


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Shows `inspect.samples` samples of `inspect.split`. RequestError when the split is empty."""
    artifact = extract.source(cfg, run.artifacts)
    run.read(artifact)
    prepared = Prepared.open(artifact.folder)
    rows = prepared.split_indices(cfg.inspect.split)[: cfg.inspect.samples]
    if not len(rows):
        raise RequestError(
            f"inspect.split: {artifact.folder} has no sample in '{cfg.inspect.split}', expected at least one; try "
            "inspect.split=train"
        )
    tokenizer = open_target(cfg).tokenizer()
    for row in rows:
        run.show(describe(prepared.samples[int(row)], tokenizer))
    supervised = [int(prepared.samples[int(row)].loss_mask.sum()) for row in rows]
    return {"samples": len(rows), "tokens": int(prepared.lengths[rows].sum()), "supervised_tokens": sum(supervised)}


def describe(sample: Sample, tokenizer: Any) -> Text:
    """A sample's numbers and its text; what is supervised stands in [[brackets]], on a terminal also in green."""
    count = int(sample.loss_mask.sum())
    spans = sum(1 for supervised, _ in groupby(sample.loss_mask.tolist()) if supervised)
    text = Text(
        f"sample {sample.id}  {sample.key}  {sample.split}: {len(sample.input_ids)} tokens, {count} supervised in "
        f"{spans} {'span' if spans == 1 else 'spans'}\n",
        style="bold",
    )
    start = 0
    for supervised, group in groupby(sample.loss_mask.tolist()):
        end = start + len(list(group))
        piece = decode(tokenizer, sample.input_ids[start:end].tolist())
        text.append(f"[[{piece}]]" if supervised else piece, style="not bold green" if supervised else "not bold dim")
        start = end
    return text.append("\n")
