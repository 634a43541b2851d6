"""Stage prepare: rows of any source → samples with an exact loss mask (steps 1 and 2 of the walk).

Everything that can be wrong with sources, template and vocabulary is found before the target loads; what is wrong with
single rows is counted under a reason, and the counts add up.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eagle3.answers import BATCH_PER_SLOT, AnswerSettings, Journal, regenerate
from eagle3.artifacts import Artifact, Artifacts
from eagle3.assets import cache_folder
from eagle3.checkpoint import Target, open_target
from eagle3.config import Config
from eagle3.engines import Engine, attention_window, check_engine, compute_dtype
from eagle3.engines.vllm_settings import dummy_weights
from eagle3.errors import RequestError, StageFailed, disk_full
from eagle3.preparation_report import Counts, make_report, nothing_left, reasons, report_table
from eagle3.prepared import Prepared, PreparedWriter, prompt_group
from eagle3.prompts import Conversation, SourceCount, read_source, source_identity
from eagle3.rendering import Template, Unrenderable
from eagle3.runs import Run
from eagle3.stages.rehearse import open_rehearsed
from eagle3.tokens import Tokens, check_template, special_ids, stop_ids, tokenize
from eagle3.vocab import build_vocab, check_size

FORMAT = 2  # of the files and of how they are made; part of the artifact's identity
JOURNAL = "answers.jsonl"
MAKE = "eagle3 stage=prepare"


Produced = Iterator[tuple[Conversation, list[Tokens]]]


def prepared(cfg: Config, artifacts: Artifacts) -> Artifact:
    """The prepared artifact that this config leads to, made or not."""
    return _prepared(cfg, artifacts, open_target(cfg))


def _prepared(cfg: Config, artifacts: Artifacts, target: Target) -> Artifact:
    data, cache = cfg.dataset, cache_folder(cfg.cache_dir)
    if not data.sources:
        raise RequestError("dataset.sources: found none, expected at least one; try dataset=demo or dataset=jsonl")
    fingerprint = target.fingerprint()
    settings = ("answers", "max_length", "on_bad_row", "on_long", "validation_samples")
    settings += ("preserve_thinking", "supervise_empty_thinking")
    identity: dict[str, Any] = {
        "format": FORMAT,
        "sources": [source_identity(name, source, cache) for name, source in data.sources.items()],
        **{name: getattr(data, name) for name in settings},
        "seed": data.seed,
        "tokenizer": fingerprint["tokenizer"],
        "chat_template": fingerprint["chat_template"],
    }
    if data.answers == "regenerate":
        identity |= {
            "target": fingerprint,
            "engine": cfg.hardware.engine,
            "compute_dtype": compute_dtype(cfg.hardware, target),
            "max_new_tokens": data.max_new_tokens,
            "temperature": data.temperature,
            **dummy_weights(cfg.hardware),
        }
    return artifacts.of("prepared", identity)


def run(cfg: Config, run: Run) -> dict[str, Any]:
    """Makes the prepared set, or finds it. Returns what its report counts, and the draft vocabulary's coverage.

    Raises RequestError for what is wrong with the request, and when no conversation is left.
    """
    target = open_target(cfg)
    given = cfg.inputs.prepared
    if given is None:
        artifact = _prepared(cfg, run.artifacts, target)
    else:
        artifact = run.artifacts.resolve("prepared", given, None, MAKE)
    if artifact.complete or not (cfg.dry_run or run.artifacts.claim(artifact)):
        artifact.check_sizes(MAKE)
        run.log.info("prepare: hit, %s", artifact.folder)
        run.wrote(artifact)
        return _metrics(cfg, Prepared.open(artifact.folder))
    template = Template(
        target.tokenizer(),
        target.adapter,
        preserve_thinking=cfg.dataset.preserve_thinking,
        supervise_empty_thinking=cfg.dataset.supervise_empty_thinking,
    )
    special = _check(cfg, target, template)
    if cfg.dry_run:
        run.log.info("prepare: would make %s from %s", artifact.folder, ", ".join(cfg.dataset.sources))
        return {}
    folder = run.artifacts.begin(artifact, resume=True)
    try:
        manifest = _Preparation(cfg, run, target, template, folder).make(special)
        (folder / JOURNAL).unlink(missing_ok=True)
        run.artifacts.commit(artifact, manifest)
    except OSError as error:
        if not disk_full(error) and error.errno not in (errno.EROFS, errno.EACCES):
            raise
        raise StageFailed(
            f"{folder}: cannot be written ({error.strerror}); make room or set output_dir=, then run the same command "
            "again: what the target has answered is kept"
        ) from error
    run.wrote(artifact)
    run.show(report_table(manifest["report"]))
    return _metrics(cfg, Prepared.open(artifact.folder))


def _metrics(cfg: Config, prepared: Prepared) -> dict[str, Any]:
    size, counts = cfg.drafter.draft_vocab_size, prepared.token_counts()
    vocab = build_vocab(counts, size, prepared.vocab_size, prepared.special_ids, prepared.tokenizer_hash)
    return {**prepared.manifest["metrics"], "draft_vocab_coverage": round(vocab.coverage(counts), 6)}


def _check(cfg: Config, target: Target, template: Template) -> list[int]:
    """All that can be known before the target loads: engine, template, lengths, vocabulary, first rows of each source.

    Returns the ids that every draft vocabulary holds.
    """
    data = cfg.dataset
    if data.answers == "regenerate":
        check_engine(target.adapter, cfg.hardware.engine)
    check_template(template, f"{cfg.model.chat_template or target.tokenizer_folder}")
    limit = target.shape.max_position_embeddings
    if data.max_length > limit:
        raise RequestError(
            f"dataset.max_length: found {data.max_length}, expected at most {limit}, the positions that the model has; "
            f"try dataset.max_length={limit}"
        )
    window = attention_window(target)
    if data.answers == "regenerate" and cfg.hardware.engine == "transformers" and data.max_length > window:
        raise RequestError(
            f"dataset.max_length: found {data.max_length}, expected at most {window}, the sliding window of "
            f"{target.shape.architecture}: answers of the transformers engine end at it (dataset.answers=regenerate); "
            f"try dataset.max_length={window}, or hardware.engine=vllm"
        )
    special = special_ids(template.tokenizer, target.adapter)
    check_size(cfg.drafter.draft_vocab_size, target.shape.vocab_size, special)
    if all(source.role == "heldout" for source in data.sources.values()):
        raise RequestError("dataset.sources: found only held-out sources, expected one with role=train")
    for name, source in data.sources.items():
        count = SourceCount()
        first = next(read_source(name, source, cache_folder(cfg.cache_dir), data.on_bad_row, count, named=0), None)
        if first is not None:
            continue
        if count.read:
            form = "" if source.format == "auto" else f" in the form {source.format} (dataset.sources.{name}.format)"
            raise RequestError(
                f"dataset.sources.{name}: no row of {source.path} can be used: {reasons(count.skipped)}; expected "
                f"UTF-8, in a .jsonl file one JSON object a line, in a .json file an array{form}; mend or rename it"
            )
        raise RequestError(
            f"dataset.sources.{name}: {source.path} has no row behind the first {source.skip}, expected at least "
            f"one; check the file and dataset.sources.{name}.skip"
        )
    return special


class _Preparation:
    """One making of a prepared set: reads, filters, tokenizes or asks the target, writes, counts."""

    def __init__(self, cfg: Config, run: Run, target: Target, template: Template, folder: Path) -> None:
        self.cfg, self.data, self.run, self.target, self.template = cfg, cfg.dataset, run, target, template
        self.folder = folder
        self.counts = Counts({name: SourceCount() for name in cfg.dataset.sources})
        self.stop_ids = stop_ids(template.tokenizer, target.adapter, target.shape.eos_token_ids)

    def make(self, special: Sequence[int]) -> dict[str, Any]:
        """Writes the artifact's files; returns its manifest. RequestError when no conversation is left."""
        heldout = list(self._read("heldout"))
        conversations = list(self._for_training(heldout))
        produce = self._regenerated if self.data.answers == "regenerate" else self._given
        with PreparedWriter(self.folder) as writer:
            with ExitStack() as stack:
                for conversation, samples in produce(conversations, stack):
                    self._write(writer, conversation, samples)
            if not writer.lengths:
                raise RequestError(nothing_left(self.counts))
            wanted = min(self.data.validation_samples, len(writer.lengths) // 5)
            if wanted < self.data.validation_samples:
                self.run.log.warning(
                    "dataset.validation_samples: %d asked of %d samples; a fifth of them, %d, taken",
                    *(self.data.validation_samples, len(writer.lengths), wanted),
                )
            writer.finish(wanted, self.cfg.dataset.seed, self.target.shape.vocab_size, heldout)
            report = make_report(self.counts, writer, len(heldout))
        fingerprint = self.target.fingerprint()
        return {
            "metrics": report["totals"],
            "report": report,
            "model": self.cfg.model.name,
            "tokenizer_hash": fingerprint["tokenizer"],
            "chat_template_hash": fingerprint["chat_template"],
            "vocab_size": self.target.shape.vocab_size,
            "max_length": self.data.max_length,
            "special_ids": list(special),
            "stop_ids": self.stop_ids,
        }

    def _read(self, role: str) -> Iterator[Conversation]:
        for name, source in self.data.sources.items():
            if source.role == role:
                cache = cache_folder(self.cfg.cache_dir)
                yield from read_source(name, source, cache, self.data.on_bad_row, self.counts.sources[name])

    def _for_training(self, heldout: Sequence[Conversation]) -> Iterator[Conversation]:
        """Conversations to learn from: fit for the chosen kind of answers, each once, none that is held out."""
        kept_out = {prompt_group(conversation) for conversation in heldout}
        seen: set[bytes] = set()
        for conversation in self._read("train"):
            if self.data.answers == "regenerate":
                asked = tuple(message for message in conversation.messages if message.role != "assistant")
                conversation = dataclasses.replace(conversation, messages=asked)
                problem = None
            else:
                problem = _unfit(conversation)
            texts = json.dumps([dataclasses.astuple(message) for message in conversation.messages])
            content = hashlib.sha256(texts.encode()).digest()
            if problem is None and prompt_group(conversation) in kept_out:
                problem = "a held-out prompt"
            if problem is None and content in seen:
                problem = "a duplicate"
            if problem is not None:
                self.counts.drop(conversation, problem)
                continue
            seen.add(content)
            yield conversation

    def _given(self, conversations: Sequence[Conversation], stack: ExitStack) -> Produced:
        """The samples that the sources' own answers make."""
        advance = stack.enter_context(self.run.progress(len(conversations), "conversations", "prepare: tokenizing"))
        for conversation in conversations:
            try:
                samples = tokenize(self.template, conversation.messages)
                self.counts.reasoning_dropped += self.template.drops_reasoning(conversation.messages)
                yield conversation, samples
            except Unrenderable as problem:
                self.counts.drop(conversation, str(problem))
            advance(1)

    def _regenerated(self, conversations: Sequence[Conversation], stack: ExitStack) -> Produced:
        """The samples that the target's answers make; the engine is opened when the journal lacks one."""
        settings = AnswerSettings(
            max_length=self.data.max_length,
            max_new_tokens=self.data.max_new_tokens,
            temperature=self.data.temperature,
            seed=self.cfg.dataset.seed,
            stop_ids=self.stop_ids,
            batch=self.cfg.hardware.generate_slots * BATCH_PER_SLOT,
            skip_long=self.data.on_long == "skip",
            engines=self.cfg.hardware.data_parallel_size,
        )
        journal = Journal(self.folder / JOURNAL)
        if len(journal):
            self.run.log.info("prepare: resuming, %d batches of answers are there", len(journal))
        turns = sum(message.role == "user" for conversation in conversations for message in conversation.messages)
        advance = stack.enter_context(self.run.progress(turns, "prompts", "prepare: asked or left out"))
        opened: list[Engine] = []

        def engine() -> Engine:
            if not opened:
                opened.append(stack.enter_context(open_rehearsed(self.cfg, self.run, self.target)))
                self.run.note(engine=dataclasses.asdict(opened[0].info()))
            return opened[0]

        answered = regenerate(conversations, self.template, engine, journal, settings, self.counts.answers, advance)
        for conversation, outcome in answered:
            if isinstance(outcome, str):
                self.counts.drop(conversation, outcome)
            else:
                yield conversation, outcome

    def _write(self, writer: PreparedWriter, conversation: Conversation, samples: Sequence[Tokens]) -> None:
        """Writes a conversation's samples, cut to max_length; drops it when none is left."""
        most, counts = self.data.max_length, self.counts
        if self.data.on_long == "skip" and any(len(tokens.input_ids) > most for tokens in samples):
            counts.drop(conversation, "longer than dataset.max_length")
            return
        group, written = prompt_group(conversation), 0
        reason = "no supervised token within dataset.max_length"
        for tokens in samples:
            counts.truncated += len(tokens.input_ids) > most
            tokens = Tokens(tokens.input_ids[:most], tokens.loss_mask[:most])
            if not tokens.loss_mask.any():
                continue
            if not (tokens.loss_mask[1:] & tokens.loss_mask[:-1]).any():
                # The target writes an answer's first token itself; there is nothing to draft behind it.
                reason = "answers of one token, where nothing is drafted"
                continue
            if writer.add(tokens, conversation.key, group):
                written += 1
            else:
                reason = "a duplicate"
        if not written:
            counts.drop(conversation, reason)
            return
        counts.split += len(samples) > 1
        counts.special_token_text += self.template.spells_special_token(conversation.messages)


def _unfit(conversation: Conversation) -> str | None:
    """Why a conversation's own answers cannot be learned, or None."""
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if not answers:
        return "no assistant turn"
    if conversation.messages[-1].role != "assistant":
        return f"the last turn is the {conversation.messages[-1].role}'s"
    if not answers[-1].content.strip():
        return "the last assistant turn is empty"
    if not all(answer.content.strip() for answer in answers):
        return "an assistant turn is empty"
    return None
