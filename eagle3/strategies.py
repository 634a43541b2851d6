"""How training spreads over several GPUs: gradients averaged (ddp), or everything in shards (fsdp2) (walk: step 6).

Both are Lightning strategies that a configuration names in `hardware.training_strategy`; any name or strategy that
Lightning knows works there too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from eagle3.drafter import DraftHead, Eagle3Drafter

STRATEGY = "fsdp2"


def strategy_named(name: str) -> Any:
    """What the Trainer is given for a name of `hardware.training_strategy`."""
    if name == "ddp":  # without a copy of every gradient
        return DDPStrategy(gradient_as_bucket_view=True)
    return ShardedStrategy() if name == STRATEGY else name


class ShardedStrategy(DDPStrategy):
    """FSDP2, torch's `fully_shard`: each rank keeps its part of fp32 weights, gradients and moments.

    The whole fp32 weights are gathered for a step and its gradients are summed in fp32: the arithmetic is DDP's.
    Checkpoints hold whole tensors, the same whatever the strategy and the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: dict[str, Tensor] = {}

    def configure_ddp(self) -> None:
        """Shards the drafter; the frozen embedding and teacher stay whole."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        drafter = self._drafter()
        # The head by itself: it travels behind the unroll, both ways.
        head = fully_shard(drafter.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        whole = fully_shard(drafter, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        whole.set_modules_to_forward_prefetch([head])

    def _drafter(self) -> Eagle3Drafter:
        drafter = getattr(self.lightning_module, "drafter", None)
        assert isinstance(drafter, Eagle3Drafter)
        return drafter

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Gathers when the drafter's forward is called; so nothing is wrapped around the module itself."""
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights, on every rank."""
        return _whole(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Whole moments, on every rank."""
        return _whole(super().optimizer_state(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of whole moments."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            state = {number: _like(params[number], values) for number, values in saved["state"].items()}
            optimizer.load_state_dict({**saved, "state": state})

    def on_train_end(self) -> None:
        """Gathers the whole weights; here and not in `teardown`, which a rank may also reach alone, by an error."""
        super().on_train_end()
        self._trained = _whole(dict(self._drafter().named_parameters()))

    def teardown(self) -> None:
        """Leaves a whole drafter behind, on every rank."""
        drafter = self._drafter() if self._trained else None
        super().teardown()
        if drafter is not None:  # the sharded head asks the other ranks for its weight, which may be gone
            old = drafter.lm_head
            drafter.lm_head = DraftHead(old.in_features, old.out_features, bias=False, device="meta")
        for name, tensor in self._trained.items():
            parent, _, last = name.rpartition(".")
            assert drafter is not None
            setattr(drafter.get_submodule(parent), last, nn.Parameter(tensor))


def _whole(state: Any) -> Any:
    """Whole tensors in the place of parts; all ranks must take part."""

    def gathered(value: Any) -> Any:
        return value.full_tensor().detach().cpu() if isinstance(value, DTensor) else value

    return tree_map(gathered, state)


def _like(param: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's values for a parameter, those of its size cut as it is."""
    if not isinstance(param, DTensor):
        return dict(values)
    return {
        key: distribute_tensor(value.to(param.device), param.device_mesh, param.placements)
        if isinstance(value, Tensor) and value.shape == param.shape
        else value
        for key, value in values.items()
    }
