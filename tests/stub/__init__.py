"""Stands in for vLLM in tests of what drives it: `Stub` makes it what the engine's host imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.checkpoint import Target
from eagle3.config import Config
from tests.vllm.engines import configured

# Twice at the end of a prompt or document, these ids make the engine die, wait for a file named `word`, or hang.
DIES, WAITS, HANGS = 397, 398, 399


def changed(method: str, answer: str) -> str:
    """A load after which the stub's `method` gives `answer`, an expression of its `old()` answer, of what it was
    `given`, and of the stub itself, `llm`."""
    return f"""
def changed(*given, llm=self, before=self.{method}):
    old = lambda: before(*given)
    return {answer}
self.{method} = changed
"""


def two_ranks(**second: Any) -> str:
    """A load after which there is a second rank, which writes nothing and reports the numbers of `second`."""
    return f"""
def both(method, args=(), llm=self):
    first = getattr(llm, method)(*args)
    other = {{**(first or {{}}), "rank": 1, "bytes": 0}}
    other["finished"] = [{{**shard, "parts": []}} for shard in other.get("finished", [])]
    return [first, {{**other, **{second}}}]
self.collective_rpc = both
"""


class Stub:
    """Installs it for the time of a test; engines are those of `hardware.engine=vllm` then."""

    def __init__(self, target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> None:
        self.target, self._monkeypatch = target, monkeypatch
        monkeypatch.setenv("STUB_WORD", str(folder / "word"))
        installed = folder / "installed" / version / f"vllm-{version}.dist-info"
        installed.mkdir(parents=True, exist_ok=True)
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(installed.parent))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
        # Tells the engines apart, which see nothing else of it.
        monkeypatch.setenv("VLLM_PORT", "5000")

    def configured(self, count: int = 1, load: str = "", **hardware: Any) -> tuple[Config, Target]:
        """A config for `count` engines, which execute `load` in the place of a load; NUMBER is the engine's there."""
        self._monkeypatch.setenv("STUB_LOAD", load)
        # Small batches, so that an engine takes two or three small shards at a time.
        settings = {"batch_tokens": 32, "generate_slots": 4, **hardware}
        return configured("llama", self.target, data_parallel_size=count, **settings)
