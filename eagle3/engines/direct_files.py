"""Files that are written past the page cache where that is possible (step 4 of the walk).

States are written once, in megabytes, and read much later. Going through the page cache copies them once more and
leaves it to the kernel when the disk gets to work; direct writes from several threads keep a disk at its own rate. They
need addresses, offsets and lengths that are multiples of the disk's sectors; what is not is written through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

SECTOR_BYTES = 512


def page_memory(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor whose memory begins at a page."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size].view(dtype).view(shape)


def open_for_rows(path: str | Path, row_bytes: int) -> int:
    """A descriptor to write rows of this size with, direct where they are whole sectors and the file system can."""
    if row_bytes % SECTOR_BYTES == 0:
        try:
            return os.open(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, os.O_WRONLY)


def is_direct(file: int) -> bool:
    """Whether writes go past the page cache."""
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`; a file that refuses this as a direct write is buffered from then on."""
    while data:
        direct = is_direct(file)  # before: another thread may turn it off in between
        try:
            written = os.pwrite(file, data, offset)
        except OSError as error:
            # EFAULT: memory that a device driver has pinned may be out of a disk's reach.
            if error.errno not in (errno.EINVAL, errno.EFAULT) or not direct:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
            continue
        data, offset = data[written:], offset + written
