"""Room on a disk: asked for before long work, and told, with the folder, where a write finds none (beside the walk)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.errors import Eagle3Error, RequestError, StageFailed, disk_full
from eagle3.progress import size_text

ADVICE = "make room (`eagle3 stage=gc` lists what can go) or set output_dir= to another disk"


def free_bytes(folder: Path) -> int:
    """What is free on the disk where `folder` lies or will lie."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def check_room(folder: Path, needed: int, what: str, advice: str = ADVICE) -> None:
    """RequestError when `folder`'s disk has less room than the bytes that `what` will need there."""
    if (free := free_bytes(folder)) < needed:
        raise RequestError(f"{folder}: {what} will need {size_text(needed)}, but {size_text(free)} are free; {advice}")


@contextmanager
def writing(folder: Path, what: str, advice: str = ADVICE) -> Iterator[None]:
    """Around a write of `what` below `folder`: StageFailed, with what is free there, when the disk is full.

    Libraries may say something else about it: torch's own words only name two positions in a file.
    """
    try:
        yield
    except Eagle3Error:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not disk_full(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise StageFailed(
            f"{folder}: the disk is full, {what} could not be written ({size_text(free_bytes(folder))} are free); "
            f"{advice}, then run the same command again: what is complete is kept"
        ) from error
