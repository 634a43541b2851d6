"""The engine's process with a vllm of our own in it: loads that die, hang and report; nothing survives it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from eagle3.engines import vllm_process
from eagle3.engines.process_group import shared_memory
from eagle3.engines.vllm_load import LoadWatch
from eagle3.engines.vllm_process import EngineProcess, first_exception, without_warned_tracebacks
from eagle3.errors import EngineError

LOAD = """
import logging, multiprocessing, os, subprocess, sys, time
__version__ = "9.9"
class SamplingParams:
    def __init__(self, **values):
        self.values = values
class Engine:
    def __init__(self):
        self.requests = []
    def has_unfinished_requests(self):
        return bool(self.requests)
    def add_request(self, request_id, prompt, params):
        self.requests.append((request_id, prompt, params))
    def step(self):
        request_id, prompt, params = self.requests.pop(0)
        if prompt == [666]:
            raise RuntimeError()
        if prompt == [9]:
            os.kill(os.getpid(), 9)
        class Completion: token_ids = [1] * params.values["max_tokens"]; finish_reason = "length"
        class Output: finished = True; outputs = [Completion]
        Output.request_id = request_id
        return [Output]
workers = []
class LLM:
    def __init__(self, **arguments):
        self.llm_engine = Engine()
        {load}
    def collective_rpc(self, method, args=()):
        if method == "never":
            for child in (*multiprocessing.active_children(), *workers):
                child.kill()
            time.sleep(600)
        return [(method, *args)]
"""


CORE = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), name='Core').start()"
# A title as vLLM gives its workers, which are the engine's children and may be any process's of ours.
WORKER = (
    "workers.append(subprocess.Popen(['VLLM::Worker_TP1', '600'], executable='/bin/sleep'))\n"
    "        while not open(f'/proc/{workers[0].pid}/cmdline').read(): pass"
)


def start(tmp_path: Path, load: str) -> EngineProcess:
    """A host whose `vllm.LLM` does this when it is made."""
    package = tmp_path / "stub" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LOAD.replace("{load}", load))
    (package / "inputs.py").write_text("def tokens_input(ids):\n    return ids\n")
    source = str(Path(__file__).parents[1])
    path = os.pathsep.join([str(package.parent), source])
    return EngineProcess({"model": "m"}, {"PYTHONPATH": path}, tmp_path / "engine.log")


def ignore(text: str) -> None:
    pass


def test_requests_and_calls_go_there_and_back(tmp_path: Path) -> None:
    process = start(tmp_path, "pass")
    assert process.wait_ready(ignore) == "9.9"
    process.submit([("a", [1, 2], {"max_tokens": 2}), ("b", [3], {"max_tokens": 1})])
    assert process.call("method", 1, "x") == [("method", 1, "x")]
    ended: list[tuple[str, list[int], str]] = []
    while len(ended) < 2:
        ended += process.finished(60.0)
    assert ended == [("a", [1, 1], "length"), ("b", [1], "length")]
    process.close()


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("print('no GPU left', flush=True); os._exit(3)", ["exited with 3", "no GPU left"]),
        ("os.kill(os.getpid(), 11)", ["ended by signal SIGSEGV"]),
        ("raise ValueError('head size 12 is not supported')", ["ValueError: head size 12 is not supported"]),
        ("raise TypeError(\"f() got an unexpected keyword argument 'x'\")", ["correct hardware.engine_options"]),
        ("raise RuntimeError()", ["vllm: RuntimeError: no message", "        raise RuntimeError()"]),
    ],
)
def test_a_load_that_dies_is_reported_within_seconds(tmp_path: Path, load: str, words: list[str]) -> None:
    """E5, E11: one screen with the reason and the engine's last lines, also when the exception has no message."""
    started = time.monotonic()
    process = start(tmp_path, load)
    with pytest.raises(EngineError) as caught:
        process.wait_ready(ignore)
    process.close(gently=False)
    assert time.monotonic() - started < 60
    message = str(caught.value)
    assert all(word in message for word in words)
    assert "last lines of" in message
    assert len(message.splitlines()) < 40


def test_a_death_while_working_is_reported(tmp_path: Path) -> None:
    process = start(tmp_path, "pass")
    process.wait_ready(ignore)
    process.submit([("a", [9], {"max_tokens": 1})])
    with pytest.raises(EngineError, match="ended by signal SIGKILL") as caught:
        process.finished(60.0)
    assert "memory runs out: see `dmesg`" in str(caught.value)
    assert process.broken
    process.close()


