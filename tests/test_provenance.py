"""What a run says about its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle3 import provenance

# Answers as the driver's tool does: the GPUs asked for with --id, all of the machine without it.
NVIDIA_SMI = """#!/bin/sh
for word; do case "$word" in --id=*) wanted="${word#--id=}";; esac; done
for index in $(echo "${wanted:-0,1,2}" | tr , ' '); do
  echo "NVIDIA H200, GPU-$index$index, 143771 MiB, 580.10"
done
"""


def test_a_run_names_the_gpus_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs side by side on one machine have GPUs of their own, and their provenance tells which."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    every = provenance.gpus()
    assert [gpu["uuid"] for gpu in every] == ["GPU-00", "GPU-11", "GPU-22"]
    assert every[0] == {"name": "NVIDIA H200", "uuid": "GPU-00", "memory": "143771 MiB", "driver": "580.10"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert [gpu["uuid"] for gpu in provenance.gpus()] == ["GPU-22"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert provenance.gpus() == []
