"""What an artifact's manifest says of its files: sizes and checksums (beside the walk).

A size costs one look, so it is looked at whenever an artifact is about to be used; contents are read by `stage=verify`.
Only files at the top of an artifact are listed. Folders in it, the shards of states and the checkpoints of a training,
have sizes and checksums of their own, and may be worth deleting.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A manifest cannot hold its own checksum, people write into a model card, and which samples make up which shard stands
# in the shards too.
UNLISTED = ("manifest.json", "README.md", "plan.json")
CHUNK_BYTES = 1 << 22


def list_files(folder: Path) -> dict[str, dict[str, int]]:
    """`bytes` and `crc32` of each file at the top of a folder, by its name; not of what a killed write left."""
    found = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    paths = sorted(path for path in found if path.name not in UNLISTED)
    return {path.name: {"bytes": path.stat().st_size, "crc32": file_crc32(path)} for path in paths}


def find_faults(folder: Path, listed: Mapping[str, Mapping[str, Any]], contents: bool) -> list[str]:
    """What is wrong with the listed files: absent, of another size, or (if asked) of other contents."""
    faults = []
    for name, facts in listed.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path}: is absent, expected {facts['bytes']} bytes")
        elif (found := path.stat().st_size) != facts["bytes"]:
            faults.append(f"{path}: found {found} bytes, expected {facts['bytes']}")
        elif contents and (crc32 := file_crc32(path)) != facts["crc32"]:
            faults.append(f"{path}: is damaged: found crc32 {crc32:08x}, expected {facts['crc32']:08x}")
    return faults


def file_crc32(path: Path) -> int:
    """The crc32 of a whole file."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return total
