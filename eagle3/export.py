"""Drafter → a folder that a server loads: safetensors and config.json in the form of the export target (step 7).

The embedding is not in the folder: servers share the target's, which the drafter was trained on. Only `hf`, which
trainers read, has it. What was written is read back and compared before it counts as written.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3 import servers
from eagle3.adapter import TargetShape
from eagle3.drafter import Eagle3Drafter
from eagle3.drafter_forms import EMBEDDING, SPECULATORS, config_of, rename
from eagle3.errors import StageFailed
from eagle3.published import CONFIG, WEIGHTS, import_drafter, own_tensors
from eagle3.vocab import check_vocabulary_map


def export_drafter(
    drafter: Eagle3Drafter,
    target: TargetShape,
    folder: Path,
    dtype: torch.dtype,
    engine: str = "vllm",
    version: str | None = None,
    verifier: str = "",
    k: int = 3,
) -> dict[str, Any]:
    """Writes the drafter's weights in `dtype` and its config.json for `engine`, reads both back, and compares.

    `verifier` names the target's checkpoint and `k` the drafts a round where the form wants to know them. Returns the
    checks that held, for the manifest. Raises StageFailed when a written drafter does not equal the given one, and
    RequestError for a drafter that the engine cannot read or whose vocabulary map is broken.
    """
    shape = drafter.shape
    rules = servers.check(engine, version, shape, target)
    form = SPECULATORS if engine == SPECULATORS else "eagle"
    weights = rename(own_tensors(drafter), form)
    if shape.draft_vocab_size < shape.vocab_size:
        check_vocabulary_map(weights["d2t"], weights["t2d"], shape.vocab_size, str(folder / WEIGHTS))
    if engine == "hf":
        weights[EMBEDDING] = drafter.embedding
        # SpecForge's buffers, which its loader wants for a full vocabulary too.
        weights |= {"d2t": drafter.d2t, "t2d": drafter.t2d}
    weights = {name: (w.to(dtype) if w.is_floating_point() else w).contiguous() for name, w in weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = config_of(shape, target, engine, rules, dtype, verifier, k)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return {"rules": f"{engine}: {rules.read_in}; {rules.evidence}", **_check_written(drafter, folder, dtype)}


def _check_written(drafter: Eagle3Drafter, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Reads the folder back and compares logits: to the bit with the weights rounded to `dtype`, and as trained."""
    shape = drafter.shape
    reloaded = import_drafter(folder, drafter.embedding)
    if reloaded.shape != shape:
        raise StageFailed(f"{folder / CONFIG}: {shape} came back as {reloaded.shape}. Please report this")
    rounded = copy.deepcopy(drafter)
    with torch.no_grad():
        for tensor in own_tensors(rounded).values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    trained, expected, found = (_probe(each) for each in (drafter, rounded, reloaded))
    if not torch.equal(expected, found):
        raise StageFailed(
            f"{folder / WEIGHTS}: logits of the written drafter differ by up to "
            f"{float((expected - found).abs().max()):.3g} from the trained one's; expected none. Please report this"
        )
    return {
        "strict_reload": True,
        "logits_equal": True,
        "rounding": float((trained - found).abs().max()),
        "argmax_agreement": float((trained.argmax(-1) == found.argmax(-1)).float().mean()),
        "layer_ids": list(shape.layer_ids),
    }


@torch.inference_mode()
def _probe(drafter: Eagle3Drafter, tokens: int = 32) -> Tensor:
    """Logits [tokens, D] on fixed pseudo-random tokens and states."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (tokens,), generator=generator)
    states = torch.randn(tokens, shape.target_hidden_size * len(shape.layer_ids), generator=generator)
    _, logits = drafter.extend(drafter.new_cache(), ids, drafter.fuse(states), torch.arange(tokens))
    return logits
