"""Which versions of vLLM this was run with, and whether another one still has what it stands on (before step 3).

`python -m eagle3.engines.vllm_seams` imports vLLM and prints what is missing, in a process of its own: the import takes
seconds and changes the process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from typing import Any

OLDEST, NEWEST = (0, 26), (0, 32)
# Module, name in it, and the parameters that are passed.
SEAMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm", "LLM.collective_rpc", ("method", "args")),
    ("vllm", "LLMEngine.add_request", ("request_id", "prompt", "params")),
    ("vllm", "LLMEngine.step", ()),
    ("vllm", "LLMEngine.has_unfinished_requests", ()),
    ("vllm", "SamplingParams", ("max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "detokenize")),
    ("vllm.inputs", "tokens_input", ("prompt_token_ids",)),
    (
        "vllm.engine.arg_utils",
        "EngineArgs",
        ("worker_extension_cls", "enable_prefix_caching", "enforce_eager", "skip_tokenizer_init", "load_format"),
    ),
    ("vllm.v1.worker.gpu_worker", "Worker.get_model", ()),
)


def check_version(version: str) -> tuple[bool, str]:
    """Whether this version may be used, and why: tested, or outside the range with all seams there."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if OLDEST <= numbers <= NEWEST:
        return True, f"{version}, within the tested range {tested}"
    names = ", ".join(f"{module}.{name}" for module, name, _ in SEAMS)
    answer = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return False, f"{version} is outside the tested range {tested} and cannot be imported: {last}"
    missing = json.loads(answer.stdout.strip().splitlines()[-1])
    if missing:
        return False, f"{version} is outside the tested range {tested}; its seams changed: {'; '.join(missing)}"
    return True, f"warning: {version} is outside the tested range {tested}; these seams were verified: {names}"


def missing_seams() -> list[str]:
    """What the installed vLLM lacks of SEAMS, in words."""
    return [problem for seam in SEAMS if (problem := _problem(*seam)) is not None]


def _problem(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        signature = inspect.signature(found)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{module}.{name} is gone ({error})"
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return None
    lacking = [parameter for parameter in parameters if parameter not in signature.parameters]
    return f"{module}.{name} takes no {', '.join(lacking)}" if lacking else None


if __name__ == "__main__":
    print(json.dumps(missing_seams()))
