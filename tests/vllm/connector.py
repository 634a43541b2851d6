"""vLLM's own extraction of hidden states, made to work on a CPU: the independent reference of these tests.

`ExampleHiddenStatesConnector` copies through pinned memory on a stream; here it saves at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # type: ignore[import-not-found]
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CPUHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Saves synchronously, without pinned memory."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).clone().contiguous()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        self._req_copy_events[pending.req_id] = Done()
        saved = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        self._write_tensors(saved, Done(), pending.filename, self._lock_fds.pop(pending.req_id, None))


def options(folder: Path, layer_ids: list[int]) -> dict[str, Any]:
    """Engine options that make vLLM extract the states of these layers itself, into `folder`."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "CPUHiddenStatesConnector",
            "kv_connector_module_path": "tests.vllm.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


def extracted(folder: Path) -> dict[tuple[int, ...], torch.Tensor]:
    """What vLLM extracted: states [T, K, H] by token ids."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for path in folder.rglob("*.safetensors"):
        saved = load_file(path)
        found[tuple(saved["token_ids"].tolist())] = saved["hidden_states"]
    return found