HOLD = (
    "import mmap; f = open(f'/dev/shm/{os.getpid()}-cpushm_0', 'w+b'); f.truncate(64); "
    "self.memory = mmap.mmap(f.fileno(), 64); "
)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no names here")
@pytest.mark.parametrize("when", ["loading", "working"])
def test_shared_memory_of_an_engine_that_died_is_freed(tmp_path: Path, when: str) -> None:
    """Nobody lives who could tell what it held: it was noted before."""
    seen = tmp_path / "seen"
    wait = f"print('holds', flush=True)\n        while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n        "
    process = start(tmp_path, HOLD + (wait + "os.kill(os.getpid(), 9)" if when == "loading" else ""))
    held = Path(f"/dev/shm/{process._process.pid}-cpushm_0")

    def watch(text: str) -> None:
        if "holds" in text:
            assert held.exists()
            seen.touch()

    def work() -> None:
        process.wait_ready(watch)
        assert held.exists()
        process.submit([("a", [9], {"max_tokens": 1})])
        process.finished(60.0)

    with pytest.raises(EngineError, match="ended by signal SIGKILL"):
        work()
    process.close()
    assert not held.exists()
    assert seen.exists() == (when == "loading")


def test_a_load_during_which_the_kernel_ran_out_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that lose one tell of connections that are refused."""
    kills = iter([4, 6])
    monkeypatch.setattr(vllm_process, "memory_kills", lambda: next(kills))
    process = start(tmp_path, "raise RuntimeError('Gloo connectFullMesh failed')")
    with pytest.raises(EngineError, match=r"connectFullMesh[\s\S]*the kernel has ended 2 processes of this machine"):
        process.wait_ready(ignore)
    process.close(gently=False)


def test_a_worker_that_is_killed_while_it_loads_is_named(tmp_path: Path) -> None:
    """vLLM tells of an exception in a background process that nobody had."""
    seen, known = tmp_path / "seen", tmp_path / "known"
    load = f"""{WORKER}; print('up', flush=True)
        while not os.path.exists({str(known)!r}): time.sleep(0.01)
        workers[0].kill(); print('killed', flush=True)
        while not os.path.exists({str(seen)!r}): time.sleep(0.01)
        raise RuntimeError('WorkerProc initialization failed due to an exception in a background process')"""
    process = start(tmp_path, load)

    def watch(text: str) -> None:
        if process._workers:
            known.touch()
        if process._gone:
            seen.touch()

    with pytest.raises(
        EngineError, match=r"workers that ended while it loaded: VLLM::Worker_TP1 600 at \d\d:\d\d:\d\d\n"
    ):
        process.wait_ready(watch)
    process.close(gently=False)


def test_an_exception_without_a_message_is_never_empty(tmp_path: Path) -> None:
    process = start(tmp_path, "pass")
    process.wait_ready(ignore)
    process.submit([("a", [666], {"max_tokens": 1})])
    with pytest.raises(EngineError, match=r"RuntimeError: no message[\s\S]*step"):
        process.finished(60.0)
    process.close()


@pytest.mark.parametrize(
    ("load", "words"), [(CORE, "Core was ended by signal SIGKILL"), (WORKER, "VLLM::Worker_TP1 600 ended")]
)
def test_a_call_that_is_never_answered_since_a_process_died_is_an_error(tmp_path: Path, load: str, words: str) -> None:
    """E11: vLLM waits for ever for the answer of a process of its own that is gone."""
    process = start(tmp_path, load)
    process.wait_ready(ignore)
    started = time.monotonic()
    with pytest.raises(EngineError, match=f"vllm: of the engine's processes {words}") as caught:
        process.call("never")
    assert time.monotonic() - started < 60
    assert str(caught.value).endswith("the same command goes on from there")
    process.close()


def test_a_python_that_has_no_descriptors_of_processes_loads_an_engine_of_several_workers(tmp_path: Path) -> None:
    process = start(tmp_path, f"{WORKER}\n        del os.pidfd_open")
    assert process.wait_ready(ignore) == "9.9"
    process.close()


def test_closing_ends_all_that_the_engine_started(tmp_path: Path) -> None:
    others = set(psutil.Process().children(recursive=True))
    process = start(tmp_path, "subprocess.Popen(['sleep', '600'])")
    process.wait_ready(ignore)
    children = list(set(psutil.Process().children(recursive=True)) - others)
    assert any(child.name() == "sleep" for child in children)
    process.close()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert gone


@pytest.mark.parametrize("load", ["pass", "print('loading', flush=True); time.sleep(600)"])
def test_the_engine_ends_when_we_are_gone(tmp_path: Path, load: str) -> None:
    """A killed eagle3 leaves no engine on the GPU, nor one that loads for many minutes yet, nor shared memory."""
    hold = "from multiprocessing.shared_memory import SharedMemory; self.m = SharedMemory(create=True, size=64); "
    process = start(tmp_path, hold + load)
    if load == "pass":
        process.wait_ready(ignore)
    else:
        while "loading" not in process.log_text():
            time.sleep(0.1)
    host = psutil.Process(process._process.pid)
    held = shared_memory(host.pid)
    assert len(held) == 1
    process._connection.close()
    host.wait(timeout=60)
    process._process.wait()
    assert not any(path.exists() for path in held)


def test_a_wrong_backend_stops_the_load_early(tmp_path: Path) -> None:
    load = "print(\"Using 'TRITON' WNA16 MoE backend.\", flush=True); time.sleep(600)"
    process = start(tmp_path, load)
    watch = LoadWatch(None, {"moe": "MARLIN_WNA16"})
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"moe: expected MARLIN_WNA16, found TRITON_WNA16.*stopped early"):
        process.wait_ready(watch.feed)
    process.close(gently=False)
    assert time.monotonic() - started < 60


def test_shards_are_counted_with_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    watch = LoadWatch(None, {}, clock=lambda: clock[0])
    with caplog.at_level("INFO", "eagle3"):
        for done in range(0, 64, 4):
            watch.feed(f"\rLoading safetensors checkpoint shards:  {done}% Completed | {done}/64 [00:0")
            watch.feed("0<01:10,  1.2s/it]\nUsing FLASH_ATTN MLA prefill backend.\n")
            clock[0] += 60
    lines = [record.message for record in caplog.records]
    assert lines[0] == "vllm: prefill is FLASH_ATTN"
    assert "vllm: loading, shard 32 of 64, 8m00s left" in lines
    assert len(lines) == 16


def test_a_load_that_is_silent_says_so_each_minute_with_its_last_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    watch = LoadWatch(None, {}, clock=lambda: clock[0])
    with caplog.at_level("INFO", "eagle3"):
        watch.feed("(Worker pid=7) INFO world_size=8 backend=nccl\n\n")
        for _ in range(150):
            clock[0] += 1
            watch.feed("")
        watch.feed("at last\n")
        clock[0] += 59
        watch.feed("")
    assert caplog.messages == [
        f"vllm: still loading, its log is silent for {time}; last line: (Worker pid=7) INFO world_size=8 backend=nccl"
        for time in ("1m00s", "2m00s")
    ]


def test_the_last_lines_leave_out_what_was_only_a_warning() -> None:
    log = """\
