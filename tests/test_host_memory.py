"""E10: what a capture takes of the host's memory is held against the machine and its container before it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3 import host_memory as memory
from eagle3.checkpoint import open_target
from eagle3.engines.vllm_capture import RING_SLOTS, ring_bytes
from eagle3.errors import RequestError
from eagle3.host_memory import HostMemory, HostNeed, capture_need, host_memory, in_memory
from eagle3.shards import ShardWriter
from tests.conftest import target_config
from tests.test_recorder import LAYERS, LAYOUT, make_plan, make_samples, start_ranks

GB = 10**9
MEMINFO = "MemTotal:  65536000 kB\nMemFree:   100 kB\nMemAvailable:  48828125 kB\n"


def system(folder: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """The files of /proc and /sys that tell of memory, below `folder`."""
    for name, text in {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mounts,
        **files,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V2 = "30 25 0:26 / /sys/fs/cgroup ro,nosuid shared:4 - cgroup2 cgroup rw,nsdelegate\n"
V1 = (
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)


def test_without_a_container_what_is_available_counts(tmp_path: Path) -> None:
    found = host_memory(system(tmp_path, "0::/user.slice\n", V2, {"sys/fs/cgroup/user.slice/memory.max": "max\n"}))
    assert found == HostMemory(50 * GB)
    assert host_memory(tmp_path / "no Linux") is None


def test_a_limit_of_this_group_or_of_one_around_it_counts_and_pages_of_files_are_free(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/pod/memory.max": f"{20 * GB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{15 * GB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 9\nshmem {4 * GB}\ninactive_file {2 * GB}\nactive_file {1 * GB}\n",
        "sys/fs/cgroup/pod/job/memory.max": "max\n",
        "sys/fs/cgroup/pod/job/memory.current": "7\n",
    }
    assert host_memory(system(tmp_path, "0::/pod/job\n", V2, files)) == HostMemory(8 * GB, 20 * GB)


@pytest.mark.parametrize(
    ("root", "own", "folder"),
    [("/docker/7", "/docker/7", ""), ("/", "/slurm/job_5", "slurm/job_5/")],
    ids=["inside", "outside"],
)
def test_the_first_version_of_control_groups(tmp_path: Path, root: str, own: str, folder: str) -> None:
    """As in a container, whose mount begins at its own group, and as on the host."""
    files = {
        f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": f"{4 * GB}",
        f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": f"{3 * GB}",
        f"sys/fs/cgroup/memory/{folder}memory.stat": "total_inactive_file 5\ntotal_active_file 6\n",
    }
    text = f"4:memory:{own}\n3:cpuset:/\n0::/\n"
    assert host_memory(system(tmp_path, text, V1.format(root=root), files)) == HostMemory(GB + 11, 4 * GB)


def test_folders_in_memory_are_told_by_their_mount(tmp_path: Path) -> None:
    mounts = (
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n"
        "26 27 0:24 / /scratch\\040disk rw - tmpfs tmpfs rw\n28 26 8:1 / /scratch\\040disk/nvme rw - xfs /dev/sda rw\n"
    )
    top = system(tmp_path, "", mounts, {})
    assert in_memory(Path("/dev/shm/outputs/artifacts"), top)
    assert in_memory(Path("/scratch disk/outputs"), top)
    assert not in_memory(Path("/scratch disk/nvme/outputs"), top)
    assert not in_memory(Path("/dev/shmoo"), top)
    assert not in_memory(Path("/dev/shm"), tmp_path / "no Linux")


def test_what_is_too_much_names_the_setting_that_takes_most() -> None:
    there = HostMemory(8 * GB, 16 * GB)
    assert HostNeed(3 * GB, 5 * GB, Path("/dev/shm/out")).problem(there) is None
    problem = HostNeed(3 * GB, 6 * GB, Path("/dev/shm/out")).problem(there)
    assert problem == (
        "output_dir: the capture needs 9.0 GB (buffers of all ranks 3.0 GB, states in memory (/dev/shm/out) 6.0 GB) of "
        "this machine's memory, but only 8.0 GB are available (the container's limit is 16.0 GB); choose one on a "
        "disk, or store fewer layers or samples"
    )
    problem = HostNeed(9 * GB, 0, Path("/disk")).problem(HostMemory(8 * GB))
    assert problem == (
        "hardware.batch_tokens: the capture needs 9.0 GB (buffers of all ranks 9.0 GB) of this machine's memory, but "
        "only 8.0 GB are available; lower it, or capture fewer layers"
    )


def test_the_buffers_are_those_that_the_ranks_take(tmp_path: Path) -> None:
    samples = make_samples([5])
    with ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS) as writer:
        ranks = start_ranks(writer, samples, 2, slots=RING_SLOTS)
        taken = sum(rank.ring_bytes for rank in ranks)
        for rank in ranks:
            rank.close()
    assert taken == ring_bytes(len(LAYERS), 64, LAYOUT.row_bytes)


def test_only_vllm_has_buffers_and_only_states_in_memory_count(tiny_target: Path, tmp_path: Path) -> None:
    cfg = target_config(tiny_target, tmp_path)
    cfg.hardware.engine_options = {"max_num_batched_tokens": 100}
    target = open_target(cfg)
    assert capture_need(cfg, target, 4, GB, Path("/disk")).total == 0
    cfg.hardware.engine, cfg.hardware.data_parallel_size = "vllm", 3
    assert capture_need(cfg, target, 4, GB, Path("/disk")).buffers == 3 * RING_SLOTS * 4 * 100 * 48 * 2


def test_the_check_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(GB))
    memory.check(HostNeed(GB, 0, Path("/disk")))
    with pytest.raises(RequestError, match=r"^hardware\.batch_tokens: .*only 1\.0 GB are available"):
        memory.check(HostNeed(GB + 1, 0, Path("/disk")))
    monkeypatch.setattr(memory, "host_memory", lambda: None)
    memory.check(HostNeed(10**18, 0, Path("/disk")))
