"""Batches read ahead and copied to a GPU behind its work (walk: step 5 → 6).

A thread reads the next batches into page-locked memory (torch releases the interpreter while it copies) and sends them
on a stream of their own, so that a training step finds its batch on the device, the layers of a token together.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.batches import PackedBatch

DEPTH = 2  # batches on the device beside the one that is trained on


def prefetched(batches: Iterator[PackedBatch], device: torch.device, depth: int = DEPTH) -> Iterator[PackedBatch]:
    """The same batches on `device`, at most `depth` ahead. What reading raises is raised here, in its place."""
    ready: queue.Queue[tuple[PackedBatch, Any] | Exception | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: tuple[PackedBatch, Any] | Exception | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            torch.cuda.set_device(device)  # a thread starts with the first one
            stream = torch.cuda.Stream(device)
            for batch in batches:
                if stopped.is_set():
                    return
                with torch.cuda.stream(stream):
                    moved = batch.pin_memory().to(device, non_blocking=True)
                    moved = replace(moved, hidden_states=moved.hidden_states.contiguous())
                put((moved, stream.record_event()))
            put(None)
        except Exception as error:  # it belongs to whoever asks for the batch
            put(error)

    thread = threading.Thread(target=read, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            batch, copied = item
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            for tensor in _tensors(batch):
                tensor.record_stream(current)
            yield batch
    finally:
        stopped.set()
        thread.join()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
