"""Whether the machine has the memory that a capture takes on the host, asked before anything loads (before step 3).

Beside the walk: `extract` and `rehearsal` ask. A capture holds a ring of pinned buffers for each rank; states that are
stored in /dev/shm or another file system in memory stay there as well, and count against a container's limit, which
ends processes without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eagle3.engines.vllm_capture import ring_bytes
from eagle3.engines.vllm_settings import engine_arguments
from eagle3.errors import RequestError
from eagle3.progress import size_text
from eagle3.shards import Layout

if TYPE_CHECKING:
    from eagle3.checkpoint import Target
    from eagle3.config import Config

MEMORY_TYPES = ("tmpfs", "ramfs", "devtmpfs")
# Version 2 of control groups and version 1: the limit, what is used, what of that are pages of files.
GROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    root: str
    point: str
    kind: str
    options: str


@dataclass(frozen=True)
class HostMemory:
    """Bytes that are free for new processes, and the limit of the container that bounds them; None without one."""

    available: int
    limit: int | None = None


@dataclass(frozen=True)
class HostNeed:
    """Bytes that a capture takes on the host."""

    buffers: int
    """The pinned rings of all ranks of all engines."""
    states: int
    """The states, where `folder` is in memory."""
    folder: Path

    @property
    def total(self) -> int:
        """All of it."""
        return self.buffers + self.states

    def describe(self) -> str:
        """In words."""
        kept = f", states in memory ({self.folder}) {size_text(self.states)}" if self.states else ""
        return f"{size_text(self.total)} (buffers of all ranks {size_text(self.buffers)}{kept})"

    def problem(self, memory: HostMemory) -> str | None:
        """Why it does not fit, with what there is and which setting to change; None when it does."""
        if self.total <= memory.available:
            return None
        setting, change = "hardware.batch_tokens", "lower it, or capture fewer layers"
        if self.states > self.buffers:
            setting, change = "output_dir", "choose one on a disk, or store fewer layers or samples"
        limit = f" (the container's limit is {size_text(memory.limit)})" if memory.limit is not None else ""
        return (
            f"{setting}: the capture needs {self.describe()} of this machine's memory, but only "
            f"{size_text(memory.available)} are available{limit}; {change}"
        )


def capture_need(cfg: Config, target: Target, layers: int, states_bytes: int, folder: Path) -> HostNeed:
    """What a capture of so many layers takes, with `states_bytes` still to be stored in `folder`."""
    buffers = 0
    if cfg.hardware.engine == "vllm":
        tokens = engine_arguments(cfg, target, target.folder, "auto")["max_num_batched_tokens"]
        layout = Layout(target.shape.hidden_size, cfg.store.dtype, target.shape.num_layers)
        buffers = cfg.hardware.data_parallel_size * ring_bytes(layers, tokens, layout.row_bytes)
    return HostNeed(buffers, states_bytes if in_memory(folder) else 0, folder)


def check(need: HostNeed) -> None:
    """RequestError when the machine or the container has less memory than needed."""
    memory = host_memory()
    if memory is not None and (problem := need.problem(memory)) is not None:
        raise RequestError(problem)


def in_memory(folder: Path, system: Path = Path("/")) -> bool:
    """Whether a folder, existing or to be made, lies on a file system in memory; false where that cannot be told."""
    target, best = folder.resolve(), None
    for mount in _mounts(system):
        # Of several mounts at one place the last is seen.
        if target.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best is not None and best.kind in MEMORY_TYPES


def host_memory(system: Path = Path("/")) -> HostMemory | None:
    """What is available on this machine and in this container; None where the kernel does not tell. `system` is /."""
    try:
        text = (system / "proc/meminfo").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "MemAvailable" not in fields:
        return None
    found = HostMemory(1024 * int(fields["MemAvailable"].split()[0]))
    for folder in _groups(system):
        for limit_name, used_name, cached in GROUP_FILES:
            with suppress(OSError, ValueError):  # another version, or "max": no limit
                limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Pages of files make room when it is asked for.
                room = max(limit - used + sum(int(counts.get(name, 0)) for name in cached), 0)
                if room < found.available:
                    found = HostMemory(room, limit)
    return found


def _mounts(system: Path) -> Iterator[Mount]:
    with suppress(OSError):
        for line in (system / "proc/self/mountinfo").read_text(errors="replace").splitlines():
            place, _, rest = line.partition(" - ")
            fields, more = place.split(" "), rest.split(" ")
            point = fields[4].replace("\\040", " ")
            yield Mount(fields[3], point, more[0], more[-1])


def _groups(system: Path) -> Iterator[Path]:
    """The folders of this process's control groups that may limit its memory, and of those around them."""
    paths: dict[str, str] = {}
    with suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                paths["cgroup" if controllers else "cgroup2"] = path
    for mount in _mounts(system):
        wanted = mount.kind == "cgroup2" or (mount.kind == "cgroup" and "memory" in mount.options.split(","))
        if not wanted or mount.kind not in paths:
            continue
        # Seen from inside a container the mount begins at the container's own group.
        inside = paths[mount.kind].removeprefix(mount.root.rstrip("/")).strip("/")
        top = system / mount.point.lstrip("/")
        folder = top / inside
        yield folder
        for parent in folder.parents:
            if not parent.is_relative_to(top):
                break
            yield parent
