"""A full disk is known as one whatever library met it."""

from __future__ import annotations

import errno
import os

import pytest
from safetensors import SafetensorError

from eagle3.errors import disk_full


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), False),
        # The words of safetensors 0.8 on a full tmpfs.
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"), False),
        (ValueError("28"), False),
    ],
)
def test_a_full_disk_is_told_from_other_faults(error: Exception, full: bool) -> None:
    assert disk_full(error) is full
