"""The error that bf16 makes in gradients: ours against our float64 reference, the peers' against themselves in fp32.

    python -m tests.benchmarks.gradient_error --out tests/benchmarks/results/gradient_error_h200.json

Relative to the norm of each weight's gradient, at the same shape, length and share of supervised tokens; all with
weights rounded to bf16 beforehand.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

from eagle3.fused_step import FusedStep
from eagle3.loss import unroll_loss
from tests.benchmarks.peer_process import PeerProcess
from tests.benchmarks.peer_steps import relative_errors
from tests.benchmarks.synthetic import build
from tests.benchmarks.train_step import BOTH, DECAY, STEPS, Case

CASE = Case("small", [1024])


def ours() -> dict[str, Any]:
    """The error of our gradients in bf16, against the plain unroll in float64."""
    synthetic = build(CASE.shape, CASE.tokens, "cuda")
    drafter, teacher = synthetic.drafter, synthetic.teacher
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    batch = synthetic.batch(CASE.lengths, CASE.spans, STEPS)
    weights = DECAY ** torch.arange(STEPS, device="cuda") / batch.row_counts
    assert batch.layout is not None
    FusedStep(drafter, teacher, torch.bfloat16)(batch, batch.layout, weights).loss.backward()
    exact = copy.deepcopy(drafter).double()
    exact.zero_grad()
    hidden = exact.unroll(batch.input_ids, batch.hidden_states.double(), batch.position_ids, batch.slots, batch.blocks)
    assert teacher.draft_ids is not None
    order = torch.cat((teacher.draft_ids, (~drafter.t2d).nonzero()[:, 0])).argsort()
    head = teacher.weight.double()[order]
    unroll_loss(
        hidden,
        exact.lm_head.weight,
        batch.final_states.double(),
        lambda states: teacher.normed(states.bfloat16()).double() @ head.T,  # a target too rounds these
        batch.slots,
        weights.double(),
        teacher.draft_ids,
        drafter.t2d,
    ).loss.backward()
    rounded, expected = (
        {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}
        for module in (drafter, exact)
    )
    return relative_errors(rounded, expected)


def main() -> None:
    """Measures all, the peers side by side, and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    batches = {"error": (CASE.lengths, CASE.spans)}
    peers = {peer: PeerProcess(peer, CASE.shape, STEPS, batches, errors=True) for peer in BOTH}
    result: dict[str, Any] = {
        "what": "relative error of bf16 gradients",
        "shape": CASE.shape,
        "tokens": CASE.tokens,
        "device": torch.cuda.get_device_name(),
        "ours": ours(),
    }
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    for peer, process in peers.items():
        result[peer] = process.results()["error"]
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
