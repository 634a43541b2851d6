"""Rows reach a file past the page cache or through it, whichever their alignment allows; never wrong, never short."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.engines.direct_files import is_direct, open_for_rows, page_memory, write_at


def filled(rows: int, width: int) -> torch.Tensor:
    memory = page_memory(rows, width, dtype=torch.float32)
    return memory.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)))


def raw(states: torch.Tensor) -> memoryview:
    return memoryview(states.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def test_memory_begins_at_a_page() -> None:
    memory = page_memory(3, 5, dtype=torch.bfloat16)
    assert memory.data_ptr() % 4096 == 0
    assert (memory.shape, memory.dtype) == ((3, 5), torch.bfloat16)


@pytest.mark.parametrize(("width", "direct"), [(128, True), (96, False)])
def test_rows_of_whole_sectors_are_written_directly(tmp_path: Path, width: int, direct: bool) -> None:
    path = tmp_path / "rows"
    path.touch()
    os.truncate(path, 4096 + 8 * width * 4)
    states = filled(8, width)
    file = open_for_rows(path, width * 4)
    assert is_direct(file) == direct
    write_at(file, raw(states[3:]), 4096 + 3 * width * 4)
    write_at(file, raw(states[:3]), 4096)
    assert is_direct(file) == direct
    os.close(file)
    assert np.array_equal(np.fromfile(path, np.float32, offset=4096).reshape(8, width), states.numpy())


def test_what_a_disk_refuses_as_direct_is_written_through_the_cache(tmp_path: Path) -> None:
    """Offset and address in the middle of a sector."""
    path = tmp_path / "rows"
    path.touch()
    states = filled(8, 128)
    file = open_for_rows(path, 512)
    write_at(file, raw(states)[100:3000], 100)
    assert not is_direct(file)
    write_at(file, raw(states)[3000:], 3000)
    write_at(file, raw(states)[:100], 0)
    os.close(file)
    assert np.array_equal(np.fromfile(path, np.float32).reshape(8, 128), states.numpy())


def test_threads_that_are_refused_at_once_all_write_through_the_cache(tmp_path: Path) -> None:
    data, threads = raw(filled(64, 128)), 8
    together = threading.Barrier(threads)

    def write(number: int) -> None:
        together.wait()
        part = slice(number * 1000 + 100, number * 1000 + 1100)
        write_at(file, data[part], part.start)

    for attempt in range(100):
        path = tmp_path / str(attempt)
        path.touch()
        file = open_for_rows(path, 512)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(threads)))
        os.close(file)
        assert path.read_bytes()[100:] == bytes(data[100 : threads * 1000 + 100])


def test_other_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_for_rows(tmp_path / "absent", 512)
    file = os.open(tmp_path / "rows", os.O_RDONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_at(file, memoryview(b"x" * 512), 0)
    os.close(file)
