"""The processes of a sweep: one child `python -m eagle3 ...` for each job, in the job's own folder (beside the walk).

A child frees GPU memory, engines and trackers when its job ends, and takes nothing else down when it dies.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.artifacts import write_json
from eagle3.config import Config
from eagle3.errors import StageFailed
from eagle3.gpu_slots import gpu_slots
from eagle3.overrides import quoted
from eagle3.records import read_json

if TYPE_CHECKING:
    from hydra.conf import HydraConf


def child_command(settings: HydraConf, overrides: Sequence[str]) -> list[str]:
    """A job's command line: the config sources of the sweep (`settings` is its `hydra` node), then plain overrides."""
    command = [sys.executable, "-m", "eagle3", "--config-name", str(settings.job.config_name)]
    for source in settings.runtime.config_sources:
        if source.provider == "command-line":
            command += ["--config-dir", source.path]
        elif source.provider == "main" and source.schema == "file":
            command += ["--config-path", source.path]
    search = [o for o in settings.overrides.hydra if o.lstrip("+").startswith("hydra.searchpath")]
    return [*command, *search, *overrides]


def run_job(settings: HydraConf, overrides: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Runs a job in a child process, with `folder` as its run folder, unless it is done.

    What it prints goes to console.log there. One that dies without a result gets one that says so.
    """
    if is_done(folder):
        return
    _set_aside(folder)
    folder.mkdir(parents=True)
    printed = folder / "console.log"
    with open(printed, "wb") as output:
        command = child_command(settings, [*overrides, f"hydra.run.dir={quoted(folder)}"])
        code = wait(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
    if code and not (folder / "result.json").exists():
        # It ended before it could open its run, or by a signal that it cannot catch.
        lines = printed.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        fault = (
            last.removeprefix("eagle3: ") if code == 2 else f"the process ended with code {code}; its last line: {last}"
        )
        status = "refused" if code == 2 else "failed"
        write_json(folder / "result.json", {"status": status, "exit_code": code, "error": fault, "metrics": {}})


def run_foreign_job(settings: HydraConf, overrides: Sequence[str], cfg: Config) -> None:
    """A job of a sweep under another launcher than ours; StageFailed when it fails.

    Where this machine has GPUs that other jobs could take as well, it gets its own.
    """
    folder = Path(settings.runtime.output_dir)
    hardware = cfg.hardware
    engines = hardware.data_parallel_size * hardware.tensor_parallel_size
    wanted = max(hardware.devices, engines) if hardware.accelerator == "gpu" else 0
    with gpu_slots(wanted) as env:
        run_job(settings, overrides, folder, env)
    if not ended_well(folder):
        raise StageFailed(f"{folder}: {read_json(folder / 'result.json').get('error', 'the job left no result')}")


def is_done(folder: Path) -> bool:
    """Whether a job has nothing left to do; a dry run is made again, since it did nothing."""
    return read_json(folder / "result.json").get("status") == "done"


def ended_well(folder: Path) -> bool:
    """Whether a job has ended well, by a dry run too."""
    return read_json(folder / "result.json").get("status") in ("done", "dry run")


def _set_aside(folder: Path) -> None:
    """Renames what an earlier, unfinished attempt left: a run folder is never used twice. A dry run's goes."""
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
    elif ended_well(folder):
        shutil.rmtree(folder)
    elif folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.attempt-{number}")).exists():
            number += 1
        folder.rename(aside)


def wait(command: Sequence[str], **options: Any) -> int:
    """Runs a child to its end; when this process is told to stop, the child is stopped first."""
    child = subprocess.Popen(command, **options)
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
