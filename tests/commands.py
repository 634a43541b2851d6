"""The command `eagle3` as tests call it, and small stages that fail, wait or report as real ones rarely do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

STAGES = {
    "echo": """
        from eagle3.runs import config_hash

        def run(cfg, run):
            run.log.info("layers %s", cfg.layers.name)
            run.record({"value": 1.5}, step=1)
            return {"loss": 0.5, "layers": cfg.layers.name, "also": cfg.layers.also, "hash": config_hash(cfg)}
        """,
    "boom": """
        def run(cfg, run):
            if cfg.layers.name in ("eagle", "early"):
                try:
                    raise ValueError("the inner cause")
                except ValueError as error:
                    raise RuntimeError from error
            return {"loss": 0.25}
        """,
    "slow": """
        import time

        def run(cfg, run):
            (run.folder / "waiting").touch()
            time.sleep(600)
        """,
    "polite": """
        import sys, time

        def run(cfg, run):
            # What Lightning's Trainer makes of a signal.
            try:
                (run.folder / "waiting").touch()
                time.sleep(600)
            except KeyboardInterrupt:
                sys.exit(1)
        """,
    "full": """
        import errno, os

        def run(cfg, run):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        """,
    "leaves": """
        import sys

        def run(cfg, run):
            sys.exit(0)
        """,
    "once": """
        from pathlib import Path

        def run(cfg, run):
            marker = Path(cfg.output_dir) / f"tried-{cfg.layers.name}"
            if cfg.layers.name == "late" and not marker.exists():
                marker.touch()
                raise RuntimeError("not yet")
            with open(Path(cfg.output_dir) / "worked.txt", "a") as file:
                file.write(cfg.layers.name + "\\n")
            return {}
        """,
    "ranks": """
        import os, subprocess, sys
        import __main__
        from hydra.core.hydra_config import HydraConfig
        from eagle3.runs import config_hash

        def run(cfg, run):
            (run.folder / f"seen-by-{run.rank}").write_text(f"{run.folder} {config_hash(cfg)}")
            if run.rank == 0:
                # What Lightning's launcher does to start the other ranks; inside Hydra's run it would add overrides.
                assert not HydraConfig.initialized()
                command = [sys.executable, "-m", __main__.__spec__.name, *sys.argv[1:]]
                subprocess.run(command, env={**os.environ, "LOCAL_RANK": "1"}, check=True)
            return {}
        """,
}


def write_stages(folder: Path) -> dict[str, str]:
    """Writes the stages above into `folder`; returns the environment in which every Python process has them."""
    import textwrap

    stages = folder / "more_stages"
    stages.mkdir()
    for name, text in STAGES.items():
        (stages / f"{name}.py").write_text(textwrap.dedent(text))
    (folder / "sitecustomize.py").write_text(f"import eagle3.stages\neagle3.stages.__path__.append({str(stages)!r})\n")
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def start(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts `python -m eagle3 ARGUMENTS` in `cwd`."""
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3", *arguments],
        cwd=cwd,
        env=env or {**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def eagle3(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout_s: float = 250
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m eagle3 ARGUMENTS` in `cwd` to its end."""
    process = start(*arguments, cwd=cwd, env=env)
    out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


KILLED = """
import importlib, os, signal, sys
module, name, method, calls = sys.argv.pop(1).split(":")
owner, left = getattr(importlib.import_module(module), name), int(calls)
whole = getattr(owner, method)

def killed(*given):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given)

setattr(owner, method, killed)
from eagle3.cli import main
main()
"""


def killed(*arguments: str, at: str, cwd: Path) -> None:
    """Runs eagle3 ARGUMENTS until SIGKILL: `at` is "module:class:method:n", its n-th call. Who waits from outside for a
    moment in the middle may be too late on a busy machine.
    """
    command = [sys.executable, "-c", KILLED, at, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
