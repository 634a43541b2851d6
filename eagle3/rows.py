"""Step 1 of the walk, its first half: the rows of a JSONL, JSON or parquet file, or of a Hugging Face data set.

Rows are streamed, so that taking 300 rows of a file of gigabytes costs 300 rows. What cannot be read is handed on as a
`BadRow` that says where it stands; the caller counts it or stops.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eagle3.errors import RequestError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")
_CHUNK = 1 << 18
_DAMAGED = (EOFError, OSError, zlib.error)


@dataclass(frozen=True)
class Row:
    """One row: its number in the file (from 0, bad rows included) and its value as JSON would give it."""

    index: int
    value: Any


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read. `reason` is one of a few phrases to count by; `where` points into the file."""

    index: int
    reason: str
    where: str


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """Streams the rows of a file; its suffix says what it is, `.gz` after it that it is compressed.

    A `.json` file holds one array of rows, or rows one after the other. Raises RequestError for a missing file, another
    suffix, or a parquet file that cannot be opened.
    """
    if not path.is_file():
        raise RequestError(f"{path}: no such file; expected a file of rows ({', '.join(SUFFIXES)})")
    kind = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if kind is None:
        raise RequestError(f"{path}: found the suffix '{path.suffix}', expected one of {', '.join(SUFFIXES)}")
    if kind == ".parquet":
        yield from _parquet(path)
        return
    try:
        with gzip.open(path) if kind.endswith(".gz") else path.open("rb") as file:
            yield from _values(file) if kind.startswith(".json") and "jsonl" not in kind else _lines(file)
    except PermissionError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); change its permissions") from error


def _lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[Row | BadRow]:
    """One JSON value a line; a broken line costs that line only."""
    index, number = 0, 0
    while True:
        try:
            line = file.readline()
        except _DAMAGED as error:
            yield BadRow(index, "file cut off or damaged", f"line {number + 1} ({error})")
            return
        if not line:
            return
        number += 1
        if not line.strip():
            continue
        try:
            yield Row(index, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
        except UnicodeDecodeError as error:
            yield BadRow(index, "not UTF-8", f"line {number}, byte {error.start}")
        except (ValueError, RecursionError) as error:
            reason = "broken JSON" if line.endswith(b"\n") else "file cut off or damaged"
            yield BadRow(index, reason, f"line {number} ({error})")
        index += 1


class _Characters:
    """The text of a file in chunks; `text` holds what is read and not yet consumed, `line` counts from 1."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.line, self.ended = "", 1, False
        self.chunk = _CHUNK

    def consume(self, count: int) -> None:
        """Drops the first `count` characters."""
        self.line += self.text.count("\n", 0, count)
        self.text = self.text[count:]

    def more(self) -> None:
        """Reads on; twice as much each time in a row, so that a huge record is not parsed over and over."""
        data = self.file.read(self.chunk)
        self.chunk *= 2
        self.ended = not data
        self.text += self.decoder.decode(data, final=self.ended)


def _values(file: IO[bytes] | gzip.GzipFile) -> Iterator[Row | BadRow]:
    """The values of one array, or of values one after the other. Nothing can be read behind a broken one."""
    source, decoder = _Characters(file), json.JSONDecoder()
    index, array = 0, None
    position = 0

    def bad(reason: str, detail: object = "") -> BadRow:
        line = source.line + source.text.count("\n", 0, position)
        return BadRow(index, reason, f"line {line}, record {index + 1}" + (f" ({detail})" if detail else ""))

    while True:
        position = _skip(source.text, position, " \t\r\n" if array is None else " \t\r\n,")
        if position < len(source.text):
            if array is None:
                array = source.text[position] == "["
                position += array
                continue
            if array and source.text[position] == "]":
                return
            try:
                value, position = decoder.raw_decode(source.text, position)
            except json.JSONDecodeError as error:
                if not _incomplete(error, len(source.text)):
                    yield bad("broken JSON", error.msg)
                    return
            except RecursionError:
                yield bad("broken JSON", "nested too deeply")
                return
            else:
                source.chunk = _CHUNK
                yield Row(index, value)
                index += 1
                continue
        if source.ended:
            if array or position < len(source.text):
                yield bad("file cut off or damaged")
            return
        source.consume(position)
        position = 0
        try:
            source.more()
        except UnicodeDecodeError as error:
            yield bad("not UTF-8", error)
            return
        except _DAMAGED as error:
            yield bad("file cut off or damaged", error)
            return


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _incomplete(error: json.JSONDecodeError, length: int) -> bool:
    """Whether the value may only need more text: a string without end, or an error within the last few characters."""
    return error.msg.startswith("Unterminated string") or error.pos >= length - 16


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise RequestError(
            f"{path}: reading parquet needs the package pyarrow, which is not installed; run "
            "`pip install eagle3[parquet]`"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            index = 0
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    yield Row(index, value)
                    index += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise RequestError(f"{path}: found no readable parquet file ({error}); write it again") from error


@functools.cache
def dataset_hash(name: str, where: str) -> str:
    """What stands for the content of a Hugging Face data set: the commit that it has on the hub."""
    return str(_hugging_face(name, where, "load_dataset_builder", name).hash)


def read_dataset(name: str, split: str | None, where: str) -> Iterator[Row]:
    """The rows of a split (default: train) of a Hugging Face data set."""
    for index, value in enumerate(_hugging_face(name, where, "load_dataset", name, split=split or "train")):
        yield Row(index, value)


def _hugging_face(name: str, where: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of `datasets`. RequestError when the package is missing or the data set cannot be loaded."""
    try:
        import datasets  # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        raise RequestError(
            f"{where}: {name} is no file; a Hugging Face data set needs the package datasets, which is not installed: "
            "run `pip install eagle3[datasets]`, or give a file"
        ) from None
    try:
        return getattr(datasets, function)(*args, **kwargs)
    except Exception as error:  # the package raises whatever its loaders raise
        words = " ".join(str(error).split())[:300] or "no message"
        raise RequestError(
            f"{where}: {name} is no file and cannot be loaded as a Hugging Face data set "
            f"({type(error).__name__}: {words}); check the name, the split and the network"
        ) from error
