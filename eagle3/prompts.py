"""Step 1 of the walk: a row of any source → `Conversation`.

Sources are files (JSONL, JSON, parquet), Hugging Face data sets and packaged assets, in the formats that the field
uses. A row that is no conversation is counted under a reason, never dropped in silence.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.assets import PREFIX, asset_path, file_sha256, find_asset
from eagle3.config import SourceConfig
from eagle3.errors import RequestError
from eagle3.rows import SUFFIXES, BadRow, Row, dataset_hash, read_dataset, read_rows

_log = logging.getLogger("eagle3")
NAMED_BAD_ROWS = 3  # per source; the others are only counted

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user or assistant; `reasoning` is what a thinking model wrote before its answer."""

    role: str
    content: str
    reasoning: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages of one row. `key` is "<source>:<row>"; `role` says whether it is trained on or held out."""

    key: str
    messages: tuple[Message, ...]
    source: str
    role: str


@dataclass
class SourceCount:
    """What became of a source's rows: read = kept + the sum of skipped; `role` is what they are for."""

    format: str = ""
    role: str = "train"
    read: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


class _Unfit(Exception):
    """A row that is skipped; the message is the reason to count it under."""


class _Malformed(_Unfit):
    """A row that is not what its format says: skipped, or a reason to stop (dataset.on_bad_row)."""


def read_source(
    name: str,
    source: SourceConfig,
    cache: Path,
    on_bad_row: str = "skip",
    count: SourceCount | None = None,
    named: int = NAMED_BAD_ROWS,
) -> Iterator[Conversation]:
    """Streams the conversations of one source; `count` is filled on the way, the first `named` bad rows are warned of.

    `skip` and `limit` count rows of the file, good or bad, so that a slice never depends on what could be read. Raises
    RequestError for a source that cannot be opened, whose format is unknown or, with on_bad_row="stop", that has a row
    which cannot be read or is not what its format says.
    """
    count = SourceCount() if count is None else count
    count.role = source.role
    where = f"dataset.sources.{name}"
    stop = None if source.limit is None else source.skip + source.limit
    parse: Callable[[dict[str, Any]], list[Message]] | None = None
    malformed = 0
    for row in itertools.islice(_rows(where, source, cache), source.skip, stop):
        count.read += 1
        place = row.where if isinstance(row, BadRow) else f"row {row.index + 1}"
        try:
            if isinstance(row, BadRow):
                raise _Malformed(row.reason)
            if not isinstance(row.value, dict):
                raise _Malformed(f"not an object but {type(row.value).__name__}")
            if parse is None:
                count.format = _format(row.value, source, where)
                parse = _FORMATS[count.format]
            messages = _first_turns(parse(row.value), source.turns)
        except _Malformed as problem:
            good = count.read - 1 - malformed
            if on_bad_row == "stop":
                raise RequestError(
                    f"{source.path}: {problem} at {place}, after {good} good rows (dataset.on_bad_row=stop); mend the "
                    "file, or skip what cannot be read with dataset.on_bad_row=skip"
                ) from None
            malformed += 1
            if malformed <= named:
                _log.warning("%s: %s at %s, after %d good rows; skipped", source.path, problem, place, good)
            count.skipped[str(problem)] += 1
        except _Unfit as problem:
            count.skipped[str(problem)] += 1
        else:
            count.kept += 1
            yield Conversation(f"{name}:{row.index}", tuple(messages), name, source.role)


def source_identity(name: str, source: SourceConfig, cache: Path) -> dict[str, Any]:
    """What determines a source's conversations: a hash of its content, wherever it lies, and how it is cut."""
    if source.path.startswith(PREFIX):
        content = find_asset(source.path).member_sha256  # pinned, so nothing need be fetched
    elif (path := _file(f"dataset.sources.{name}", source)) is not None:
        content = _content(path, path.stat().st_size, path.stat().st_mtime_ns)
    else:
        content = dataset_hash(source.path, f"dataset.sources.{name}.path")
    fields = {key: getattr(source, key) for key in ("format", "split", "limit", "skip", "turns", "role")}
    return {"name": name, "content": content, **fields}


@functools.cache
def _content(path: Path, size: int, modified_ns: int) -> str:
    """A file's hash, computed once for all the stages of a run that ask for it."""
    return file_sha256(path)


def _rows(where: str, source: SourceConfig, cache: Path) -> Iterator[Row | BadRow]:
    if source.path.startswith(PREFIX):
        asset = find_asset(source.path)
        if asset.model:
            raise RequestError(f"{where}.path: {source.path} is a model, expected data; see dataset=demo")
        return read_rows(asset_path(asset.name, cache))
    path = _file(where, source)
    return read_dataset(source.path, source.split, f"{where}.path") if path is None else read_rows(path)


