"""What the strategies leave behind; losses and weights of several ranks: test_train, tests/gpu."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

from eagle3.drafter import Eagle3Drafter
from eagle3.strategies import ShardedStrategy
from eagle3.trainer import quiet_lightning
from tests.drafters import make_document, make_shape, pack


class Module(LightningModule):
    def __init__(self, drafter: Eagle3Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        def step() -> torch.Tensor:
            tokens = (batch.input_ids, batch.hidden_states, batch.position_ids)
            outputs = self.drafter.unroll(*tokens, batch.slots, batch.blocks)
            return self.drafter.lm_head(outputs, lambda rows: (rows @ self.drafter.lm_head.weight.T).square().mean())

        return self.drafter(step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.drafter.parameters(), lr=0.1)


def train_and_draft(rank: int, port: int) -> None:
    """One of two ranks; the other one is gone when it drafts."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    torch.manual_seed(0)
    shape = make_shape()
    drafter = Eagle3Drafter(shape, torch.randn(shape.vocab_size, shape.hidden_size))
    drafter.initialise(0)
    names, before = list(drafter.state_dict()), drafter.lm_head.weight.detach().clone()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    batch: Any = pack([make_document(shape, [(3, 9)], 12, seed=0)], 3)
    loader: Any = DataLoader([batch] * 2, batch_size=None)  # pyright: ignore[reportArgumentType]
    with quiet_lightning():
        trainer = Trainer(
            **quiet,
            accelerator="cpu",
            devices=2,
            strategy=ShardedStrategy(),
            max_steps=2,
            enable_checkpointing=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Module(drafter), loader)
    torch.distributed.destroy_process_group()
    if rank == 1:
        return
    assert list(drafter.state_dict()) == names
    assert drafter.lm_head.weight.shape == before.shape
    assert not torch.equal(drafter.lm_head.weight, before)
    columns = (batch.input_ids, drafter.fuse(batch.hidden_states), batch.position_ids)
    features, logits = drafter.extend(drafter.new_cache(), *columns)
    torch.testing.assert_close(logits, drafter.norm(features) @ drafter.lm_head.weight.T)


@pytest.mark.slow
def test_a_drafter_that_was_trained_in_shards_is_whole_and_drafts_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn(train_and_draft, (port,), nprocs=2)
