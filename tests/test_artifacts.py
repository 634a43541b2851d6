"""Artifacts are complete or absent, found by what determines them, and made by one process at a time."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle3.artifacts import Artifact, Artifacts, artifact_id, canonical, write_json
from eagle3.errors import RequestError, StoreError


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path / "artifacts")


def made(artifacts: Artifacts, kind: str = "prepared", identity: dict | None = None) -> Artifact:
    artifact = artifacts.of(kind, identity or {"a": 1})
    (artifacts.begin(artifact) / "data.bin").write_bytes(b"x" * 10)
    artifacts.commit(artifact, {"metrics": {"samples": 3}})
    return artifact


def test_an_id_depends_on_content_and_not_on_order() -> None:
    """D13: a changed length, template or tokenizer is another artifact; an unchanged one is a hit."""
    first = artifact_id("prepared", {"max_length": 10, "template": "t", "ids": (1, 2)})
    assert first == artifact_id("prepared", {"ids": [1, 2], "template": "t", "max_length": 10})
    assert len(first) == 16
    assert first != artifact_id("states", {"max_length": 10, "template": "t", "ids": [1, 2]})
    assert first != artifact_id("prepared", {"max_length": 11, "template": "t", "ids": [1, 2]})
    assert first != artifact_id("prepared", {"max_length": 10.5, "template": "t", "ids": [1, 2]})


def test_an_identity_is_plain() -> None:
    @dataclass
    class Part:
        x: int

    assert canonical({"b": Part(1), "a": None}) == '{"a":null,"b":{"x":1}}'
    with pytest.raises(TypeError, match="Path is no plain value"):
        canonical({"path": Path("x")})
    with pytest.raises(ValueError, match="JSON"):
        canonical({"x": float("nan")})


def test_an_artifact_is_absent_until_its_commit(artifacts: Artifacts) -> None:
    artifact = artifacts.of("prepared", {"a": 1})
    folder = artifacts.begin(artifact)
    assert folder == artifact.partial
    (folder / "data.bin").write_bytes(b"x")
    assert not artifact.complete
    with pytest.raises(StoreError, match="not complete"):
        artifact.manifest()
    artifacts.context["made_from"] = ["a/b"]
    artifacts.commit(artifact, {"metrics": {"samples": 3}})
    assert artifact.complete
    assert not artifact.partial.exists()
    manifest = artifact.manifest()
    assert manifest["kind"] == "prepared"
    assert manifest["id"] == artifact.id
    assert manifest["identity"] == {"a": 1}
    assert manifest["made_from"] == ["a/b"]
    assert manifest["metrics"] == {"samples": 3}
    assert [p.name for p in artifact.folder.parent.iterdir()] == [artifact.id]


def test_begin_empties_what_is_left_unless_it_resumes(artifacts: Artifacts) -> None:
    artifact = artifacts.of("states", {"a": 1})
    (artifacts.begin(artifact) / "shard").touch()
    artifacts.release(artifact)
    assert (artifacts.begin(artifact, resume=True) / "shard").exists()
    artifacts.release(artifact)
    assert not (artifacts.begin(artifact) / "shard").exists()


def test_begin_refuses_a_folder_that_nobody_can_use(artifacts: Artifacts) -> None:
    artifact = made(artifacts)
    with pytest.raises(RequestError, match="completed it meanwhile"):
        artifacts.begin(artifact)
    (artifact.folder / "manifest.json").unlink()
    with pytest.raises(RequestError, match="without a manifest"):
        artifacts.begin(artifact)


def test_amend_replaces_the_manifest(artifacts: Artifacts) -> None:
    artifact = made(artifacts, "states")
    artifacts.amend(artifact, {**artifact.manifest(), "layer_ids": [1, 2]})
    assert artifact.manifest()["layer_ids"] == [1, 2]
    assert artifact.manifest()["metrics"] == {"samples": 3}


def test_a_broken_manifest_is_named(artifacts: Artifacts) -> None:
    artifact = made(artifacts)
    for text in ('{"kind": "prep', "[1]"):
        (artifact.folder / "manifest.json").write_text(text)
        with pytest.raises(StoreError, match=str(artifact.folder)):
            artifact.manifest()
        with pytest.raises(RequestError, match=str(artifact.folder)):
            artifacts.resolve("prepared", None, lambda: artifact, "eagle3 stage=prepare")


def test_resolve_takes_lineage_an_id_or_a_folder(artifacts: Artifacts) -> None:
    first, second = made(artifacts), made(artifacts, identity={"a": 2})
    assert artifacts.resolve("prepared", None, lambda: first, "make it") == first
    assert artifacts.resolve("prepared", second.id, lambda: first, "make it").folder == second.folder
    link = artifacts.root.parent / "prepared"
    link.symlink_to(second.folder)
    for given in (second.folder, link):
        found = artifacts.resolve("prepared", str(given), lambda: first, "make it")
        assert (found.id, found.folder) == (second.id, second.folder)


def test_the_beginning_of_an_id_is_enough_when_only_one_fits(artifacts: Artifacts) -> None:
    first, second = made(artifacts), made(artifacts, identity={"a": 2})
    artifacts.begin(artifacts.of("prepared", {"a": 3}))
    for given in (first.id[:8], f"prepared/{first.id[:8]}"):  # the latter as stage=runs lists them
        assert artifacts.resolve("prepared", given, lambda: second, "make it").folder == first.folder
    for name in ("zz1", "zz2"):
        (artifacts.root / "prepared" / name).mkdir()
    with pytest.raises(RequestError, match=r"inputs\.prepared=zz: found nothing"):
        artifacts.resolve("prepared", "zz", lambda: second, "make it")


def test_resolve_names_the_command_that_makes_what_is_missing(artifacts: Artifacts, tmp_path: Path) -> None:
    absent = artifacts.of("prepared", {"a": 3})
    with pytest.raises(RequestError, match=r"prepared: found nothing at .*; run `eagle3 stage=prepare`"):
        artifacts.resolve("prepared", None, lambda: absent, "eagle3 stage=prepare")
    artifacts.begin(absent)
    with pytest.raises(RequestError, match=r"is half-written.*; run `eagle3 stage=prepare` with the same settings to"):
        artifacts.resolve("prepared", None, lambda: absent, "eagle3 stage=prepare")
    with pytest.raises(RequestError, match=r"inputs\.prepared=1234: found nothing"):
        artifacts.resolve("prepared", "1234", lambda: absent, "eagle3 stage=prepare")
    states = made(artifacts, "states")
    with pytest.raises(RequestError, match="holds a states artifact, expected prepared"):
        artifacts.resolve("prepared", str(states.folder), lambda: absent, "eagle3 stage=prepare")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="a folder without a manifest"):
        artifacts.resolve("prepared", str(tmp_path / "empty"), lambda: absent, "eagle3 stage=prepare")


HOLD = """
import sys
from pathlib import Path
from eagle3.artifacts import Artifacts
artifacts = Artifacts(Path(sys.argv[1]))
artifacts.begin(artifacts.of("states", {"a": 1}), resume=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_dead_one_makes_way(artifacts: Artifacts) -> None:
    artifact = artifacts.of("states", {"a": 1})
    command = [sys.executable, "-c", HOLD, str(artifacts.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RequestError, match=f"is being made by process {holder.pid}"):
            artifacts.begin(artifact, resume=True)
        with pytest.raises(RequestError, match=f"process {holder.pid}"), artifacts.lock(artifact):
            pass
        holder.kill()
        holder.wait()
        assert artifacts.begin(artifact, resume=True) == artifact.partial
        artifacts.close()
        with artifacts.lock(artifact):
            assert artifact.folder.with_name(f"{artifact.id}.lock").read_text().startswith(f"process {os.getpid()}")


MAKE = """
import sys, time
from pathlib import Path
from eagle3.artifacts import Artifacts
artifacts = Artifacts(Path(sys.argv[1]))
artifact = artifacts.of("states", {"a": 1})
assert artifacts.claim(artifact)
artifacts.begin(artifact)
print("held", flush=True)
if sys.stdin.read() == "commit":
    artifacts.commit(artifact, {"of": 1})
"""


@pytest.mark.parametrize("end", ["commit", "die"])
def test_a_second_maker_waits_for_the_first_and_uses_what_it_made(
    end: str, artifacts: Artifacts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real processes: jobs side by side that need the same drafter."""
    monkeypatch.setattr("eagle3.artifacts.POLL_S", 0.05)
    artifact = artifacts.of("states", {"a": 1})
    command = [sys.executable, "-c", MAKE, str(artifacts.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        assert maker.stdout.readline() == "held\n"
        threading.Timer(0.3, lambda: (maker.stdin.write(end), maker.stdin.close())).start()
        with caplog.at_level(logging.INFO, "eagle3"):
            mine = artifacts.claim(artifact)
        host = socket.gethostname()
        assert [record.getMessage() for record in caplog.records] == [
            f"{artifact.partial}: is being made by process {maker.pid} on {host}; waiting for it"
        ]
    if end == "commit":
        assert not mine
        assert artifact.manifest()["of"] == 1
    else:
        assert mine
        assert artifacts.begin(artifact, resume=True) == artifact.partial
    artifacts.close()


def test_a_helper_rank_locks_and_writes_nothing(artifacts: Artifacts) -> None:
    """C4: only rank 0 makes folders."""
    helper = Artifacts(artifacts.root, attached=True)
    artifact = helper.of("drafter", {"a": 1})
    assert helper.begin(artifact) == artifact.partial
    helper.commit(artifact, {})
    helper.amend(artifact, {})
    assert not artifacts.root.exists()


def test_write_json_replaces_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": [1, "é"]})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]
