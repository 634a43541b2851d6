"""The exception types and the exit code that each stands for.

A message starts with the config path or the file, says what was found and what was expected, and ends with the next
command to try. `cli` maps a type to its exit code, and nothing else does.
"""

from __future__ import annotations

import errno


class Eagle3Error(Exception):
    """Something failed while running (exit 1)."""

    exit_code = 1


class RequestError(Eagle3Error):
    """The request is wrong: a config value, a missing or broken input, an unknown layer (exit 2)."""

    exit_code = 2


class AbsentError(RequestError):
    """What a request leads to has not been made yet (exit 2)."""


class StageFailed(Eagle3Error):
    """A stage ran and did not reach its goal: too many lost samples, a check that did not hold (exit 1)."""


class StoreError(Eagle3Error):
    """An artifact on disk is not what its manifest says (exit 1)."""


class EngineError(Eagle3Error):
    """The target's engine failed; carries the engine's own words (exit 1)."""


def disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of room, on the disk or in the user's quota."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in codes
    return any(f"(os error {code})" in str(error) for code in codes)  # as libraries in Rust say it, such as safetensors
