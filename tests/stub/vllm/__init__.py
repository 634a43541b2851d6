"""A small vllm of our own, which starts at once: states are the token's id plus an eighth of the layer's, an answer is
the sum of its prompt's ids and its seed."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

__version__ = "0.32.0"
NUMBER = (int(os.environ["VLLM_PORT"]) - 5000) // 100


def wait_for_word() -> None:
    """For a minute at most, so that nothing waits for ever."""
    ends = time.monotonic() + 60
    while not os.path.exists(os.environ["STUB_WORD"]) and time.monotonic() < ends:
        time.sleep(0.02)


ACTS = {397: lambda: os.kill(os.getpid(), 9), 398: wait_for_word, 399: lambda: time.sleep(600)}


class SamplingParams:
    def __init__(self, **values: Any) -> None:
        self.values = values


class Completion:
    finish_reason = "length"

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


class Output:
    finished = True

    def __init__(self, request_id: str, token_ids: list[int]) -> None:
        self.request_id, self.outputs = request_id, [Completion(token_ids)]


class LLM:
    """Its own engine, and its own only worker with the methods of our extension."""

    def __init__(self, **arguments: Any) -> None:
        self.llm_engine, self.batch_tokens = self, arguments["max_num_batched_tokens"]
        self.requests: list[tuple[str, list[int], SamplingParams]] = []
        print("Using FLASH_ATTN MLA prefill backend.", flush=True)
        exec(os.environ["STUB_LOAD"])

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self.requests.append((request_id, prompt, params))

    def step(self) -> list[Output]:
        name, ids, params = self.requests.pop(0)
        if len(set(ids[-2:])) == 1 and ids[-1] in ACTS:
            ACTS[ids[-1]]()
        if name.startswith("shard-"):
            time.sleep(0.004)
            self.write(name, np.array(ids))
        else:
            print("answered", flush=True)
        return [Output(name, [sum(ids), params.values.get("seed") or 0][: params.values["max_tokens"]])]

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        return [getattr(self, method)(*args)]

    def eagle3_describe(self, adapter: str) -> dict[str, Any]:
        found = {"rank": 0, "model_class": "Stub", "layer_class": "Layer", "num_layers": 6, "runner": "none"}
        found |= {"device": "cpu", "dtype": "float32", "quantization": None, "max_model_len": 256}
        found |= {"batch_tokens": self.batch_tokens, "prefix_caching": False}
        found |= {"memory_total_bytes": 0, "context_bytes": 0}
        return {**found, "backends": {"attention_backend": "CPU_ATTN"}}

    def eagle3_arm(self, adapter: str, layer_ids: list[int], settings: dict[str, Any]) -> None:
        self.layer_ids, self.width = layer_ids, settings["hidden_size"]
        self.shards: dict[str, dict[str, Any]] = {}
        self.finished: list[dict[str, Any]] = []
        self.rows = self.bytes = 0

    def eagle3_open(self, shards: list[dict[str, Any]]) -> None:
        self.shards.update((shard["key"], {**shard, "parts": [], "left": len(shard["members"])}) for shard in shards)

    def write(self, name: str, ids: Any) -> None:
        """The states of a document, whose request is named after its shard and its place there."""
        key, _, member = name.rpartition("-")
        shard = self.shards[key]
        first_row = shard["first_rows"][shard["members"].index(int(member))]
        for k in self.layer_ids:
            data = np.repeat(ids[:, None] + k / 8, self.width, 1).astype(np.float32).tobytes()
            path, start = shard["files"][str(k)]
            with open(path, "r+b") as file:
                file.seek(start + first_row * 4 * self.width)
                file.write(data)
            shard["parts"].append([k, int(member), 0, len(ids), zlib.crc32(data)])
            self.bytes += len(data)
        self.rows += len(ids)
        shard["left"] -= 1
        if not shard["left"]:
            self.finished.append({"key": key, "rejected": [], "parts": shard["parts"]})

    def eagle3_poll(self) -> dict[str, Any]:
        finished, self.finished = self.finished, []
        counts = {"rows": self.rows, "rows_written": self.rows, "bytes": self.bytes, "ring_bytes": 1}
        seconds = {"model_s": self.rows / 1000, "copy_s": 0.0, "wait_s": 0.0, "write_s": 0.0}
        return {"finished": finished, "failure": None, "open_samples": 0, **counts, **seconds}

    def eagle3_disarm(self) -> dict[str, Any]:
        return {**self.eagle3_poll(), "working_bytes": 0, "needed_bytes": 0, "device_bytes": 0, "key_value_bytes": 0}
