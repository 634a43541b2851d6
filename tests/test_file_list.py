"""An artifact's files as its manifest lists them."""

from __future__ import annotations

import zlib
from pathlib import Path

from eagle3.file_list import CHUNK_BYTES, file_crc32, find_faults, list_files


def test_files_at_the_top_are_listed_and_held_against_the_list(tmp_path: Path) -> None:
    data = bytes(range(256)) * (CHUNK_BYTES // 256) + b"more than a chunk"
    for name in ("b.bin", "manifest.json", "README.md"):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "a.bin").touch()
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "c.bin").write_bytes(data)
    listed = list_files(tmp_path)
    assert listed == {"a.bin": {"bytes": 0, "crc32": 0}, "b.bin": {"bytes": len(data), "crc32": zlib.crc32(data)}}
    assert find_faults(tmp_path, listed, contents=True) == []

    path = tmp_path / "b.bin"
    path.write_bytes(data[:-1] + b"!")
    assert find_faults(tmp_path, listed, contents=False) == []
    found, expected = f"{file_crc32(path):08x}", f"{zlib.crc32(data):08x}"
    damaged = f"{path}: is damaged: found crc32 {found}, expected {expected}"
    assert find_faults(tmp_path, listed, contents=True) == [damaged]
    path.write_bytes(data[:-1])
    (tmp_path / "a.bin").unlink()
    assert find_faults(tmp_path, listed, contents=False) == [
        f"{tmp_path / 'a.bin'}: is absent, expected 0 bytes",
        f"{path}: found {len(data) - 1} bytes, expected {len(data)}",
    ]