def _file(where: str, source: SourceConfig) -> Path | None:
    """The source's file; None when the path can only be the name of a Hugging Face data set."""
    path = Path(source.path).expanduser()
    if path.is_file():
        return path
    if path.name.lower().endswith(SUFFIXES) or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source.path):
        raise RequestError(
            f"{where}.path: found no file {source.path}, expected a file of rows, {PREFIX}NAME, or the name of a "
            "Hugging Face data set; check the path"
        )
    if path.is_dir():
        raise RequestError(f"{where}.path: {source.path} is a folder, expected a file of rows; give one file in it")
    return None


def _format(row: dict[str, Any], source: SourceConfig, where: str) -> str:
    """The configured format, or the one that the first readable row has."""
    if source.format != "auto":
        if source.format not in _FORMATS:
            raise RequestError(
                f"{where}.format: found {source.format!r}, expected auto or one of {', '.join(_FORMATS)}"
            )
        return source.format
    chat = row.get("messages") or row.get("conversations") or row.get("conversation")
    if isinstance(chat, list) and chat and isinstance(chat[0], dict):
        return "sharegpt" if "from" in chat[0] else "messages"
    for name, fields in (("alpaca", ("instruction", "output")), ("turns", ("turns",)), ("prompt", ("prompt",))):
        if all(key in row for key in fields):
            return name
    if isinstance(chat, list) or "messages" in row or "conversations" in row:
        raise _Unfit("empty conversation")
    raise RequestError(
        f"{where}.format: cannot tell the format of {source.path}, whose first row has the fields {sorted(row)[:12]}; "
        "expected messages, conversations, instruction and output, prompt, or turns; rename them or set the format"
    )


def _messages(row: dict[str, Any]) -> list[Message]:
    """`messages` (or `conversations`) with role and content, as in the OpenAI API."""
    if row.get("tools"):
        raise _Unfit("tool calls are not supported")
    chat = _chat(row, "messages", "conversations", "conversation")
    return [_message(item, item.get("role"), item.get("content")) for item in chat]


def _sharegpt(row: dict[str, Any]) -> list[Message]:
    """`conversations` (or `messages`) with from and value."""
    chat = _chat(row, "conversations", "conversation", "messages")
    return [_message(item, item.get("from"), item.get("value")) for item in chat]


def _alpaca(row: dict[str, Any]) -> list[Message]:
    """`instruction`, optional `input`, `output`, optional `system`."""
    question = _text(row.get("instruction"))
    if extra := _text(row.get("input") or ""):
        question = f"{question}\n\n{extra}"
    messages = [Message("user", question), Message("assistant", _text(row.get("output")))]
    system = _text(row.get("system") or "")
    return [Message("system", system), *messages] if system else messages


def _prompt(row: dict[str, Any]) -> list[Message]:
    """`prompt`: one user turn (or a list of messages), no answer."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return _messages({"messages": prompt})
    return [Message("user", _text(prompt))]


def _turns(row: dict[str, Any]) -> list[Message]:
    """`turns`: the texts of the user's turns, as in MT-bench."""
    turns = row.get("turns")
    if not isinstance(turns, list):
        raise _Malformed("field `turns` is missing or no list")
    return [Message("user", _text(turn)) for turn in turns]


_FORMATS: dict[str, Callable[[dict[str, Any]], list[Message]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt": _prompt,
    "turns": _turns,
}


def _chat(row: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    chat = next((row[name] for name in names if row.get(name) is not None), None)
    if not isinstance(chat, list):
        raise _Malformed(f"field `{names[0]}` is missing or no list")
    if not all(isinstance(item, dict) for item in chat):
        raise _Malformed("a message is no object")
    return chat


def _message(item: dict[str, Any], role: Any, content: Any) -> Message:
    if item.get("tool_calls") or role in ("tool", "function", "function_call", "observation"):
        raise _Unfit("tool calls are not supported")
    if role not in ROLES:
        raise _Malformed(f"unknown role {str(role)[:20]!r}")
    reasoning = item.get("reasoning_content") or item.get("reasoning") or item.get("thinking")
    return Message(ROLES[role], _text(content), _text(reasoning) if reasoning else None)


def _text(content: Any) -> str:
    """A text, or the joined texts of a list of parts."""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise _Malformed("a message has no text")
    try:
        content.encode()
    except UnicodeEncodeError:
        # JSON can spell one half of a pair that stands for a character, where a text was cut; tokenizers refuse it.
        raise _Malformed("a text holds half a character") from None
    return content


def _first_turns(messages: list[Message], turns: int | None) -> list[Message]:
    """The conversation from its first user turn on (system turns stay), cut before user turn number `turns` + 1.

    Answers before the first user turn belong to an earlier part of a conversation that was split.
    """
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if not messages:
        raise _Unfit("empty conversation")
    if not users:
        raise _Unfit("no user turn")
    if any(not messages[i].content.strip() for i in users):
        raise _Unfit("an empty user turn")
    kept = [message for message in messages[: users[0]] if message.role == "system"]
    end = len(messages) if turns is None or len(users) <= turns else users[turns]
    return kept + messages[users[0] : end]