(MainProcess pid=7) INFO 11-30 11:13:38 [base.py:1] loaded
(MainProcess pid=7) WARNING 11-30 11:13:39 [base.py:380] Warmup failed
(MainProcess pid=7) WARNING 11-30 11:13:39 [base.py:380] Traceback (most recent call last):
(MainProcess pid=7) WARNING 11-30 11:13:39 [base.py:380]   File "/x.py", line 1, in f
(MainProcess pid=7) WARNING 11-30 11:13:39 [base.py:380] ValueError: Tokenizer not available
(MainProcess pid=7) WARNING 11-30 11:13:39 [base.py:413] Using None for EOS
(Worker pid=8) ERROR 11-30 11:13:40 [m.py:1] Traceback (most recent call last):
(Worker pid=8) ERROR 11-30 11:13:40 [m.py:1] KeyError: 'x'
"""
    lines = log.splitlines()
    assert without_warned_tracebacks(lines) == [*lines[:2], *lines[5:]]


def test_the_first_exception_is_found_behind_prefixes_and_warnings() -> None:
    log = """\
(Worker pid=7) WARNING 11-30 01:08:14 [import_utils.py:408] Traceback (most recent call last):
(Worker pid=7) WARNING 11-30 01:08:14 [import_utils.py:408] ImportError: deep_gemm
(Worker_TP1 pid=8) ERROR 11-30 01:08:15 [multiproc.py:1] Traceback (most recent call last):
(Worker_TP1 pid=8) ERROR 11-30 01:08:15 [multiproc.py:1]   File "/x.py", line 1, in f
(Worker_TP1 pid=8) ERROR 11-30 01:08:15 [multiproc.py:1] KeyError: 'layers.1.mlp'
Traceback (most recent call last):
RuntimeError: Engine core initialization failed.
"""
    assert first_exception(log) == "KeyError: 'layers.1.mlp'"
    killed = (
        "(EngineCore pid=20) ERROR 11-30 10:30:16 [m.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"
    )
    assert first_exception(killed + "\n" + log) == "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"
    assert first_exception(log + killed) == "KeyError: 'layers.1.mlp'"
    assert first_exception("all is well") is None
