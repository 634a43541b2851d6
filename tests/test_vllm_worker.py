"""The hooks of the worker extension on toy models that call themselves as vLLM's do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eagle3.adapters.llama import LlamaAdapter
from eagle3.engines.recorder import Recorder
from eagle3.engines.vllm_worker import Tap, key_value_bytes, language_model, load_adapter
from eagle3.errors import EngineError
from eagle3.shards import ShardWriter
from tests.test_recorder import HIDDEN, LAYERS, LAYOUT, make_plan, make_samples, settle, start_ranks

ADDED = 10.0


class Layer(nn.Module):
    """Adds a constant of its own; hands on (hidden, residual), whose sum is the stream, or the stream alone."""

    def __init__(self, number: int, pair: bool, rows_lost: int) -> None:
        super().__init__()
        self.number, self.pair, self.rows_lost = number, pair, rows_lost

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        stream = hidden_states if residual is None else hidden_states + residual
        stream = stream[self.rows_lost :] + ADDED**self.number
        return (stream / 4, stream * 3 / 4) if self.pair else stream


class Inner(nn.Module):
    def __init__(self, count: int, pair: bool, rows_lost: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, pair, rows_lost) for number in range(count))

    def forward(self, input_ids: Tensor | None, positions: Tensor) -> Tensor:
        ids = torch.zeros(len(positions)) if input_ids is None else input_ids
        hidden: Any = ids.float()[:, None] + torch.zeros(HIDDEN)
        residual = None
        for layer in self.layers:
            given = layer(positions, hidden, residual)
            hidden, residual = given if isinstance(given, tuple) else (given, None)
        return hidden


class Toy(nn.Module):
    """The causal language model around it, which calls `forward` of the inner one directly, as compiled ones are."""

    def __init__(self, count: int = 5, pair: bool = True, rows_lost: int = 0) -> None:
        super().__init__()
        self.model = Inner(count, pair, rows_lost)

    def forward(self, input_ids: Tensor | None, positions: Tensor) -> Tensor:
        return self.model.forward(input_ids, positions)


class Broken(LlamaAdapter):
    def residual(self, output: Any) -> Tensor:
        raise ValueError


def tapped(tmp_path: Path, model: nn.Module, adapter: LlamaAdapter, **batch: Any) -> tuple[ShardWriter, Recorder, Any]:
    """One batch of one sample of five tokens through the model, recorded."""
    samples = make_samples([5])
    writer = ShardWriter(tmp_path, LAYOUT, make_plan(samples), LAYERS)
    (recorder,) = start_ranks(writer, samples, 1)
    tap = Tap(model, adapter, list(LAYERS), recorder)
    ids = torch.from_numpy(samples[0].input_ids.astype(np.int64))
    model(**{"input_ids": ids, "positions": torch.arange(5), **batch})
    tap.remove()
    return writer, recorder, samples


@pytest.mark.parametrize("pair", [True, False])
def test_the_state_of_an_id_is_what_enters_that_layer(tmp_path: Path, pair: bool) -> None:
    """E7: id 0 is the embedding, id k what k layers have added to it, id n the last one; sums or streams alike."""
    writer, recorder, samples = tapped(tmp_path, Toy(pair=pair), LlamaAdapter())
    settle(writer, samples, [recorder])
    for k in LAYERS:
        added = sum(ADDED**number for number in range(k))
        assert torch.equal(writer.files[k].read(0, 5)[:, 0], torch.from_numpy(samples[0].input_ids).float() + added)


def test_hooks_are_gone_after_a_capture(tmp_path: Path) -> None:
    model = Toy()
    writer, recorder, samples = tapped(tmp_path, model, LlamaAdapter())
    model(torch.arange(3), torch.arange(3))
    settle(writer, samples, [recorder])
    assert recorder.poll()["rows"] == 5


def test_an_error_in_a_hook_names_type_and_batch_and_leaves_the_engine_alone(tmp_path: Path) -> None:
    """An exception without a message is never empty, and the model's forward goes on."""
    _, recorder, _ = tapped(tmp_path, Toy(), Broken())
    recorder.close()
    failure = recorder.poll()["failure"]
    assert failure["message"] == "ValueError in a batch of 5 rows: no message"
    assert "in residual" in failure["traceback"]


def test_tokens_that_the_engine_shards_between_layers_are_refused(tmp_path: Path) -> None:
    _, recorder, _ = tapped(tmp_path, Toy(rows_lost=1), LlamaAdapter())
    recorder.close()
    assert "in a batch of 5 tokens: the engine shards tokens between layers" in recorder.poll()["failure"]["message"]


def test_embeddings_instead_of_ids_are_refused(tmp_path: Path) -> None:
    _, recorder, _ = tapped(tmp_path, Toy(), LlamaAdapter(), input_ids=None)
    recorder.close()
    assert "language_model_only=true" in recorder.poll()["failure"]["message"]


def test_what_cannot_be_tapped_is_said() -> None:
    recorder: Any = None
    with pytest.raises(EngineError, match="layer id 6 was asked for, but Toy has 5"):
        Tap(Toy(), LlamaAdapter(), [6], recorder)
    with pytest.raises(EngineError, match=r"Linear.forward takes no \['input_ids', 'positions'\]"):
        language_model(nn.Linear(1, 1), LlamaAdapter())
    assert isinstance(load_adapter("eagle3.adapters.llama:LlamaAdapter"), LlamaAdapter)


def test_keys_and_values_that_layers_share_count_once() -> None:
    whole = torch.zeros(100, dtype=torch.bfloat16)
    runner = SimpleNamespace(kv_caches=[whole[:60], [whole[60:], torch.zeros(8)], torch.zeros(3)])
    assert key_value_bytes(runner) == 200 + 32 + 12
