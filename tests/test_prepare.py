"""Stage prepare and its readers (inspect, vocab): counts that add up, artifacts that are hits or not, bad input."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from eagle3.config import Config
from eagle3.encoding import decode
from eagle3.errors import RequestError, StageFailed, StoreError
from eagle3.model_card import card_facts
from eagle3.prepared import Prepared
from eagle3.runs import Run
from eagle3.stages.prepare import prepared
from eagle3.tokens import sample_id
from eagle3.vocab import build_vocab
from tests.commands import killed
from tests.conftest import CHAT_TEMPLATE, write_tokenizer
from tests.families import CHATML, CHATML_THINKING
from tests.stages import configure, run_stage

Configure = Callable[..., Config]
ANSWERS = ("It is the Pacific.", "Paris, the quick fox says.", "ten nine eight", "The dog does not mind.")


def chat(question: str, *rest: str) -> dict[str, Any]:
    """A row of messages: a question, its answer, and so on in turn."""
    roles = ("user", "assistant")
    texts = (question, *rest)
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make(tiny_target: Path, tmp_path: Path) -> Configure:
    """Configures a stage on the tiny target with given answers out of a file of rows."""

    def configure_rows(rows: Sequence[Any] | Path, *overrides: str) -> Config:
        path = rows if isinstance(rows, Path) else write(tmp_path / "rows.jsonl", rows)
        return configure(
            *("model=llama", f"model.path={tiny_target}", "dataset=jsonl", f"dataset.sources.train.path={path}"),
            *("dataset.answers=given", "dataset.max_length=256", "drafter.draft_vocab_size=300"),
            *(f"output_dir={tmp_path / 'out'}", "hardware.generate_slots=2", *overrides),
        )

    return configure_rows


def opened(run: Run) -> Prepared:
    return Prepared.open(run.folder / "prepared")


def test_what_is_written_is_what_was_said(make: Configure, tiny_target: Path) -> None:
    rows = [chat(f"question {i}", ANSWERS[i % 4], "and then?", f"answer {i}") for i in range(30)]
    metrics, run = run_stage("prepare", make(rows, "dataset.validation_samples=4"))
    data = opened(run)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_target)
    assert len(data.samples) == 30
    for index, sample in enumerate(data.samples):
        reference = tokenizer.apply_chat_template(
            rows[index]["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        assert sample.input_ids.tolist() == reference["input_ids"]
        assert sample.loss_mask.tolist() == [bool(m) for m in reference["assistant_masks"]]
        assert sample.id == sample_id(sample.input_ids)
        assert sample.key == f"train:{index}"
        assert data.lengths[index] == len(sample.input_ids)
    assert data.samples[-1].key == "train:29"
    assert [s.key for s in data.samples[1:3]] == ["train:1", "train:2"]
    validation = data.split_indices("validation")
    assert len(validation) == 4
    assert sorted([*validation, *data.split_indices("train")]) == list(range(30))
    assert {s.split for i, s in enumerate(data.samples) if i in validation} == {"validation"}
    counted = np.zeros(data.vocab_size, dtype=np.int64)
    for sample in data.samples:
        if sample.split == "train":
            np.add.at(counted, sample.input_ids[sample.loss_mask], 1)
    assert data.token_counts().tolist() == counted.tolist()
    everything = np.bincount(
        np.concatenate([s.input_ids[s.loss_mask] for s in data.samples]), minlength=data.vocab_size
    )
    assert (data.token_counts() + data.token_counts("validation")).tolist() == everything.tolist()
    assert data.manifest["stop_ids"] == [2]
    assert data.special_ids == [1, 2]
    expected = {
        "rows": 30,
        "kept": 30,
        "skipped": 0,
        "heldout": 0,
        "samples": 30,
        "validation_samples": 4,
        "truncated": 0,
        "tokens": int(data.lengths.sum()),
        "supervised_tokens": sum(int(s.loss_mask.sum()) for s in data.samples),
    }
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["draft_vocab_coverage"] == 1.0
    json.dumps(metrics)


def test_every_row_is_kept_or_counted_under_its_reason(make: Configure) -> None:
    """D17."""
    long = chat("long", "word " * 400)
    rows = [
        chat("a", "It is."),
        chat("a", "It is."),
        {"messages": []},
        chat("b"),
        chat("c", "fine", "and?"),
        chat("d", "  "),
        chat("e", "", "and?", "good"),
        chat("f " * 300, "never reached"),
        long,
        chat("spells <|im_end|> out", "so it does"),
    ]
    metrics, run = run_stage("prepare", make(rows, "dataset.validation_samples=0"))
    report = opened(run).manifest["report"]
    assert report["sources"]["train"] == {
        "format": "messages",
        "role": "train",
        "read": 10,
        "kept": 3,
        "skipped": {
            "a duplicate": 1,
            "empty conversation": 1,
            "no assistant turn": 1,
            "the last turn is the user's": 1,
            "the last assistant turn is empty": 1,
            "an assistant turn is empty": 1,
            "no supervised token within dataset.max_length": 1,
        },
    }
    assert metrics["rows"] == metrics["kept"] + metrics["skipped"] == 10
    assert metrics["truncated"] == 2
    assert report["notes"] == {
        "samples cut to dataset.max_length": 2,
        "conversations whose text spells a special token": 1,
    }
    assert int(opened(run).lengths.max()) == 256
    skipping, run = run_stage("prepare", make(rows, "dataset.validation_samples=0", "dataset.on_long=skip"))
    assert opened(run).manifest["report"]["sources"]["train"]["skipped"]["longer than dataset.max_length"] == 2
    assert skipping["kept"] == 2


def test_held_out_and_validation_prompts_are_never_trained_on(make: Configure, tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.jsonl", [{"prompt": "Question 3"}, {"prompt": "elsewhere\u2028"}])
    rows = [chat(f"question {i % 20}", f"answer {i}") for i in range(60)]
    held = f"+dataset.sources.held={{path: {heldout}, role: heldout}}"
    metrics, run = run_stage("prepare", make(rows, held, "dataset.validation_samples=5"))
    data = opened(run)
    assert [c.messages[0].content for c in data.heldout()] == ["Question 3", "elsewhere\u2028"]
    assert {c.role for c in data.heldout()} == {"heldout"}
    assert data.manifest["report"]["sources"]["train"]["skipped"] == {"a held-out prompt": 3}
    assert metrics["heldout"] == 2
    assert metrics["rows"] == 62 == metrics["kept"] + metrics["skipped"]
    groups = {"train": set(), "validation": set()}
    for sample in data.samples:
        groups[sample.split].add(int(sample.key.split(":")[1]) % 20)
    assert not groups["train"] & groups["validation"]
    assert 3 not in groups["train"] | groups["validation"]
    assert metrics["validation_samples"] == 6  # whole groups of three
    # Another order of the rows changes nothing about who is on which side.
    _, again = run_stage("prepare", make(rows[::-1], held, "dataset.validation_samples=5"))
    other = opened(again)
    sides = {s.id: s.split for s in data.samples}
    assert {s.id: s.split for s in other.samples} == sides


def test_the_artifact_follows_content_and_settings(make: Configure, tmp_path: Path, tiny_target: Path) -> None:
    """D13."""
    rows = [chat(f"question {i}", "answer") for i in range(5)]
    quiet = "dataset.validation_samples=1"
    cfg = make(rows, quiet)
    _, run = run_stage("prepare", cfg)
    artifact = prepared(cfg, run.artifacts)
    before = {path: path.stat().st_mtime_ns for path in artifact.folder.iterdir()}
    metrics, _ = run_stage("prepare", cfg)
    assert {path: path.stat().st_mtime_ns for path in artifact.folder.iterdir()} == before
    assert metrics == run_stage("prepare", cfg)[0]
    # A draft vocabulary changes no sample; the same content elsewhere is the same content.
    copy = write(tmp_path / "copy.jsonl", rows)
    same = [make(rows, quiet, "drafter.draft_vocab_size=50"), make(copy, quiet)]
    assert {prepared(c, run.artifacts).id for c in same} == {artifact.id}
    template = tmp_path / "template.jinja"
    template.write_text(CHAT_TEMPLATE + " ")
    retokenized = tmp_path / "tokenizer"
    retokenized.mkdir()
    write_tokenizer(retokenized)
    changed = json.loads((retokenized / "tokenizer_config.json").read_text())
    (retokenized / "tokenizer_config.json").write_text(json.dumps({**changed, "padding_side": "left"}))
    others = [
        make(rows, quiet, "dataset.max_length=255"),
        make(rows, quiet, "dataset.answers=regenerate"),
        make(rows, quiet, "dataset.answers=regenerate", "dataset.temperature=0.5"),
        make(rows, quiet, "dataset.seed=1"),
        make(rows, quiet, "dataset.sources.train.limit=4"),
        make(rows, quiet, f"model.chat_template={template}"),
        make(rows, quiet, f"model.tokenizer={retokenized}"),
    ]
    ids = [prepared(c, run.artifacts).id for c in others]
    write(tmp_path / "rows.jsonl", [*rows, chat("more", "answer")])
    ids.append(prepared(cfg, run.artifacts).id)
    assert len({artifact.id, *ids}) == len(ids) + 1


def test_all_dropped_is_a_failure_with_reasons(make: Configure) -> None:
    """D17, T3: nothing to learn is no success."""
    with pytest.raises(RequestError) as caught:
        run_stage("prepare", make([chat("only a question"), {"messages": []}]))
    words = str(caught.value)
    assert "no conversation is left of 2 rows to learn from: " in words
    assert "1 x no assistant turn" in words
    assert "try dataset.answers=regenerate" in words
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        (
            [chat("word " * 300, "answer")],
            ["dataset.max_length=20"],
            r"max_length; expected at least one; raise dataset",
        ),
        (
            [chat("a", "b")],
            ["+dataset.sources.asked={path: rows.jsonl, role: heldout}"],
            r"held-out prompt; .*role=heldout other rows",
        ),
        (
            [{"prompt": 5}, {"prompt": 6}],
            ["dataset.sources.train.format=prompt"],
            r"in the form prompt \(dataset.sources",
        ),
    ],
)
def test_what_to_do_follows_from_why_nothing_is_left(
    make: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], overrides: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=words):
        run_stage("prepare", make(rows, *overrides))


def test_answers_of_one_token_are_counted_and_left_out(make: Configure) -> None:
    """Training has no row for them. Here they are those whose second token was cut off."""
    rows = [chat("why " * (i + 1), "It is.") for i in range(4)]
    _, run = run_stage("prepare", make(rows, "dataset.validation_samples=0"))
    starts = [int(np.flatnonzero(sample.loss_mask)[0]) for sample in opened(run).samples]
    assert starts == sorted(set(starts))
    cut = [f"dataset.max_length={starts[2] + 1}", "dataset.validation_samples=0"]
    metrics, run = run_stage("prepare", make(rows, *cut))
    assert opened(run).manifest["report"]["sources"]["train"]["skipped"] == {
        "answers of one token, where nothing is drafted": 1,
        "no supervised token within dataset.max_length": 1,
    }
    assert metrics["kept"] == 2
    assert [int(np.flatnonzero(sample.loss_mask)[0]) for sample in opened(run).samples] == starts[:2]
    with pytest.raises(RequestError, match=r"1 x answers of one token, where nothing is drafted"):
        run_stage("prepare", make(rows[2:], *cut))


def test_what_becomes_of_reasoning_is_counted(make: Configure, tmp_path: Path) -> None:
    """D7: a conversation that is split by turn so that no reasoning is lost, and reasoning that a template drops."""
    thoughtful = chat("two and two?", "Four.", "and three?", "Six.")
    for message in thoughtful["messages"][1::2]:
        message["reasoning_content"] = "I add."
    rows = [thoughtful, chat("who?", "Paris.")]
    templates = {"keeps": CHATML_THINKING, "drops": CHATML}
    for name, text in templates.items():
        (tmp_path / name).write_text(text)
    notes: dict[tuple[str, bool], dict[str, int]] = {}
    for name, preserve in (("keeps", True), ("keeps", False), ("drops", False)):
        settings = (f"model.chat_template={tmp_path / name}", f"dataset.preserve_thinking={preserve}")
        metrics, run = run_stage("prepare", make(rows, *settings, "dataset.validation_samples=0"))
        notes[name, preserve] = opened(run).manifest["report"]["notes"]
        assert metrics["kept"] == 2
        assert metrics["samples"] == (3 if preserve else 2)
    assert notes == {
        ("keeps", True): {"conversations of several samples, one a turn": 1},
        ("keeps", False): {},
        ("drops", False): {"last answers whose reasoning the chat template leaves out": 1},
    }


def test_masks_that_would_all_be_zero_stop_the_stage(make: Configure) -> None:
    """T3."""
    rows = [chat("word " * 300, "answer") for _ in range(3)]
    with pytest.raises(RequestError, match=r"1 x no supervised token within dataset.max_length"):
        run_stage("prepare", make(rows))


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        (None, [], r"^dataset.sources.train.path: found no file .*missing.jsonl"),
        ("", [], r"^dataset.sources.train: .* has no row behind the first 0"),
        ("{'prompt': 'not JSON but Python'}", [], r"^dataset.sources.train: no row of .* can be used: .*broken JSON"),
        ("[]", ["dataset.sources.train.skip=3"], r"^dataset.sources.train: .* has no row behind the first 3"),
        ('{"messages": [\n', ["dataset.on_bad_row=stop"], r"file cut off or damaged at line 1, record 1, after 0 good"),
        ('{"a": 1}', [], r"^dataset.sources.train.format: cannot tell the format"),
        ("[]", ["~dataset.sources.train"], r"^dataset.sources: found none"),
        ('{"prompt": "a"}', ["dataset.sources.train.role=heldout"], r"^dataset.sources: found only held-out"),
        ('{"prompt": "a"}', ["dataset.max_length=2000"], r"^dataset.max_length: found 2000, expected at most 1024"),
        ('{"prompt": "a"}', ["drafter.draft_vocab_size=9999"], r"^drafter.draft_vocab_size: found 9999, expected 2 to"),
        ('{"prompt": "a"}', ["drafter.draft_vocab_size=1"], r"^drafter.draft_vocab_size: found 1, expected 2 to"),
    ],
)
def test_a_wrong_request_stops_before_the_target_loads(
    make: Configure, tmp_path: Path, content: str | None, overrides: list[str], words: str
) -> None:
    path = tmp_path / ("missing.jsonl" if content is None else "rows.json")
    if content is not None:
        path.write_text(content)
    # An engine that does not exist would be the next fault to be found.
    cfg = make(path, "dataset.answers=regenerate", "hardware.engine=vllm", "hardware.accelerator=gpu", *overrides)
    with pytest.raises(RequestError, match=words):
        run_stage("prepare", cfg)


def test_a_template_without_markers_and_rule_is_refused(make: Configure, tmp_path: Path) -> None:
    """D1."""
    template = tmp_path / "bare.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    with pytest.raises(RequestError, match=r"bare.jinja: the chat template has no \{% generation %\} markers"):
        run_stage("prepare", make([chat("a", "b")], f"model.chat_template={template}"))


def test_a_given_artifact_is_used_as_it_is(make: Configure) -> None:
    _, run = run_stage("prepare", make([chat("a", "b"), chat("c", "d")], "dataset.validation_samples=0"))
    name = opened(run).manifest["id"]
    metrics, again = run_stage("prepare", make([chat("other", "rows")], f"inputs.prepared={name}"))
    assert metrics["samples"] == 2
    assert opened(again).manifest["id"] == name
    with pytest.raises(RequestError, match=r"^inputs.prepared=0123: found nothing"):
        run_stage("prepare", make([chat("other", "rows")], "inputs.prepared=0123"))


def test_a_full_disk_is_said_and_taken_up_again(make: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = make([chat("a", "b"), chat("c", "d")], "dataset.validation_samples=0")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        with pytest.raises(StageFailed, match=r"\.partial: cannot be written \(No space left on device\)"):
            run_stage("prepare", cfg)
    assert run_stage("prepare", cfg)[0]["samples"] == 2


def test_a_dry_run_makes_nothing(make: Configure, tmp_path: Path) -> None:
    cfg = make([chat("a", "b")], "dry_run=true")
    assert run_stage("prepare", cfg)[0] == {}
    assert not (tmp_path / "out" / "artifacts").exists()


@pytest.mark.parametrize("name", ["input_ids.bin", "offsets.npy", "keys.txt", "manifest.json"])
def test_a_damaged_artifact_is_named(make: Configure, name: str) -> None:
    _, run = run_stage("prepare", make([chat("a", "b"), chat("c", "d")], "dataset.validation_samples=0"))
    path = opened(run).folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StoreError, match=str(path.parent)):
        Prepared.open(path.parent)


def regenerating(make: Configure, rows: Sequence[Any], *overrides: str) -> Config:
    return make(rows, "dataset.answers=regenerate", "dataset.max_new_tokens=8", "dataset.temperature=1.0", *overrides)


def test_regenerated_answers_replace_the_given_ones(make: Configure, tiny_target: Path) -> None:
    rows = [chat(f"question {i}", "THE GIVEN ANSWER") for i in range(6)] + [chat("question 1", "ANOTHER ANSWER")]
    metrics, run = run_stage("prepare", regenerating(make, rows, "dataset.validation_samples=1"))
    data = opened(run)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_target)
    for sample in data.samples:
        assert "GIVEN" not in decode(tokenizer, sample.input_ids.tolist())
        prompt = [{"role": "user", "content": f"question {sample.key.split(':')[1]}"}]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        assert sample.input_ids[: len(ids)].tolist() == ids
        assert sample.loss_mask.tolist() == [False] * len(ids) + [True] * (len(sample.input_ids) - len(ids))
    report = data.manifest["report"]
    assert report["sources"]["train"]["skipped"]["a duplicate"] == 1
    assert metrics["rows"] == 7 == metrics["kept"] + metrics["skipped"]
    assert metrics["answer_tokens"] >= metrics["supervised_tokens"] > 0
    assert metrics["answer_tokens_per_s"] > 0
    assert not (data.folder / "answers.jsonl").exists()
    assert json.loads((run.folder / "provenance.json").read_text())["engine"]["name"] == "transformers"


def test_a_killed_run_ends_with_the_same_bits(make: Configure, tmp_path: Path) -> None:
    """Kill -9 while answers are generated: the journal's batches are kept, the others asked again as they were."""
    rows = [chat(f"question {i}", "x", f"and {i}?", "y") for i in range(20)]
    cfg = regenerating(make, rows, "dataset.validation_samples=3", "dataset.max_new_tokens=10")
    overrides = [
        *("stage=prepare", "model=llama", f"model.path={cfg.model.path}", "dataset=jsonl"),
        *(f"dataset.sources.train.path={tmp_path / 'rows.jsonl'}", "dataset.answers=regenerate"),
        *("dataset.max_length=256", "dataset.max_new_tokens=10", "dataset.temperature=1.0"),
        *("dataset.validation_samples=3", "drafter.draft_vocab_size=300", "hardware.generate_slots=2"),
    ]
    output = tmp_path / "killed"
    killed(*overrides, f"output_dir={output}", at="eagle3.answers:Journal:append:2", cwd=tmp_path)
    (journal,) = output.glob("artifacts/prepared/*.partial/answers.jsonl")
    lines = journal.read_bytes()
    journal.write_bytes(lines + b'{"batch": "torn')

    _, whole = run_stage("prepare", cfg)
    cfg.output_dir = str(output)
    metrics, resumed = run_stage("prepare", cfg)
    one, other = opened(whole), opened(resumed)
    assert one.manifest["report"]["totals"]["answer_tokens"] > metrics["answer_tokens"] > 0
    for name in ("input_ids.bin", "loss_mask.bin", "offsets.npy", "sample_ids.npy", "validation.npy", "keys.txt"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    log = (resumed.folder / "run.log").read_text()
    batches = lines.count(b"\n")
    assert f"resuming, {batches} batches of answers are there" in log


def test_inspect_marks_what_is_supervised(make: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """T3."""
    rows = [chat("question a", "It is the Pacific."), chat("question b", "No.", "sure?", "Yes.")]
    cfg = make(rows, "dataset.validation_samples=0", "inspect.samples=2")
    run_stage("prepare", cfg)
    capsys.readouterr()
    metrics, run = run_stage("inspect", cfg)
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n[[It is the Pacific.<|im_end|>]]\n" in shown
    assert "[[No.<|im_end|>]]\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>]]" in shown
    assert "supervised in 2 spans" in shown
    assert "[[No.<|im_end|>]]" in (run.folder / "run.log").read_text()
    assert metrics["samples"] == 2
    with pytest.raises(RequestError, match=r"^inspect.split: .* has no sample in 'validation'"):
        run_stage("inspect", make(rows, "dataset.validation_samples=0", "inspect.split=validation"))
    with pytest.raises(RequestError, match=r"eagle3 stage=prepare"):
        run_stage("inspect", make([chat("other", "row")]))


def test_vocab_shows_what_it_covers_of_answers_that_it_was_not_built_from(make: Configure) -> None:
    """One rare word is in the validation split alone: the training answers cannot tell what is missed."""
    rows = [chat(f"question {i}", f"answer {i}") for i in range(10)]
    words = ("dataset.validation_samples=2", "drafter.draft_vocab_size=30")
    _, run = run_stage("prepare", make(rows, *words))
    data = opened(run)
    metrics, shown = run_stage("vocab", make(rows, *words))
    ids = [id for i in data.split_indices("validation") for id in data.samples[i].input_ids[data.samples[i].loss_mask]]
    vocab = build_vocab(data.token_counts(), 30, data.vocab_size, data.special_ids, "")
    expected = sum(bool(vocab.t2d[id]) for id in ids) / len(ids)
    assert metrics["validation_coverage"]["30"] == pytest.approx(expected, abs=1e-6)
    assert metrics["validation_coverage"]["30"] < metrics["coverage"]["30"]
    assert f"{expected:.2%}" in (shown.folder / "run.log").read_text()
    run_stage("prepare", make(rows, "dataset.validation_samples=0"))
    none, _ = run_stage("vocab", make(rows, "dataset.validation_samples=0"))
    assert set(none["validation_coverage"].values()) == {None}


def test_a_card_counts_what_was_learned_from_and_what_was_kept_out(make: Configure, tmp_path: Path) -> None:
    """The prompts kept out are in neither the conversations nor the samples and tokens."""
    heldout = write(tmp_path / "heldout.jsonl", [{"prompt": f"elsewhere {i}"} for i in range(3)])
    held = f"+dataset.sources.asked={{path: {heldout}, role: heldout}}"
    rows = [chat(f"question {i}", f"answer {i}") for i in range(7)]
    _, run = run_stage("prepare", make(rows, held, "dataset.validation_samples=1"))
    vocabulary = {"coverage": 0.9953, "validation_coverage": 0.9025}
    manifest = opened(run).manifest
    tokens, supervised = manifest["metrics"]["tokens"], manifest["metrics"]["supervised_tokens"]
    shape: Any = SimpleNamespace(
        layer_ids=(1, 2), attention="dense", draft_vocab_size=3, vocab_size=9, max_position_embeddings=5
    )
    facts = card_facts({"vocabulary": vocabulary, "samples": {"train": 6, "validation": 1}}, manifest, shape, 0.0)
    assert facts["Draft vocabulary"] == (
        "3 of 9 tokens; 99.53% of the training answers' tokens, 90.25% of the validation answers'"
    )
    assert facts["Learned from"] == (
        f"7 conversations (7 of train): 7 samples of {tokens} tokens, {supervised} of them supervised"
    )
    assert facts["Kept out for evaluation"] == "prompts: 3 of asked"
    assert facts["Trained on"] == "6 samples, 1 more kept for validation"


def test_a_bad_row_is_named_once(make: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The look at the first rows, before the target loads, comes by it as well."""
    path = tmp_path / "rows.jsonl"
    path.write_text("{broken\n" + "".join(json.dumps(chat(f"q {i}", "answer")) + "\n" for i in range(3)))
    run_stage("prepare", make(path, "dataset.validation_samples=0"))
    assert sum("broken JSON" in record.getMessage() for record in caplog.records) == 1


def test_reasons_add_up_to_the_rows_that_were_to_be_learned_from(make: Configure, tmp_path: Path) -> None:
    """Prompts that are kept out are no rows to learn from; a seventh reason is counted too."""
    heldout = write(tmp_path / "heldout.jsonl", [{"prompt": f"elsewhere {i}"} for i in range(5)])
    held = f"+dataset.sources.asked={{path: {heldout}, role: heldout}}"
    rows = [chat("b"), chat("c", "fine", "and?"), chat("d", "  "), chat("e", "", "and?", "good"), {"messages": []}]
    rows += [{"messages": [{"role": "wizard", "content": "x"}]}, {"messages": [{"role": "user", "content": 3}]}]
    rows += [chat("elsewhere 1", "fine")] * 2
    with pytest.raises(RequestError) as caught:
        run_stage("prepare", make(rows, held))
    words = str(caught.value)
    assert "no conversation is left of 9 rows to learn from: 2 x a held-out prompt, " in words
    assert sum(int(n) for n in re.findall(r"(\d+) x ", words)) == 9
    assert "2 x other reasons" in words


def test_vocab_shows_sizes_without_touching_states(make: Configure, tmp_path: Path) -> None:
    """D15, D16."""
    rows = [chat(f"question {i}", ANSWERS[i % 4]) for i in range(10)]
    _, run = run_stage("prepare", make(rows, "dataset.validation_samples=0"))
    states = tmp_path / "out" / "artifacts" / "states" / "x" / "layer-002.safetensors"
    states.parent.mkdir(parents=True)
    states.write_bytes(b"states")
    before = states.stat().st_mtime_ns
    metrics, shown = run_stage("vocab", make(rows, "dataset.validation_samples=0", "drafter.draft_vocab_size=100"))
    data = opened(run)
    distinct = int((data.token_counts() > 0).sum())
    ordered = np.sort(data.token_counts())[::-1]
    coverage = {int(size): share for size, share in metrics["coverage"].items()}
    assert {16, 32, 64, 100, 128, data.vocab_size} <= coverage.keys()
    assert coverage[16] == pytest.approx(ordered[:15].sum() / ordered.sum(), abs=0.05)
    assert coverage[data.vocab_size] == 1.0
    assert [coverage[size] for size in sorted(coverage)] == sorted(coverage.values())
    assert f"{distinct:,} distinct" in (shown.folder / "run.log").read_text()
    assert states.stat().st_mtime_ns == before
    full, _ = run_stage("vocab", make(rows, "dataset.validation_samples=0", "drafter.draft_vocab_size=null"))
    assert full["coverage"][str(data.vocab_size)] == 1.0
