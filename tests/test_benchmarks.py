"""Prompt sets: what is asked, and that the choice is deterministic."""

from __future__ import annotations

import json
import logging

import pytest

from eagle3.benchmarks import prompt_sets
from eagle3.errors import RequestError
from eagle3.prompts import Conversation, Message


def never():
    raise AssertionError("the held-out set was not asked for")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file_of_prompts_in_the_formats_of_the_field(tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(10)]
    (own,) = prompt_sets([write_rows(tmp_path / "own.jsonl", rows)], 5, tmp_path, never)
    assert own.name == "own"
    assert [prompt.messages for prompt in own.prompts] == [(Message("user", f"question {i}"),) for i in (0, 2, 4, 6, 8)]


def test_only_the_first_turn_is_asked_and_no_answer_is_shown(tmp_path):
    chat = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {"messages": [{"role": role, "content": content} for role, content in chat]}
    (own,) = prompt_sets([write_rows(tmp_path / "chat.jsonl", [row])], None, tmp_path, never)
    assert own.prompts[0].messages == (Message("system", "be brief"), Message("user", "a"))


def test_heldout_prompts_come_from_the_dataset(tmp_path):
    given = [
        Conversation(f"h:{i}", (Message("user", str(i)), Message("assistant", "x")), "h", "heldout") for i in range(7)
    ]
    (heldout,) = prompt_sets(["heldout"], 3, tmp_path, lambda: given)
    assert [prompt.messages[-1].content for prompt in heldout.prompts] == ["0", "2", "4"]
    assert all(len(prompt.messages) == 1 for prompt in heldout.prompts)


def test_a_dataset_that_holds_nothing_out_has_the_other_sets(tmp_path, caplog):
    own = write_rows(tmp_path / "own.jsonl", [{"prompt": "x"}])
    with caplog.at_level(logging.WARNING, "eagle3"):
        assert [found.name for found in prompt_sets(["heldout", own], None, tmp_path, lambda: ())] == ["own"]
    assert "no source of the dataset has role=heldout" in caplog.text


def test_v3_the_digest_stands_for_the_texts_asked(tmp_path):
    names = [
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": text} for text in texts])
        for name, texts in {"a": ["x", "y"], "b": ["x", "y"], "c": ["x", "z"]}.items()
    ]
    a, b, c = prompt_sets(names, None, tmp_path, never)
    assert a.digest == b.digest != c.digest
    assert prompt_sets(names, 1, tmp_path, never)[0].digest != a.digest


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["mt_banch"], "mt_banch.*heldout.*mt_bench"),
        (["heldout"], "no prompt in .heldout.*role=heldout"),
        (["{empty}"], "no prompt"),
        (["{own}", "{own}"], "twice"),
    ],
)
def test_a_wrong_set_is_refused(tmp_path, names, words):
    files = {
        "own": write_rows(tmp_path / "own.jsonl", [{"prompt": "x"}]),
        "empty": write_rows(tmp_path / "empty.jsonl", []),
    }
    with pytest.raises(RequestError, match=words):
        prompt_sets([name.format(**files) for name in names], 2, tmp_path, list)
