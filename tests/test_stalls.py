"""E4: a disk that hangs is named, then the capture is given up, as is a generation that hangs; slow ones are not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle3 import streaming
from eagle3.engines import Prompt, stalls
from eagle3.engines.stalls import SAY_SECONDS, STALL_SECONDS, DiskWatch, ProgressClock
from eagle3.engines.vllm import VllmEngine
from eagle3.engines.vllm_serving import ServedTarget
from eagle3.errors import EngineError
from eagle3.shards import ShardWriter
from tests.stub import HANGS, Stub
from tests.test_recorder import LAYERS, LAYOUT, forward, make_plan, make_samples, start_ranks
from tests.test_vllm_process import ignore, start


class Process:
    """Stands for the engine's process: only what becomes of it counts here."""

    closed = False

    def close(self, *, gently: bool = True) -> None:
        self.closed = True

    def failure(self, what: str) -> EngineError:
        return EngineError(what)


@contextmanager
def ticking(process: Any) -> Iterator[tuple[ProgressClock, list[float]]]:
    """A clock of progress on a time that the test sets."""
    now = [0.0]
    clock = ProgressClock(process, lambda: now[0])
    try:
        yield clock, now
    finally:
        clock.close()


def stand_still(clock: ProgressClock, now: list[float], seconds: float) -> None:
    for _ in range(int(seconds)):
        now[0] += 1
        clock.check()


def test_each_minute_without_progress_is_said_and_eight_are_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with ticking(Process()) as (clock, now), caplog.at_level("WARNING", "eagle3"):
        stand_still(clock, now, SAY_SECONDS - 1)
        assert caplog.messages == []
        stand_still(clock, now, 2)
        assert caplog.messages == [
            "vllm: no token and no byte for 1m00s; no rank waits for a disk: the model itself stands still"
        ]
        stand_still(clock, now, STALL_SECONDS - SAY_SECONDS - 2)
        assert len(caplog.messages) == STALL_SECONDS // SAY_SECONDS - 1
        with pytest.raises(
            EngineError, match=r"no token and no byte for 8m00s, and no rank waits for a disk.*nvidia-smi"
        ):
            stand_still(clock, now, 1)


def test_a_slow_disk_and_a_process_that_was_stopped_are_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    with ticking(Process()) as (clock, now), caplog.at_level("WARNING", "eagle3"):
        for written in range(20):
            clock.moved([written])
            stand_still(clock, now, SAY_SECONDS - 1)
        clock.moved([20])
        now[0] += 86400
        clock.check()
        assert caplog.messages == []


def wait_for_message(clock: ProgressClock) -> dict[int, tuple[str, str, str]]:
    deadline = time.monotonic() + 60
    while not clock._waits and time.monotonic() < deadline:
        clock._hear()
        time.sleep(0.01)
    return clock._waits


def test_the_rank_and_its_file_are_named_and_the_engine_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    with ticking(process) as (clock, now), caplog.at_level("WARNING", "eagle3"):
        watch = DiskWatch(3, clock.address, say_s=0.1)
        with watch.doing("writing", "/states/shard-00007.tmp/layer-030.safetensors"):
            assert list(wait_for_message(clock)) == [3]
            stand_still(clock, now, SAY_SECONDS)
            assert caplog.messages[0].startswith(
                "vllm: no token and no byte for 1m00s; rank 3 has been writing /states/"
            )
            words = (
                r"^/states/shard-00007\.tmp/layer-030\.safetensors: rank 3 has been writing it since \d\d:\d\d:\d\d, .*"
            )
            with pytest.raises(EngineError, match=words + "run the same command again: complete shards are kept"):
                stand_still(clock, now, STALL_SECONDS)
        assert process.closed
        # What ended meanwhile is nobody's fault later.
        wait_for_message(clock)
        clock.moved("something")
        assert clock._waits == {}
        watch.close()


