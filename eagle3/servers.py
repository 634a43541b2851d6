"""What each server reads of a drafter, by version: rules as data, and the check before a folder is written (step 7).

A server that cannot read something mostly says nothing: it leaves weights at random, falls back to other layers, and
answers with an acceptance of 1.0. So what a version does not read is refused here, with the reason. Rules were read in
each version's own loader and config code; `evidence` says whether exported drafters were served by it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.errors import RequestError
from eagle3.layers import output_ids

if TYPE_CHECKING:
    from eagle3.adapter import TargetShape
    from eagle3.drafter import DrafterShape

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LATENT_TARGETS = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "KimiK25ForConditionalGeneration")
_DENSE_TARGETS = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    "GptOssForCausalLM",
)


@dataclass(frozen=True)
class Reader:
    """How one kind of drafter is named in config.json, and which norm flags its loader looks at."""

    architecture: str
    model_type: str
    flags: frozenset[str]


@dataclass(frozen=True)
class Release:
    """What the versions from `oldest` on read; `read_in` is the version whose code was read.

    `drafters` by `DrafterShape.attention`; `targets` are the architectures whose states it hands out, None for any;
    `counts` the numbers of states that fc may read, None for any; `final_state` whether id n can be one of them.
    """

    oldest: tuple[int, ...]
    read_in: str
    evidence: str
    drafters: Mapping[str, Reader]
    targets: tuple[str, ...] | None
    counts: tuple[int, ...] | None = None
    final_state: bool = True


def _dense(*flags: str, architecture: str = "LlamaForCausalLMEagle3") -> Reader:
    return Reader(architecture, "llama", frozenset(flags))


def _latent(*flags: str, model_type: str = "kimi_k2") -> Reader:
    return Reader("Eagle3DeepseekV2ForCausalLM", model_type, frozenset(flags))


_SERVED = (*_DENSE_TARGETS, *LATENT_TARGETS)
# Newest first. vLLM's `deepseek_v3` drafts are rewritten to MTP models, so latent ones are called `kimi_k2`.
RELEASES: dict[str, tuple[Release, ...]] = {
    "vllm": (
        Release(
            (0, 26),
            "0.26.0 and 0.32.0",
            "served by 0.32.0 on a CPU, a dense one by 0.26.0 on a GPU",
            {"dense": _dense(*FLAGS), "mla": _latent("norm_before_residual", "fc_norm", "norm_output")},
            _SERVED,
        ),
        Release(
            (0, 14),
            "its repository at 00bd149, between 0.14 and 0.16",
            "read only",
            {"dense": _dense("norm_before_residual")},
            _SERVED,
            counts=(3,),
        ),
    ),
    "sglang": (
        Release(
            (0, 5, 14),
            "0.5.14",
            "read only",
            {"dense": _dense("fc_norm", "norm_output"), "mla": _latent("fc_norm", "norm_output")},
            _SERVED,
            final_state=False,
        ),
    ),
    # The format of the speculators library, read by it and by vLLM from 0.26 on.
    "speculators": (
        Release(
            (0, 9),
            "speculators 0.9.0, vLLM 0.26.0 and 0.32.0",
            "served by vLLM 0.32.0 on a CPU",
            {"dense": _dense(*FLAGS, architecture="Eagle3Speculator")},
            _SERVED,
        ),
    ),
    # The layout that EAGLE published and SpecForge trains, with the embedding in it.
    "hf": (
        Release(
            (0, 2),
            "SpecForge 0.2.0",
            "read only",
            {"dense": _dense("fc_norm", "norm_output")},
            None,
            counts=(3,),
            final_state=False,
        ),
    ),
}


def release(engine: str, version: str | None) -> Release:
    """The rules for a version (None: the newest). RequestError for one that is older than what was read."""
    known = RELEASES[engine]
    if version is None:
        return known[0]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    for found in known:
        if numbers and numbers >= found.oldest:
            return found
    ranges = ", ".join(f"from {'.'.join(map(str, found.oldest))} on" for found in known)
    raise RequestError(
        f"export.engine_version: found {version!r}, expected a version of {engine} whose rules are known: {ranges}; "
        "try export.engine_version=null for the newest; one that ends in 0 needs quotes: "
        """'export.engine_version="0.20"'"""
    )


def nested_ids(engine: str, architecture: str, layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids in `eagle_config`, in the meaning of whoever reads them there; ours (and vLLM's) stand at the top level.

    SGLang and SpecForge add one to each; SGLang does not for a DeepSeek target, unless the first is 1.
    """
    if engine == "vllm" or (engine == "sglang" and architecture in LATENT_TARGETS):
        return tuple(layer_ids)
    return output_ids(layer_ids)


def refusals(engine: str, version: str | None, shape: DrafterShape, target: TargetShape) -> list[str]:
    """Why this server cannot read this drafter for this target; empty when it can."""
    rules = release(engine, version)
    name = f"{engine} {version}" if version else f"{engine} (rules of {rules.read_in})"
    found: list[str] = []
    reader = rules.drafters.get(shape.attention)
    if reader is None:
        return [
            f"drafter.attention: found '{shape.attention}', {name} reads {' and '.join(rules.drafters)} drafters; "
            f"train with drafter.attention={next(iter(rules.drafters))}"
        ]
    for flag in FLAGS:
        if getattr(shape, flag) and flag not in reader.flags:
            found.append(
                f"drafter.{flag}: found true, but {name} does not look at it in a {shape.attention} drafter and would "
                f"compute something else; train with drafter.{flag}=false"
            )
    if rules.targets is not None and target.architecture not in rules.targets:
        found.append(
            f"model: {name} hands out no hidden states of {target.architecture}, only of {', '.join(rules.targets)}"
        )
    ids, count = list(shape.layer_ids), len(shape.layer_ids)
    if rules.counts is not None and count not in rules.counts:
        expected = " or ".join(map(str, rules.counts))
        found.append(
            f"layers.ids: found {count} states {ids}, but {name} sizes fc for {expected}; choose {expected} layers, or "
            "a newer export.engine_version"
        )
    if not rules.final_state and target.num_layers in shape.layer_ids:
        found.append(
            f"layers.ids: found {target.num_layers}, the output of the last layer, in {ids}; {name} hands out inputs "
            "of layers only"
        )
    if engine in ("sglang", "hf") and not (engine == "sglang" and target.architecture in LATENT_TARGETS):
        if 0 in shape.layer_ids:
            found.append(f"layers.ids: found 0, the embedding, in {ids}; {name} numbers the outputs of layers")
    elif engine == "sglang" and shape.layer_ids[0] == 1:
        found.append(
            f"layers.ids: found {ids}; for {target.architecture} {name} reads a list that begins with 1 as one layer "
            "later, so that these layers cannot be named; choose a first layer other than 1"
        )
    return found


def check(engine: str, version: str | None, shape: DrafterShape, target: TargetShape) -> Release:
    """The rules to write by. RequestError, with every reason, when the server cannot read the drafter."""
    found = refusals(engine, version, shape, target)
    if found:
        raise RequestError(f"export.target={engine}: {'; '.join(found)}; or choose another export.target")
    return release(engine, version)
