"""Every command of the README runs: the same words, on a tiny model of the demo model's depth and a few prompts."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3 import cli
from tests.conftest import write_target
from tests.test_pipeline import chats

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """The lines of the README's bash blocks, continued lines joined and comments removed."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_target(tmp_path / "model", num_hidden_layers=30)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = [
        *("model=llama", f"model.path={target}", "dataset=jsonl", "hardware=cpu"),
        f"dataset.sources.train.path={chats(tmp_path / 'train.jsonl', 12)}",
        f"+dataset.sources.asked={{path: {chats(tmp_path / 'asked.jsonl', 3, first=50)}, role: heldout}}",
        *(
            "dataset.max_length=512",
            "dataset.max_new_tokens=8",
            "dataset.validation_samples=2",
            "drafter.draft_vocab_size=300",
        ),
        *("trainer.max_steps=2", "trainer.batch_tokens=256", "evaluate.sets=[heldout]", "evaluate.prompts_per_set=2"),
        "evaluate.max_new_tokens=8",
    ]
    replaced = {word.split("=")[0].lstrip("+") for word in small}
    seen = []
    for command in commands():
        program, *words = shlex.split(command)
        if program == "make":
            subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
        elif program == "pip":
            # The test machine was set up with it; here only that it still installs, without its dependencies.
            where = ["--target", str(tmp_path / "site"), "--no-deps", "--no-build-isolation", "--quiet"]
            install = [sys.executable, "-m", "pip", "install", *where, str(ROOT)]
            if "-e" not in words:
                subprocess.run(install, check=True)
        else:
            assert program == "eagle3"
            own = [word for word in words if word.split("=")[0] not in replaced]
            bare = {"--help", "stage=runs"} & set(own)
            monkeypatch.setattr(sys, "argv", ["eagle3", *own, *([] if bare else small)])
            # Hydra leaves by SystemExit behind what it only prints.
            try:
                code = cli.command()
            except SystemExit as left:
                code = left.code or 0
            assert code == 0, command
        seen.append(program)
    assert seen.count("make") == 2
    assert seen.count("eagle3") >= 12
    sweeps = list(Path("outputs/sweeps").glob("*/index.json"))
    assert len(sweeps) == 2
    assert all(len(json.loads(index.read_text(encoding="utf-8"))) == 2 for index in sweeps)


def test_the_first_screen_names_its_two_commands() -> None:
    first = README[: README.index("## ")]
    assert "make demo" in first
    assert "make test" in first
    assert not re.search(r"@[A-Z_]+@", README)