def test_a_recorders_open_that_blocks_is_told_though_the_engine_waits_for_the_ring(tmp_path: Path) -> None:
    """A FIFO without a reader: opening it for writing never ends, as on a network disk that is gone."""
    samples = make_samples([10] * 4)
    with ticking(Process()) as (clock, _), ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS) as writer:
        hung = writer.files[LAYERS[1]].path
        hung.unlink()
        os.mkfifo(hung)
        watch = DiskWatch(0, clock.address, say_s=0.1)
        (recorder,) = start_ranks(writer, samples, 1, slots=1, writers=1, watch=watch)
        engine = threading.Thread(target=lambda: [forward([recorder], [(sample, 0, 10)]) for sample in samples])
        engine.start()
        ((_, what, path),) = wait_for_message(clock).values()
        assert (what, path) == ("opening", str(hung))
        assert engine.is_alive()
        reader = os.open(hung, os.O_RDONLY | os.O_NONBLOCK)
        engine.join(60)
        # A pipe takes no offsets, so that the capture fails in the end, which lets go of the model.
        assert "Illegal seek" in recorder.poll()["failure"]["message"]
        recorder.close()
        os.close(reader)


def test_a_call_without_an_answer_is_given_up_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "SAY_SECONDS", 0.5)
    monkeypatch.setattr(stalls, "STALL_SECONDS", 1.5)
    process = start(tmp_path, "self.collective_rpc = lambda method, args=(): time.sleep(600)")
    process.wait_ready(ignore)
    host = psutil.Process(process._process.pid)
    clock = ProgressClock(process)
    with pytest.raises(EngineError, match=r"no token and no byte for .*, and no rank waits for a disk"):
        process.call("eagle3_poll", waiting=clock.check)
    clock.close()
    assert process.broken
    process.close(gently=False)
    host.wait(timeout=60)


@contextmanager
def generating(served: bool, stub: Stub, log_file: Path, load: str = "") -> Iterator[Callable[[Prompt], list[int]]]:
    """What answers a prompt: the engine that captures, or a server."""
    settings: dict[str, Any] = {"temperature": 0.0, "seed": 0, "stop_ids": []}
    cfg, target = stub.configured(load=load)
    if served:
        with ServedTarget(cfg, target, log_file, longest=20) as server:
            yield lambda prompt: server.decode([prompt], batch_size=1, **settings).texts[prompt.key].token_ids
    else:
        with VllmEngine(cfg, target, log_file=log_file) as engine:
            yield lambda prompt: next(engine.generate([prompt], **settings)).token_ids


@pytest.mark.parametrize("served", [False, True])
def test_a_generation_that_stands_still_is_said_and_given_up(
    served: bool, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stalls, "SAY_SECONDS", 0.5)
    monkeypatch.setattr(stalls, "STALL_SECONDS", 1.5)
    stub, others = Stub(tiny_target, tmp_path, monkeypatch), set(psutil.Process().children())
    with generating(served, stub, tmp_path / "engine.log") as answer, caplog.at_level("WARNING", "eagle3"):
        hosts = set(psutil.Process().children()) - others
        assert hosts
        assert answer(Prompt("a", [1, 2], 2)) == [3, 0]
        with pytest.raises(EngineError, match=r"^vllm: no token and no byte for .*nvidia-smi[\s\S]*last lines of"):
            answer(Prompt("b", [1, HANGS, HANGS], 2))
        assert any("the model itself stands still" in message for message in caplog.messages)
        _, alive = psutil.wait_procs(hosts, timeout=10)
        assert not alive


@pytest.mark.parametrize("served", [False, True])
def test_a_long_answer_of_short_steps_is_no_stall(
    served: bool, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "STALL_SECONDS", 3.0)
    slow = """
def step(answer=self.step, left=list(range(12))):
    time.sleep(0.4)
    return [] if left.pop() else answer()
self.step = step
"""
    stub = Stub(tiny_target, tmp_path, monkeypatch)
    with generating(served, stub, tmp_path / "engine.log", slow) as answer:
        started = time.monotonic()
        assert answer(Prompt("a", [1, 2], 2)) == [3, 0]
        assert time.monotonic() - started > stalls.STALL_SECONDS + 1


def test_a_disk_that_does_not_take_a_complete_shard_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streaming, "SAY_SECONDS", 0.1)
    closing: Future[None] = Future()

    def fail_when_said() -> None:
        while not caplog.messages:
            time.sleep(0.01)
        closing.set_exception(OSError("stale file handle"))

    thread = threading.Thread(target=fail_when_said)
    with caplog.at_level("WARNING", "eagle3"):
        thread.start()
        with pytest.raises(OSError, match="stale file handle"):
            streaming._wait_for_disk(Path("/states/shard-00007"), closing)
    thread.join()
    assert caplog.messages[0].startswith("extract: the disk has not taken what was written to /states/shard-00007 in ")
