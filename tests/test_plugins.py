"""Third parties: a distribution with an entry point brings config groups and adapters; a broken one is named."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests.commands import eagle3

ADAPTER = """
    from eagle3.adapters.llama import LlamaAdapter

    class OtherAdapter(LlamaAdapter):
        name = "other"
        architectures = ("OtherForCausalLM",)
    """
MODEL = """
    # Another family.
    defaults: [llama, _self_]
    name: other
    path: /models/other
    adapter:
      _target_: other_family.adapters.other.OtherAdapter
    """


def install(site: Path, distribution: str, package: str, files: dict[str, str]) -> None:
    """What an installer leaves in site-packages: the package's files and its metadata with the entry point."""
    for name, text in files.items():
        path = site / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    info = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[eagle3.plugins]\n{package} = {package}\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    files = {"__init__.py": "", "adapters/__init__.py": "", "adapters/other.py": ADAPTER}
    install(tmp_path / "site", "other-family", "other_family", {**files, "conf/model/other.yaml": MODEL})
    return tmp_path / "site"


def env(site: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **more}


def test_a_plugin_brings_a_model_that_composes_completes_and_is_listed(site: Path, tmp_path: Path) -> None:
    done = eagle3("model=other", "--cfg", "job", cwd=tmp_path, env=env(site))
    assert done.returncode == 0, done.stderr
    assert "_target_: other_family.adapters.other.OtherAdapter" in done.stdout
    assert done.stderr == ""
    assert "pkg://other_family.conf" in eagle3("--info", "searchpath", cwd=tmp_path, env=env(site)).stdout
    line = "eagle3 model=ot"
    found = eagle3("-sc", "query=bash", cwd=tmp_path, env=env(site, COMP_LINE=line, COMP_POINT=str(len(line))))
    assert found.stdout.split() == ["model=other"]


def test_a_plugin_is_used_recorded_and_repeated(site: Path, tmp_path: Path) -> None:
    """The run names the plugin's version, and repeats from its folder with the plugin's group in it."""
    (tmp_path / "outputs").mkdir()
    done = eagle3("model=other", "stage=runs", cwd=tmp_path, env=env(site))
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "runs").glob("*/*")
    assert '"other-family": "1.2"' in (folder / "provenance.json").read_text()
    again = eagle3("-cp", str(folder), cwd=tmp_path, env=env(site))
    assert again.returncode == 0, again.stderr


def test_a_broken_plugin_is_named_with_its_cause_and_left_out(site: Path, tmp_path: Path) -> None:
    install(site, "broken-thing", "broken_thing", {"__init__.py": "import no_such_module\n"})
    done = eagle3("model=other", "--cfg", "job", cwd=tmp_path, env=env(site))
    assert done.returncode == 0
    assert "name: other" in done.stdout
    for part in ("broken-thing 1.2", "broken_thing", "ModuleNotFoundError: No module named 'no_such_module'"):
        assert part in done.stderr


def test_a_clash_is_told_and_ours_stays(site: Path, tmp_path: Path) -> None:
    clash = {"__init__.py": "", "conf/model/llama.yaml": "name: hijacked\n", "conf/model/other.yaml": "name: third\n"}
    install(site, "zz-clash", "zz_clash", clash)
    done = eagle3("model=llama", "--cfg", "job", cwd=tmp_path, env=env(site))
    assert "name: llama" in done.stdout
    assert "zz-clash 1.2 brings model/llama.yaml, which eagle3 has already: theirs is hidden" in done.stderr
    assert "zz-clash 1.2 brings model/other.yaml, which other-family 1.2 has already" in done.stderr


def test_adapters_of_plugins_are_families(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3 import plugins
    from eagle3.adapter import families

    monkeypatch.syspath_prepend(str(site))
    plugins.installed.cache_clear()
    try:
        assert [package.__name__ for package in plugins.adapter_packages()] == ["other_family.adapters"]
        assert families()["other"].architectures == ("OtherForCausalLM",)
        assert "llama" in families()
    finally:
        plugins.installed.cache_clear()
