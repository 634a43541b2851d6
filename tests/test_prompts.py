"""Rows of every format and kind of file, good and bad."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import SourceConfig
from eagle3.errors import RequestError
from eagle3.prompts import Conversation, Message, SourceCount, read_source, source_identity
from eagle3.rows import BadRow, read_rows

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
EXPECTED = (Message("user", "hi"), Message("assistant", "hello"))


def write(path: Path, rows: Sequence[Any]) -> Path:
    """A file of rows: one array in a .json, a line each in a .jsonl."""
    text = json.dumps(rows, indent=1) if path.name.endswith(".json") else "".join(json.dumps(r) + "\n" for r in rows)
    path.write_text(text)
    return path


def read(path: Path | str, on_bad_row: str = "skip", **fields: Any) -> tuple[list[Conversation], SourceCount]:
    count = SourceCount()
    source = SourceConfig(path=str(path), **fields)
    return list(read_source("s", source, Path("/nowhere"), on_bad_row, count)), count


@pytest.mark.parametrize(
    ("form", "row", "messages"),
    [
        ("messages", {"messages": CHAT}, EXPECTED),
        ("messages", {"conversations": CHAT}, EXPECTED),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
            EXPECTED[:1],
        ),
        (
            "messages",
            {"messages": [CHAT[0], {"role": "assistant", "content": "hello", "reasoning_content": "greet"}]},
            (EXPECTED[0], Message("assistant", "hello", "greet")),
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
            EXPECTED,
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "be kind"}, {"from": "user", "value": "hi"}]},
            (Message("system", "be kind"), EXPECTED[0]),
        ),
        ("alpaca", {"instruction": "hi", "input": "", "output": "hello"}, EXPECTED),
        (
            "alpaca",
            {"instruction": "add", "input": "2 2", "output": "4", "system": "be exact"},
            (Message("system", "be exact"), Message("user", "add\n\n2 2"), Message("assistant", "4")),
        ),
        ("prompt", {"prompt": "hi", "canonical_solution": "x"}, EXPECTED[:1]),
        ("prompt", {"prompt": CHAT[:1]}, EXPECTED[:1]),
        ("turns", {"question_id": 1, "turns": ["hi", "and you?"]}, (EXPECTED[0], Message("user", "and you?"))),
    ],
)
def test_formats_are_recognised(tmp_path: Path, form: str, row: Any, messages: tuple[Message, ...]) -> None:
    path = write(tmp_path / "rows.jsonl", [row])
    (found,), count = read(path)
    assert found == Conversation("s:0", messages, "s", "train")
    assert (count.format, count.read, count.kept) == (form, 1, 1)
    assert read(path, format=form)[0] == [found]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, {"messages": [{"role": "user", "content": "Ünïcode\u2028 🙂"}]}]
    paths = [write(tmp_path / name, rows) for name in ("a.jsonl", "b.json", "c.ndjson")]
    paths.append(tmp_path / "d.jsonl.gz")
    paths[-1].write_bytes(gzip.compress(paths[0].read_bytes()))
    paths.append(tmp_path / "e.json")  # rows one after the other, with a byte order mark
    paths[-1].write_bytes(b"\xef\xbb\xbf" + paths[0].read_bytes())
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    paths.append(tmp_path / "f.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), paths[-1])
    expected = read(paths[0])[0]
    assert [c.messages for c in expected] == [EXPECTED, (Message("user", "Ünïcode\u2028 🙂"),)]
    for path in paths:
        assert read(path)[0] == expected, path


def test_limit_skip_and_turns(tmp_path: Path) -> None:
    chat = [{"role": r, "content": f"{r} {i}"} for i in range(3) for r in ("user", "assistant")]
    path = write(tmp_path / "a.jsonl", [{"messages": chat}] * 6)
    found, count = read(path, skip=2, limit=3, turns=2)
    assert [c.key for c in found] == ["s:2", "s:3", "s:4"]
    assert [m.content for m in found[0].messages] == ["user 0", "assistant 0", "user 1", "assistant 1"]
    assert (count.read, count.kept) == (3, 3)
    assert read(path, role="heldout", limit=1)[0][0].role == "heldout"


def test_a_conversation_starts_with_its_first_question(tmp_path: Path) -> None:
    """ShareGPT's split conversations begin with the answer to a question of the part before."""
    chat = [{"from": "gpt", "value": "rest"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert read(write(tmp_path / "a.json", [{"conversations": chat}]))[0][0].messages == EXPECTED


def test_unfit_rows_are_counted_under_their_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D17: counts add up; what cannot be read is also logged with its place."""
    rows = [
        {"messages": CHAT},
        {"messages": []},
        {"messages": CHAT[1:]},
        {"messages": [{"role": "user", "content": "  "}]},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "cut \ud83d"}]},
        {"messages": [CHAT[0], {"role": "assistant", "content": "fine", "reasoning": "\ude42"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [*CHAT, {"role": "tool", "content": "42"}]},
        {"messages": CHAT, "tools": [{"name": "f"}]},
        {"other": 1},
        "text",
        {"messages": "text"},
        {"messages": ["text"]},
    ]
    with caplog.at_level(logging.WARNING, "eagle3"):
        found, count = read(write(tmp_path / "a.jsonl", rows))
    assert len(found) == count.kept == 1
    assert count.read == 15 == count.kept + count.skipped.total()
    assert count.skipped == {
        "empty conversation": 1,
        "no user turn": 1,
        "an empty user turn": 1,
        "unknown role 'king'": 1,
        "a message has no text": 2,
        "a text holds half a character": 2,
        "tool calls are not supported": 2,
        "field `messages` is missing or no list": 2,
        "not an object but str": 1,
        "a message is no object": 1,
    }
    assert "unknown role 'king' at row 5, after 4 good rows; skipped" in caplog.text
    assert len(caplog.records) == 3


def test_a_truncated_array_gives_its_complete_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The packaged ShareGPT file is cut off in the middle of a string."""
    whole = json.dumps([{"messages": CHAT}] * 1000, indent=1)
    path = tmp_path / "a.json"
    cut = whole.index("hello", len(whole) // 2) + 2
    path.write_text(whole[:cut])
    with caplog.at_level(logging.WARNING, "eagle3"):
        found, count = read(path)
    assert len(found) == whole[:cut].count("\n },\n")
    assert count.skipped == {"file cut off or damaged": 1}
    line = path.read_text().count("\n {\n")  # where the torn record is
    assert f"record {line}, after {len(found)} good rows" in caplog.text
    words = (
        rf"^{path}: file cut off or damaged at line \d+, record {line}, after {len(found)} good rows.*on_bad_row=skip$"
    )
    with pytest.raises(RequestError, match=words):
        read(path, "stop")
    assert len(read(path, "stop", limit=3)[0]) == 3


@pytest.mark.parametrize("end", ["", "]x", "]]"])
def test_an_array_without_its_end_is_damaged(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"messages": CHAT}] * 3)[:-1] + end)
    rows = list(read_rows(path))
    assert len(rows) == (4 if not end else 3)
    assert isinstance(rows[-1], BadRow) == (not end)


