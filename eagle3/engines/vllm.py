"""The target in vLLM, in a process of its own: for GPUs and tensor parallelism (step 3 of the walk).

One engine loads the model once and serves captures of any layers and generation. It uses vLLM's public seams only: a
worker extension, `collective_rpc`, forward hooks on the decoder layers in eager mode (which costs nothing at prefill),
and requests of token ids. The states never come here: each rank writes its part into the store's files, and this side
keeps enough requests in flight, hears what is finished and sums the checksums up.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.engines import CapturedStates, EngineInfo, Generation, Prompt, check_engine
from eagle3.engines.backends import expected_backends, mismatches
from eagle3.engines.stalls import ProgressClock
from eagle3.engines.vllm_capture import CaptureDriver, ShardWork
from eagle3.engines.vllm_load import LoadWatch
from eagle3.engines.vllm_process import EngineProcess
from eagle3.engines.vllm_settings import (
    DUMMY,
    check_devices,
    engine_arguments,
    engine_environment,
    installed_version,
)
from eagle3.errors import EngineError, RequestError
from eagle3.layers import check_ids
from eagle3.shards import Layout, ShardPlan, ShardWriter

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.config import Config
    from eagle3.tokens import Sample

NAME = "vllm"

log = logging.getLogger("eagle3")


class VllmEngine:
    """The target model in vLLM. A context manager; nothing of the engine survives `close`."""

    def __init__(
        self,
        cfg: Config,
        target: Target,
        *,
        folder: Path | None = None,
        load_format: str = "auto",
        log_file: Path | None = None,
        number: int = 0,
        started: Callable[[EngineProcess], None] = lambda process: None,
    ) -> None:
        """Loads the checkpoint (`folder` instead of the target's own, for a rehearsal) and checks its backends.

        `number` is its place among engines side by side (vllm_group). `started` hears of its process before the load.
        Raises RequestError for a wrong setting, EngineError when the engine dies or ends up with other backends than
        expected and `hardware.on_backend_mismatch` is stop.
        """
        self.cfg, self.target, self.hardware = cfg, target, cfg.hardware
        self.version = installed_version()
        check_engine(target.adapter, NAME)
        check_devices(cfg)
        self._adapter = f"{type(target.adapter).__module__}:{type(target.adapter).__qualname__}"
        self._expected = expected_backends(target.adapter.expected_backends(), cfg.hardware.expected_backends)
        self.last_capture: dict[str, Any] = {}
        arguments = engine_arguments(cfg, target, folder or target.folder, load_format)
        log_file = log_file or Path(tempfile.gettempdir()) / f"eagle3-engine-{time.time_ns()}.log"
        begun = time.monotonic()
        self._process = EngineProcess(arguments, engine_environment(cfg, number), log_file)
        try:
            started(self._process)
            shards = None if arguments["load_format"] == DUMMY else target.weights
            expected = self._expected if cfg.hardware.on_backend_mismatch == "stop" else {}
            level = logging.DEBUG if number else logging.INFO
            watch = LoadWatch(shards, expected, level=level)
            self.version = self._process.wait_ready(watch.feed)
            self.ranks = self._process.call("eagle3_describe", self._adapter)
            self.load_seconds = time.monotonic() - begun
            self._check_loaded(folder is None)
        except BaseException:
            self._process.close(gently=False)
            raise
        log.log(level, "vllm %s: %s loaded in %.1fs", self.version, self.ranks[0]["model_class"], self.load_seconds)

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def info(self) -> EngineInfo:
        """What is loaded."""
        first, shape = self.ranks[0], self.target.shape
        names = ("runner", "layer_class", "quantization", "backends", "max_model_len", "batch_tokens")
        return EngineInfo(
            name=NAME,
            version=self.version,
            model_class=first["model_class"],
            dtype=first["dtype"],
            device=first["device"],
            num_layers=first["num_layers"],
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            details={**{name: first[name] for name in names}, "ranks": len(self.ranks)},
        )

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample that this engine takes: a request must have room for one new token."""
        return self.ranks[0]["max_model_len"] - 1

    def capture(self, samples: Sequence[Sample], layer_ids: Sequence[int]) -> Iterator[CapturedStates]:
        """Yields each sample's states, in the engine's dtype on the CPU; for a few samples: they pass through a file.

        A sample with a state that is not finite comes as NaN. RequestError for unknown, repeated or unsorted ids.
        """
        layer_ids = check_ids(layer_ids, self.ranks[0]["num_layers"], "layer_ids")
        layout = Layout(self.target.shape.hidden_size, self.ranks[0]["dtype"], self.target.shape.num_layers)
        plan = ShardPlan(
            number=0,
            rows=tuple(range(len(samples))),
            sample_ids=tuple(sample.id for sample in samples),
            lengths=tuple(len(sample.input_ids) for sample in samples),
        )
        with (
            tempfile.TemporaryDirectory(prefix="eagle3-capture-") as folder,
            ShardWriter(Path(folder), layout, plan, layer_ids) as writer,
        ):
            for _ in self.capture_shards([ShardWork(writer, samples)], layer_ids, layout):
                for sample, start in zip(samples, plan.starts, strict=True):
                    rows = {k: writer.files[k].read(start, len(sample.input_ids)) for k in layer_ids}
                    if sample.id in writer.rejected:
                        rows = {k: state.fill_(float("nan")) for k, state in rows.items()}
                    yield CapturedStates(sample.id, rows)

    def capture_shards(
        self, work: Iterable[ShardWork], layer_ids: Sequence[int], layout: Layout, *, rotation: int = 0
    ) -> Iterator[ShardWork]:
        """Captures shards as they come, several at once; yields each when its writer may be closed.

        Members with a state that is not finite are rejected in their writer. `layer_ids` are ascending and the same in
        all writers. Raises EngineError when the engine fails or rows cannot be told apart, StoreError when rows are
        missing, StageFailed when the disk is full. What was spent on what is in `last_capture` afterwards.
        """
        first = self.ranks[0]
        driver = CaptureDriver(
            self._process,
            self._adapter,
            layer_ids,
            layout,
            batch_tokens=first["batch_tokens"],
            longest_sample=self.longest_sample,
            rotation=rotation,
        )
        try:
            yield from driver.run(work)
        finally:
            self.last_capture = driver.report
        if not driver.report:
            raise self._process.failure("vllm: the engine ended when its last shard was made; all shards are kept")

    def generate(
        self, prompts: Sequence[Prompt], *, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[Generation]:
        """Yields finished continuations in any order; greedy at temperature 0, else each key has its own seed.

        RequestError for prompts that leave no room for their new tokens.
        """
        self.check_room(prompts)
        yield from self.generate_from(
            iter(prompts), 2 * self.hardware.generate_slots, temperature=temperature, seed=seed, stop_ids=stop_ids
        )

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """RequestError for prompts that leave no room for their new tokens."""
        room = self.ranks[0]["max_model_len"]
        for prompt in prompts:
            if len(prompt.input_ids) + prompt.max_new_tokens > room:
                raise RequestError(
                    f"prompt {prompt.key}: {len(prompt.input_ids)} tokens and {prompt.max_new_tokens} new ones, the "
                    f"engine takes {room}; set hardware.engine_options.max_model_len or shorten dataset.max_new_tokens"
                )

    def generate_from(
        self, waiting: Iterator[Prompt], most: int, *, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[Generation]:
        """As `generate`, for prompts that have room and that others may take from as well: at most `most` at a time.

        EngineError when the engine fails or stands still for eight minutes.
        """
        running: dict[str, Prompt] = {}
        with closing(ProgressClock(self._process)) as clock:
            while True:
                fresh = list(itertools.islice(waiting, most - len(running)))
                requests: list[tuple[str, list[int], dict[str, Any]]] = []
                for prompt in fresh:
                    if prompt.max_new_tokens <= 0:
                        yield Generation(prompt.key, [], "length")
                        continue
                    request_id = f"generate-{next(self._process.numbers)}"
                    running[request_id] = prompt
                    sampling = sampling_parameters(prompt, temperature, seed, stop_ids)
                    requests.append((request_id, [int(i) for i in prompt.input_ids], sampling))
                if requests:
                    self._process.submit(requests)
                elif fresh:
                    continue
                if not running:
                    return
                for request_id, token_ids, reason in clock.finished():
                    prompt = running.pop(request_id, None)
                    if prompt is None:  # of a capture that was broken off
                        continue
                    yield Generation(prompt.key, token_ids, "stop" if reason == "stop" else "length")

    def margin(self, token_ids: Sequence[int], chosen: int) -> float:
        """How much more probable (natural logarithm) the model's own choice after `token_ids` is than `chosen`."""
        return float(self._process.ask("margin", [int(i) for i in [*token_ids, chosen]]))

    def close(self) -> None:
        """Ends the engine's processes; GPU memory is free afterwards."""
        self._process.close()

    def _check_loaded(self, whole: bool) -> None:
        """EngineError unless the loaded model has the expected layers and backends."""
        first, shape = self.ranks[0], self.target.shape
        if whole and first["num_layers"] != shape.num_layers:
            raise EngineError(
                f"{self.target.folder}: config.json says {shape.num_layers} layers, vLLM loaded {first['num_layers']}; "
                f"is model.adapter={self.target.adapter.name} the right family?"
            )
        if first["prefix_caching"]:
            raise EngineError(
                "vllm: prefix caching is on although it was switched off; this version ignores the setting"
            )
        for rank in self.ranks:
            if problems := mismatches(self._expected, rank["backends"]):
                message = (
                    f"hardware.expected_backends: rank {rank['rank']} differs: {'; '.join(problems)}; all found: "
                    f"{rank['backends']}; change the setting, or hardware.on_backend_mismatch=warn to go on"
                )
                if self.hardware.on_backend_mismatch == "stop":
                    raise EngineError(message)
                log.warning("%s", message)


def sampling_parameters(prompt: Prompt, temperature: float, seed: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    """A prompt's `vllm.SamplingParams`; above temperature 0 each key has its own seed."""
    own = int.from_bytes(hashlib.sha256(f"{seed}:{prompt.key}".encode()).digest()[:4], "little")
    return {
        "max_tokens": prompt.max_new_tokens,
        "temperature": temperature,
        "seed": own if temperature > 0 else None,
        "stop_token_ids": [int(i) for i in stop_ids],
        "ignore_eos": True,
        "detokenize": False,
    }
