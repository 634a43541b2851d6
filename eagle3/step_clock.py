"""Where a training step's time goes, and how near the matrix units' rate it comes (walk: step 6).

On a GPU the parts are marked by events and read only when the log is written, so that measuring makes nothing wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3.drafter import DrafterShape
from eagle3.row_layout import RowLayout

PARTS = ("data", "forward", "backward", "optimizer")


def needed_flops(shape: DrafterShape, layout: RowLayout) -> dict[str, float]:
    """Matrix work that a training step cannot do without, in floating-point operations, by part.

    A product of n rows with an [a, b] weight costs 2 n a b forward, as much for its input's gradient and as much for
    its weight's. Inputs without a parameter before them need no gradient; embedding halves of q, k, v are needed once
    a token; attention's backward pass makes its scores again, and four products more.
    """
    h, heads = shape.hidden_size, shape.num_attention_heads
    rows, tokens, first = layout.stacked, layout.tokens, layout.counts[0]
    taught, columns = len(layout.teacher_tokens), tokens + rows - first
    # What the pair's projections make of a row (q) and of a column (kv), and the widths of a head's query and value.
    q, kv, expansion = heads * shape.head_dim, 2 * shape.num_key_value_heads * shape.head_dim, 0.0
    query, value = shape.head_dim, shape.head_dim
    if shape.attention == "mla":
        q, kv, value = shape.q_lora_rank, shape.kv_lora_rank + shape.qk_rope_head_dim, shape.v_head_dim
        expansion = 6.0 * heads * rows * shape.q_lora_rank * query
        expansion += 6.0 * heads * columns * shape.kv_lora_rank * (shape.qk_nope_head_dim + value)
    return {
        "fc": 4.0 * tokens * len(shape.layer_ids) * shape.target_hidden_size * h,
        "embedding_half": 4.0 * h * (tokens * kv + taught * q),
        "state_half": 6.0 * h * (rows * q + columns * kv),
        "latent_expansion": expansion,
        "output_projection": 6.0 * rows * heads * value * h,
        "mlp": 6.0 * rows * 3 * h * shape.intermediate_size,
        "head": 6.0 * rows * h * shape.draft_vocab_size,
        "teacher": 2.0 * taught * h * shape.vocab_size,
        "attention": 2.0 * layout.seen * heads * (4 * query + 3 * value),
    }


def matrix_rate(device: torch.device, size: int = 8192, repeats: int = 10) -> float:
    """The rate of a large bf16 matrix product of random numbers on this GPU, in floating-point operations a second."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.mm(left, right)
    took = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(left, right)
        stop.record()
        torch.cuda.synchronize(device)
        took.append(start.elapsed_time(stop))
    return 2e3 * size**3 / sorted(took)[repeats // 2]


@dataclass
class StepClock:
    """Sums the time of each part, tokens, supervised rows and needed work from one reading to the next."""

    device: torch.device
    _marks: list[list[Any]] = field(default_factory=list)  # events on a GPU, else seconds
    _waited: float = 0.0
    _ended: float | None = None
    _since: float | None = None
    _tokens: int = 0
    _rows: int = 0
    _flops: float = 0.0

    def start(self) -> None:
        """A batch has arrived."""
        now = time.perf_counter()
        if self._ended is not None:
            self._waited += now - self._ended
        self._since = self._since or now
        self._marks.append([])
        self.mark()

    def mark(self) -> None:
        """A part ends here: forward, backward, optimizer in turn."""
        if self._marks:
            self._marks[-1].append(_event(self.device))

    def end(self, tokens: int, rows: int, flops: float) -> None:
        """The batch is done."""
        self.mark()
        self._ended = time.perf_counter()
        self._tokens, self._rows, self._flops = self._tokens + tokens, self._rows + rows, self._flops + flops

    def read(self, rate: float | None, ranks: int = 1) -> dict[str, float]:
        """tokens_per_s, supervised_rows_per_s and milliseconds a batch of each part since the last reading.

        Rates are those of all `ranks`, which have equal loads. With the matrix units' `rate` also mfu. On a GPU this
        waits for the last batch.
        """
        if not self._marks or self._since is None:
            return {}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self._since
        found = {"tokens_per_s": ranks * self._tokens / seconds, "supervised_rows_per_s": ranks * self._rows / seconds}
        if rate is not None and self._flops:
            found["mfu"] = self._flops / seconds / rate
        whole = [marks for marks in self._marks if len(marks) == len(PARTS)]
        found["time/data_ms"] = 1e3 * self._waited / len(self._marks)
        for number, part in enumerate(PARTS[1:]):
            spent = [_between(marks[number], marks[number + 1]) for marks in whole]
            found[f"time/{part}_ms"] = sum(spent) / max(len(spent), 1)
        self._marks.clear()
        self._waited, self._tokens, self._rows, self._flops = 0.0, 0, 0, 0.0
        self._since = self._ended = time.perf_counter()
        return found


def _event(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(start: Any, stop: Any) -> float:
    return 1e3 * (stop - start) if isinstance(start, float) else start.elapsed_time(stop)