def test_a_broken_line_costs_that_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps({"messages": CHAT}).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"\n\n{broken\n" + good + b"\n\xff\xfe\n" + good + b"\n" + good[:20])
    with caplog.at_level(logging.WARNING, "eagle3"):
        found, count = read(path)
    assert [c.key for c in found] == ["s:0", "s:2", "s:4"]
    assert count.skipped == {"broken JSON": 1, "not UTF-8": 1, "file cut off or damaged": 1}
    assert "broken JSON at line 3" in caplog.text
    with pytest.raises(RequestError, match=rf"^{path}: broken JSON at line 3 .*after 1 good rows"):
        read(path, "stop")


def test_broken_json_in_an_array_ends_the_reading_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '[{"prompt": "a"},\n{"prompt": "b"},\n{"prompt": oops},\n' + ", ".join(['{"prompt": "c"}'] * 50) + "]"
    )
    *good, bad = read_rows(path)
    assert len(good) == 2
    assert isinstance(bad, BadRow)
    assert (bad.reason, bad.where[:16]) == ("broken JSON", "line 3, record 3")


def test_a_damaged_archive_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    rows = b"".join(json.dumps({"prompt": f"question {i}"}).encode() + b"\n" for i in range(20000))
    path.write_bytes(gzip.compress(rows)[:-2000])
    found, count = read(path)
    assert 0 < len(found) < 20000
    assert count.skipped == {"file cut off or damaged": 1}


def test_reading_a_few_rows_reads_a_part_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = json.dumps({"prompt": "q" * 1000})
    path.write_text("[" + ",".join([row] * 3000) + "BROKEN")
    found, count = read(path, limit=300)
    assert len(found) == count.read == 300


def test_a_record_longer_than_a_chunk(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * size} for size in (10, 3_000_000, 10, 700_000)]
    found, _ = read(write(tmp_path / "a.json", rows))
    assert [len(c.messages[0].content) for c in found] == [10, 3_000_000, 10, 700_000]


def test_an_unknown_format_names_the_fields_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "reply": "r"}])
    with pytest.raises(
        RequestError, match=r"^dataset.sources.s.format: .*\['question', 'reply'\].*instruction and output"
    ):
        read(path)
    with pytest.raises(RequestError, match=r"^dataset.sources.s.format: found 'vicuna', expected auto or one of"):
        read(path, format="vicuna")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.jsonl", r"^dataset.sources.s.path: found no file missing.jsonl"),
        ("no/such/folder/x", r"^dataset.sources.s.path: found no file no/such/folder/x"),
        ("asset:nothing", r"^asset:nothing: no such asset; expected one of .*'alpaca'"),
        ("asset:smollm2-135m-instruct", r"is a model, expected data"),
    ],
)
def test_a_path_that_is_nothing(path: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(path)


def test_files_that_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(RequestError, match=r"a.csv: found the suffix '.csv', expected one of .jsonl"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_text("no parquet")
    pytest.importorskip("pyarrow")
    with pytest.raises(RequestError, match=r"a.parquet: found no readable parquet file"):
        read(tmp_path / "a.parquet")


def test_a_data_set_name_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(RequestError, match=r"^dataset.sources.s.path: org/name is no file;.*eagle3\[datasets\]"):
        read("org/name")


def test_a_source_is_identified_by_content_and_cut(tmp_path: Path) -> None:
    """D13."""
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    copy = write(tmp_path / "b.jsonl", [{"prompt": "a"}])

    def identity(path: Path, **fields: Any) -> dict[str, Any]:
        return source_identity("s", SourceConfig(path=str(path), **fields), tmp_path)

    first = identity(path)
    assert first == identity(copy)
    assert first != identity(path, limit=1)
    write(path, [{"prompt": "another"}])
    assert first != identity(path)
    assert len(source_identity("s", SourceConfig(path="asset:alpaca"), tmp_path)["content"]) == 64  # fetches nothing
