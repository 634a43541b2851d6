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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.checksums import combine_all
from eagle3.engines import CapturedStates, EngineInfo, Generation, Prompt
from eagle3.engines.backends import expected_backends, mismatches
from eagle3.engines.vllm_load import LoadWatch
from eagle3.engines.vllm_process import EngineProcess
from eagle3.engines.vllm_settings import check_devices, engine_arguments, engine_environment, installed_version
from eagle3.errors import EngineError, RequestError, StoreError
from eagle3.shards import Layout, ShardPlan, ShardWriter, write_error

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.config import Config
    from eagle3.tokens import Sample

NAME = "vllm"
RING_SLOTS, WRITERS = 3, 8
POLL_SECONDS = 0.25
# Batches of tokens that wait in the engine, so that it never waits for this process.
WINDOW_BATCHES = 4

log = logging.getLogger("eagle3")


@dataclass(frozen=True)
class ShardWork:
    """A shard to capture: its open writer, and all members of its plan in order. Rejected members are left out."""

    writer: ShardWriter
    members: Sequence[Sample]


@dataclass
class _Progress:
    """A shard whose rows are being written: what each rank has reported."""

    work: ShardWork
    members: list[int]
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)


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
    ) -> None:
        """Loads the checkpoint (`folder` instead of the target's own, for a rehearsal) and checks its backends.

        Raises RequestError for a wrong setting, EngineError when the engine dies or ends up with other backends than
        expected and `hardware.on_backend_mismatch` is stop.
        """
        self.cfg, self.target, self.hardware = cfg, target, cfg.hardware
        self.version = installed_version()
        if NAME not in target.adapter.engines:
            raise RequestError(
                f"hardware.engine: the adapter {target.adapter.name} runs with {list(target.adapter.engines)}, not "
                f"with {NAME}; see `eagle3 stage=adapters`"
            )
        check_devices(cfg)
        self._adapter = f"{type(target.adapter).__module__}:{type(target.adapter).__qualname__}"
        self._expected = expected_backends(target.adapter.expected_backends(), cfg.hardware.expected_backends)
        self._numbers = itertools.count()
        self.last_capture: dict[str, Any] = {}
        arguments = engine_arguments(cfg, target, folder or target.folder, load_format)
        log_file = log_file or Path(tempfile.gettempdir()) / f"eagle3-engine-{time.time_ns()}.log"
        started = time.monotonic()
        self._process = EngineProcess(arguments, engine_environment(cfg), log_file)
        try:
            shards = None if load_format == "dummy" else target.weights
            watch = LoadWatch(shards, self._expected if cfg.hardware.on_backend_mismatch == "stop" else {})
            self.version = self._process.wait_ready(watch.feed)
            self.ranks = self._process.call("eagle3_describe", self._adapter)
            self.load_seconds = time.monotonic() - started
            self._check_loaded(folder is None)
        except BaseException:
            self._process.close(gently=False)
            raise
        log.info("vllm %s: %s loaded in %.1fs", self.version, self.ranks[0]["model_class"], self.load_seconds)

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

        A sample with a state that is not finite comes with its rows as they are.
        """
        layout = Layout(self.target.shape.hidden_size, self.ranks[0]["dtype"], self.target.shape.num_layers)
        plan = ShardPlan(
            number=next(self._numbers),
            rows=tuple(range(len(samples))),
            sample_ids=tuple(sample.id for sample in samples),
            lengths=tuple(len(sample.input_ids) for sample in samples),
        )
        with (
            tempfile.TemporaryDirectory(prefix="eagle3-capture-") as folder,
            ShardWriter(Path(folder), layout, plan, sorted(layer_ids)) as writer,
        ):
            for _ in self.capture_shards([ShardWork(writer, samples)], sorted(layer_ids), layout):
                for sample, start in zip(samples, plan.starts, strict=True):
                    rows = {k: writer.files[k].read(start, len(sample.input_ids)) for k in layer_ids}
                    yield CapturedStates(sample.id, rows)

    def capture_shards(
        self, work: Iterable[ShardWork], layer_ids: Sequence[int], layout: Layout, *, rotation: int = 0
    ) -> Iterator[ShardWork]:
        """Captures shards as they come, several at once; yields each when its writer may be closed.

        Members with a state that is not finite are rejected in their writer. `layer_ids` are ascending and the same in
        all writers. Raises EngineError when the engine fails or rows cannot be told apart, StoreError when rows are
        missing, StageFailed when the disk is full. What was spent on what is in `last_capture` afterwards.
        """
        settings = {
            "hidden_size": layout.hidden_size,
            "dtype": layout.dtype,
            "rotation": rotation,
            "slots": RING_SLOTS,
            "writers": WRITERS,
        }
        self._process.call("eagle3_arm", self._adapter, list(layer_ids), settings)
        started, waiting, armed = time.monotonic(), iter(work), True
        open_shards: dict[str, _Progress] = {}
        in_flight: dict[str, int] = {}
        window = WINDOW_BATCHES * self.ranks[0]["batch_tokens"]
        polled = time.monotonic()
        try:
            while True:
                while armed and sum(in_flight.values()) < window:
                    following = next(waiting, None)
                    if following is None:
                        armed = False
                        break
                    key = f"{following.writer.plan.name}-{next(self._numbers)}"
                    progress = self._submit(key, following, in_flight)
                    if progress is None:
                        yield following
                    else:
                        open_shards[key] = progress
                if not open_shards:
                    break
                for request_id, _, _ in self._process.finished(POLL_SECONDS if in_flight else 0.0):
                    in_flight.pop(request_id, None)
                if time.monotonic() - polled < (POLL_SECONDS if in_flight else 0.02):
                    continue
                answers, polled = self._process.call("eagle3_poll"), time.monotonic()
                yield from self._completed(answers, open_shards)
                if not in_flight and open_shards and all(a["rows"] == a["rows_written"] for a in answers):
                    self._lost(answers, open_shards)
        finally:
            if not self._process.broken:
                counts = self._process.call("eagle3_disarm")
                self.last_capture = {"seconds": time.monotonic() - started, "ranks": counts}

    def generate(
        self, prompts: Sequence[Prompt], *, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[Generation]:
        """Yields finished continuations in any order; greedy at temperature 0, else each key has its own seed.

        RequestError for prompts that leave no room for their new tokens.
        """
        room = self.ranks[0]["max_model_len"]
        for prompt in prompts:
            if len(prompt.input_ids) + prompt.max_new_tokens > room:
                raise RequestError(
                    f"prompt {prompt.key}: {len(prompt.input_ids)} tokens and {prompt.max_new_tokens} new ones, the "
                    f"engine takes {room}; set hardware.engine_options.max_model_len or shorten dataset.max_new_tokens"
                )
        yield from (Generation(prompt.key, [], "length") for prompt in prompts if prompt.max_new_tokens <= 0)
        waiting = iter([prompt for prompt in prompts if prompt.max_new_tokens > 0])
        running: dict[str, Prompt] = {}
        while True:
            fresh = list(itertools.islice(waiting, max(2 * self.hardware.generate_slots - len(running), 0)))
            if fresh:
                requests = []
                for prompt in fresh:
                    request_id = f"generate-{next(self._numbers)}"
                    running[request_id] = prompt
                    requests.append((request_id, [int(i) for i in prompt.input_ids], {}))
                    requests[-1][2].update(_sampling(prompt, temperature, seed, stop_ids))
                self._process.submit(requests)
            if not running:
                return
            for request_id, token_ids, reason in self._process.finished(1.0):
                prompt = running.pop(request_id)
                yield Generation(prompt.key, token_ids, "stop" if reason == "stop" else "length")

    def close(self) -> None:
        """Ends the engine's processes; GPU memory is free afterwards."""
        self._process.close()

    def _submit(self, key: str, work: ShardWork, in_flight: dict[str, int]) -> _Progress | None:
        """Opens a shard in all workers and queues its samples; None when it has none to capture."""
        plan, writer = work.writer.plan, work.writer
        members = [m for m, sample_id in enumerate(plan.sample_ids) if sample_id not in writer.rejected]
        if not members:
            return None
        for member in members:
            if plan.lengths[member] > self.longest_sample:
                raise RequestError(
                    f"sample {plan.sample_ids[member]}: {plan.lengths[member]} tokens, the engine takes "
                    f"{self.longest_sample}; set hardware.engine_options.max_model_len, or a smaller dataset.max_length"
                )
        ids = [work.members[member].input_ids.astype(np.int32) for member in members]
        shard = {
            "key": key,
            "files": {str(k): [str(file.path), file.data_offset] for k, file in writer.files.items()},
            "members": members,
            "lengths": [plan.lengths[member] for member in members],
            "first_rows": [plan.starts[member] for member in members],
            "input_ids": np.concatenate(ids).tobytes(),
        }
        self._process.call("eagle3_open", [shard])
        # Sampling one token is the least that vLLM does; it is never fed back.
        sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        requests = [(f"{key}-{member}", row.tolist(), sampling) for member, row in zip(members, ids, strict=True)]
        in_flight.update((request_id, len(row)) for request_id, row, _ in requests)
        self._process.submit(requests)
        return _Progress(work, members)

    def _completed(
        self, answers: Sequence[Mapping[str, Any]], open_shards: dict[str, _Progress]
    ) -> Iterator[ShardWork]:
        """The shards that every rank has now written, their members accepted or rejected in the writers."""
        for rank, answer in enumerate(answers):
            if answer["failure"] is not None:
                failure = answer["failure"]
                if failure["errno"] is not None:
                    folder = next(iter(open_shards.values())).work.writer.temporary
                    raise write_error(OSError(failure["errno"], failure["message"]), folder)
                raise self._process.failure(f"vllm, rank {rank}: {failure['message']}", failure["traceback"])
            for report in answer["finished"]:
                open_shards[report["key"]].reports[rank] = report
        for key, progress in list(open_shards.items()):
            if len(progress.reports) == len(answers):
                del open_shards[key]
                _accept(progress)
                yield progress.work

    def _lost(self, answers: Sequence[Mapping[str, Any]], open_shards: Mapping[str, _Progress]) -> None:
        count = answers[0]["open_samples"]
        raise self._process.failure(
            f"vllm: all requests are finished, but {count} samples of {sorted(open_shards)} lack rows"
        )

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


