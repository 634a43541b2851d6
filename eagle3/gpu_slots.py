"""Which GPUs of this machine a job may use while others run beside it (beside the walk).

Jobs of a parallel sweep share a machine without a word to each other. Each takes a lock on the GPUs that it was given
(CUDA_VISIBLE_DEVICES, as a scheduler sets it) or else on any of the machine; the kernel drops it when the job dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from eagle3.errors import RequestError

POLL_S = 1.0
# The driver has an entry here for each GPU; the container runtimes show those that they pass on in /dev.
DEVICES = Path("/dev")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    found = [path.name.removeprefix("nvidia") for path in DEVICES.glob("nvidia[0-9]*")]
    # CUDA numbers what it sees from 0, whatever the device files are called.
    return [str(number) for number in range(len(found))]


@contextmanager
def gpu_slots(count: int) -> Iterator[dict[str, str]]:
    """Waits for `count` free GPUs and holds them; yields the environment in which a child sees only them.

    RequestError when there are fewer than that altogether. Nothing is changed for a job that needs none.
    """
    gpus = visible_gpus() if count else []
    if count > len(gpus):
        raise RequestError(
            f"hardware: a job of this sweep needs {count} GPUs, this machine has {len(gpus)} for it"
            f"{' (' + VARIABLE + ')' if VARIABLE in os.environ else ''}; try hardware.devices={max(len(gpus), 1)}"
        )
    with ExitStack() as held:
        taken = _take(gpus, count, held)
        yield {**os.environ, **({VARIABLE: ",".join(taken)} if count else {})}


def _take(gpus: Sequence[str], count: int, held: ExitStack) -> list[str]:
    """All `count` at once or none, so that two jobs never wait for each other's."""
    while count:
        with ExitStack() as attempt:
            taken: list[str] = []
            for gpu in gpus:
                if len(taken) < count and _locked(gpu, attempt):
                    taken.append(gpu)
            if len(taken) == count:
                held.push(attempt.pop_all())
                return taken
        time.sleep(POLL_S)
    return []


def _locked(gpu: str, attempt: ExitStack) -> bool:
    folder = Path(tempfile.gettempdir()) / f"eagle3-gpus-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    handle = os.open(folder / f"{gpu.replace(os.sep, '-')}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    attempt.callback(os.close, handle)
    return True
