"""The target in vLLM as a server runs it, with or without a drafter (step 8 of the walk).

Unlike the engine that captures, nothing of ours is inside: no hooks, compiled and with CUDA graphs on a GPU. One start
serves one drafter at one number of drafts a round; batch sizes and temperatures can differ from call to call.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.decoding import Acceptance
from eagle3.engines import Generation, Prompt
from eagle3.engines.stalls import ProgressClock
from eagle3.engines.vllm import sampling_parameters
from eagle3.engines.vllm_counters import DraftCounters
from eagle3.engines.vllm_process import EngineProcess
from eagle3.engines.vllm_settings import check_devices, engine_arguments, engine_environment

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.config import Config

log = logging.getLogger("eagle3")

# A reused prefix would make the second decoding of a prompt cheaper than the first.
FORCED: dict[str, Any] = {
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}


@dataclass(frozen=True)
class Served:
    """What a server made of some prompts: texts by key, wall seconds, and the rounds that it counted (None without a
    drafter)."""

    texts: dict[str, Generation]
    seconds: float
    acceptance: Acceptance | None

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all texts by the second, prefill included."""
        return sum(len(text.token_ids) for text in self.texts.values()) / self.seconds


def serving_arguments(
    cfg: Config, target: Target, *, longest: int, batch_size: int, drafter: Path | None, k: int
) -> dict[str, Any]:
    """The arguments of `vllm.LLM` for texts of up to `longest` tokens, `batch_size` at once at most.

    On a CPU nothing is compiled: it takes minutes and gains little.
    """
    options = cfg.hardware.engine_options
    arguments = engine_arguments(cfg, target, target.folder, "auto", FORCED)
    arguments["max_num_seqs"] = options.get("max_num_seqs", batch_size)
    # Drafts of a text's last rounds may reach past its end.
    needed = min(longest + k + 1, target.shape.max_position_embeddings)
    arguments["max_model_len"] = options.get("max_model_len", needed)
    if "enable_chunked_prefill" not in options:
        del arguments["enable_chunked_prefill"]
    if cfg.hardware.accelerator == "cpu":
        arguments.setdefault("enforce_eager", True)
    given = arguments.pop("speculative_config", {})
    if drafter is not None:
        ours = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k}
        arguments["speculative_config"] = {**given, **ours}
    return arguments


class ServedTarget:
    """A running server. A context manager; nothing of it survives `close`."""

    def __init__(
        self,
        cfg: Config,
        target: Target,
        log_file: Path,
        *,
        longest: int,
        batch_size: int = 1,
        drafter: Path | None = None,
        k: int = 0,
    ) -> None:
        """Starts vLLM on the target, and on the exported folder `drafter` with k drafts a round.

        RequestError for a wrong setting; EngineError, with vLLM's words, when it refuses the target or the drafter.
        """
        check_devices(cfg)
        self.speculative = drafter is not None
        arguments = serving_arguments(cfg, target, longest=longest, batch_size=batch_size, drafter=drafter, k=k)
        self.dtype: str = arguments["dtype"]
        started = time.monotonic()
        self._process = EngineProcess(arguments, engine_environment(cfg), log_file)
        try:
            self.version = self._process.wait_ready(lambda text: None)
        except BaseException:
            self._process.close(gently=False)
            raise
        what = f"drafter {drafter}, {k} drafts a round" if drafter else "no drafter"
        log.info("vllm %s: serving with %s after %.1fs", self.version, what, time.monotonic() - started)

    def __enter__(self) -> ServedTarget:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def decode(
        self, prompts: Sequence[Prompt], *, batch_size: int, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Served:
        """Continues all prompts, `batch_size` at a time, the next one as soon as one has ended.

        EngineError when the server fails or stands still for eight minutes.
        """
        before = self._counters()
        waiting, running = deque(prompts), dict[str, str]()
        texts: dict[str, Generation] = {}
        with closing(ProgressClock(self._process)) as clock:
            started = time.perf_counter()
            while waiting or running:
                fresh = [waiting.popleft() for _ in range(min(batch_size - len(running), len(waiting)))]
                requests = []
                for prompt in fresh:
                    request_id = f"serve-{next(self._process.numbers)}"
                    running[request_id] = prompt.key
                    sampling = sampling_parameters(prompt, temperature, seed, stop_ids)
                    requests.append((request_id, [int(i) for i in prompt.input_ids], sampling))
                if requests:
                    self._process.submit(requests)
                for request_id, token_ids, reason in clock.finished():
                    key = running.pop(request_id)
                    texts[key] = Generation(key, token_ids, "stop" if reason == "stop" else "length")
            seconds = time.perf_counter() - started
        after = self._counters()
        return Served(texts, seconds, None if after is None or before is None else after.since(before).acceptance())

    def margin(self, token_ids: Sequence[int], chosen: int) -> float:
        """How much more probable (natural logarithm) the target's own choice after `token_ids` is than `chosen`."""
        return float(self._process.ask("margin", [int(i) for i in [*token_ids, chosen]]))

    def close(self) -> None:
        """Ends the server's processes; GPU memory is free afterwards."""
        self._process.close()

    def _counters(self) -> DraftCounters | None:
        return DraftCounters.of(self._process.ask("counters")) if self.speculative else None
