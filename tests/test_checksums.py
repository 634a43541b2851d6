"""Sums of parts combine to the sum of the whole, against zlib's own sum of the whole."""

from __future__ import annotations

import random
import zlib

from eagle3.checksums import combine, combine_all


def test_two_parts_of_any_length() -> None:
    source = random.Random(0)
    for _ in range(50):
        data = source.randbytes(source.randrange(1, 5000))
        cut = source.randrange(len(data) + 1)
        assert combine(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut) == zlib.crc32(data)


def test_many_parts_and_none() -> None:
    data = random.Random(1).randbytes(1000)
    parts = [data[i : i + 37] for i in range(0, len(data), 37)]
    assert combine_all((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(data)
    assert combine_all([]) == zlib.crc32(b"") == 0
