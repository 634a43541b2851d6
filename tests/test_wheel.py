"""The wheel: nothing but eagle3 at its top level, every module and YAML file inside, and it works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, since setuptools would take stale files out of an old build/ folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("eagle3", "adapters", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_top_level_holds_only_eagle3(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top.split("-")[0] for top in tops} == {"eagle3"}
    assert len(tops) == 2


def test_every_module_and_config_file_is_inside(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (("eagle3", "eagle3"), ("adapters", "eagle3/adapters"), ("conf", "eagle3/conf")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml") or path.name == "py.typed":
                assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in inside, (
                    f"{path} is not in the wheel"
                )


def test_it_composes_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """The installed package is used, not the checkout: the interface and `python -m eagle3` work anywhere."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = [
        sys.executable,
        "-c",
        "import eagle3.adapters, eagle3.conf; print(eagle3.__file__, eagle3.conf.__path__[0])",
    ]
    found = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(site / "eagle3" / "__init__.py"), str(site / "eagle3" / "conf")]
    command = [
        sys.executable,
        "-m",
        "eagle3",
        "model=kimi_k25",
        "hardware=rtx_pro_6000_x8",
        "--cfg",
        "job",
        "--resolve",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "moonshotai/Kimi-K2.5" in done.stdout


def test_the_console_script_is_declared(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "eagle3 = eagle3.cli:main" in archive.read(entry_points).decode()
