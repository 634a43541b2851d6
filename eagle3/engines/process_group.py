"""The end of an engine's process group, whatever state it is in (step 3 of the walk).

vLLM's processes talk through shared memory that has a name in /dev/shm. One that is killed cannot take its names back,
and each would keep hundreds of megabytes until the machine restarts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# Python's shared memory and semaphores, and vLLM's own between the ranks of a CPU; never a checkpoint or states there.
FOLDER, NAMES = Path("/dev/shm"), ("psm_*", "sem.mp-*", "*-cpushm_*")
# How vLLM entitles the processes of its workers.
WORKER = "VLLM::Worker"


def kill_group(group: int, held: Iterable[Path] = ()) -> None:
    """Kills every process of a group and removes the names of the shared memory that they hold, or that was `held`.

    Memory that other processes hold under other names stays. Does not return when the group is one's own.
    """
    try:
        for path in {*held, *group_memory(group)}:
            path.unlink(missing_ok=True)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def group_memory(group: int) -> set[Path]:
    """The shared memory that the processes of a group have mapped now, by name."""
    return {path for process in _members(group) for path in shared_memory(process)}


def ending(code: int | None) -> str:
    """How a process ended, by its exit code as Python gives it."""
    if code is not None and code < 0:
        return f"was ended by signal {signal.Signals(-code).name}"
    return f"exited with {code}"


def memory_kills() -> int:
    """How many processes of this machine the kernel has ended so far for want of memory; 0 where it does not count."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def group_titles(group: int) -> Iterator[tuple[int, str]]:
    """The processes of a group, each with its command line, which a process may have made its title."""
    for process in _members(group):
        with suppress(OSError):
            yield process, Path(f"/proc/{process}/cmdline").read_text(errors="replace").replace("\0", " ").strip()


def shared_memory(process: int) -> set[Path]:
    """The shared memory that a process has mapped, by name; empty where there is no /proc, or for one that is gone.

    Told by device and inode: a semaphore's creator has mapped it under a name that exists no more.
    """
    try:
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    mapped: set[tuple[int, int]] = set()
    for fields in (line.split() for line in lines):
        if len(fields) > 5:  # what is mapped has a name
            major, minor = fields[3].split(":")
            mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    found: set[Path] = set()
    for path in (path for name in NAMES for path in FOLDER.glob(name)):
        with suppress(OSError):
            status = path.stat()
            if (status.st_dev, status.st_ino) in mapped:
                found.add(path)
    return found


def _members(group: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone, or none of ours
            if os.getpgid(int(folder.name)) == group:
                yield int(folder.name)