def _accept(progress: _Progress) -> None:
    """Sums up what all ranks wrote of a shard and settles its members. StoreError when rows are missing."""
    writer, plan = progress.work.writer, progress.work.writer.plan
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    rejected: set[int] = set()
    for report in progress.reports.values():
        rejected.update(report["rejected"])
        for layer_id, member, first, rows, crc in report["parts"]:
            parts.setdefault((layer_id, member), []).append((first, rows, crc))
    for member in progress.members:
        sums: dict[int, int] = {}
        for layer_id in writer.files:
            pieces = sorted(parts.get((layer_id, member), []))
            expected = 0
            for first, rows, _ in pieces:
                if first != expected:
                    break
                expected += rows
            if expected != plan.lengths[member]:
                raise StoreError(
                    f"{writer.temporary}: sample {plan.sample_ids[member]} has {expected} of {plan.lengths[member]} "
                    f"rows of layer {layer_id}; nothing of this shard is kept: run the same command again"
                )
            sums[layer_id] = combine_all((crc, rows * writer.layout.row_bytes) for _, rows, crc in pieces)
        if member in rejected:
            writer.reject(plan.sample_ids[member], "non_finite")
        else:
            writer.accept(plan.sample_ids[member], sums)


def _sampling(prompt: Prompt, temperature: float, seed: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    own = int.from_bytes(hashlib.sha256(f"{seed}:{prompt.key}".encode()).digest()[:4], "little")
    return {
        "max_tokens": prompt.max_new_tokens,
        "temperature": temperature,
        "seed": own if temperature > 0 else None,
        "stop_token_ids": [int(i) for i in stop_ids],
        "ignore_eos": True,
        "detokenize": False,
    }
