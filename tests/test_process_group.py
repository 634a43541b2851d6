"""A process group is ended together with the shared memory that it holds; other processes' stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from eagle3.engines.process_group import kill_group, shared_memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")

HOLDER = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
if os.fork() == 0:
    time.sleep(600)
print(memory.name, flush=True)
time.sleep(600)
"""


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Two processes of a group of their own, with a semaphore and shared memory under a name."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            yield process, Path("/dev/shm") / process.stdout.readline().strip()
    finally:
        kill_group(process.pid)
        process.wait()


def test_what_a_killed_group_held_is_gone_and_what_others_hold_stays() -> None:
    with holder() as (ours, memory), holder() as (_, others):
        held = shared_memory(ours.pid)
        assert {name.name.partition("_")[0].partition("-")[0] for name in held} == {"psm", "sem.mp"}
        assert memory in held
        child = psutil.Process(ours.pid).children()
        kill_group(ours.pid)
        ours.wait()
        assert not psutil.wait_procs(child, timeout=60)[1]
        assert not any(name.exists() for name in held)
        assert others.exists()


def test_only_shared_memory_counts(tmp_path: Path) -> None:
    """Files that a process has mapped besides, as a checkpoint's in /dev/shm, are none of it."""
    code = (
        "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096); print(1, flush=True); "
    )
    mapped = Path("/dev/shm") / f"{tmp_path.name}-{id(tmp_path)}.safetensors"
    mapped.write_bytes(bytes(4096))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code + "time.sleep(600)", str(mapped)],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
        assert str(mapped) in Path(f"/proc/{process.pid}/maps").read_text()
        kill_group(process.pid)
        process.wait()
        assert mapped.exists()
    finally:
        mapped.unlink()


def test_a_group_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    kill_group(process.pid)
    assert shared_memory(process.pid) == set()
