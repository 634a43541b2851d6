"""The crc32 of a whole from the crc32 of its parts, so that ranks can sum what each of them wrote (step 4 of the walk).

zlib offers this in C (`crc32_combine`) and Python's zlib does not. A crc is a polynomial over GF(2) modulo
x^32 + x^26 + …; appending n bytes multiplies it by x^(8 n).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, second_bytes: int) -> int:
    """crc32(a + b) from first = crc32(a), second = crc32(b) and the length of b."""
    return _multiply(_shift(second_bytes), first) ^ second


def combine_all(parts: Iterable[tuple[int, int]]) -> int:
    """The crc32 of parts one after another, each given as (crc32, bytes)."""
    total = 0
    for crc, size in parts:
        # Behind a crc of nothing or of zero, which is the usual case of one part, there is nothing to shift.
        total = combine(total, crc, size) if total else crc
    return total


@cache
def _shift(size: int) -> int:
    """x^(8 size) modulo the polynomial; bit-reversed, as crc32 keeps its coefficients."""
    power, square, exponent = 1 << 31, 1 << 30, 8 * size  # x^0 and x^1
    while exponent:
        if exponent & 1:
            power = _multiply(square, power)
        square, exponent = _multiply(square, square), exponent >> 1
    return power


def _multiply(a: int, b: int) -> int:
    """a times b modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
    return product
