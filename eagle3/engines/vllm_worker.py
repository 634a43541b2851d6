"""What runs inside each vLLM worker: a worker extension that taps the decoder layers (step 3 of the walk).

vLLM mixes `CaptureExtension` into its worker class (`worker_extension_cls`) and calls its methods by name
(`collective_rpc`): both are public and stood in all versions from 0.11 to 0.33. Only small messages pass; states go to
files from here. The hooks sit on the causal language model around the inner model, which is not called through its
`__call__` where vLLM may compile it, and on the decoder layers. They are there only while a capture is armed, so that
profiling, warm-up and generation are untouched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eagle3.adapter import Adapter
from eagle3.engines.backends import model_backends
from eagle3.engines.recorder import Recorder
from eagle3.engines.stalls import DiskWatch
from eagle3.errors import EngineError


class Tap:
    """Forward hooks that hand a recorder the token ids, the positions and the states of every batch.

    An error in one of them ends the capture, by the recorder, and leaves the engine as it is.
    """

    def __init__(self, model: nn.Module, adapter: Adapter, layer_ids: list[int], recorder: Recorder) -> None:
        self.adapter, self.recorder = adapter, recorder
        layers = adapter.layers(model)
        if max(layer_ids) > len(layers):
            raise EngineError(f"layer id {max(layer_ids)} was asked for, but {type(model).__name__} has {len(layers)}")
        owner = language_model(model, adapter)
        self._signatures = {"model": inspect.signature(owner.forward), "layer": inspect.signature(layers[0].forward)}
        self._handles = [
            owner.register_forward_pre_hook(self._guarded(self._begin), with_kwargs=True),
            owner.register_forward_hook(self._guarded(self._end)),
        ]
        for number, k in enumerate(layer_ids):
            # Id k is what layer k-1 hands on; only the embedding has no layer before it.
            if k == 0:
                hook = self._guarded(self._embedding(number))
                self._handles.append(layers[0].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(layers[k - 1].register_forward_hook(self._guarded(self._state(number))))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def guarded(*given: Any) -> None:
            try:
                hook(*given)
            except Exception as error:
                self.recorder.fail(error)

        return guarded

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signatures["model"].bind(*args, **kwargs).arguments
        self.recorder.begin(given.get("input_ids"), given["positions"])

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.recorder.end()

    def _embedding(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(number, self._signatures["layer"].bind(*args, **kwargs).arguments["hidden_states"])

        return hook

    def _state(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._keep(number, output)

        return hook

    def _keep(self, number: int, output: Any) -> None:
        wanted = self.recorder.wanted(number)
        if wanted is None:
            return
        first, last = wanted
        parts = output if isinstance(output, tuple) else (output,)
        rows = self.recorder.batch_rows_now
        if any(part is not None and len(part) != rows for part in parts):
            shapes = [tuple(part.shape) for part in parts if part is not None]
            raise EngineError(
                f"a layer handed on {shapes} in a batch of {rows} tokens: the engine shards tokens between layers; "
                "set hardware.engine_options.enable_expert_parallel=false"
            )
        # Only this rank's rows are summed and copied.
        cut = tuple(None if part is None else part[first:last] for part in parts)
        self.recorder.keep(number, self.adapter.residual(cut if isinstance(output, tuple) else cut[0]))


class CaptureExtension:
    """Mixed into vLLM's worker. Every name starts with eagle3_, since a clash with the worker's own is refused."""

    def eagle3_describe(self, adapter: str) -> dict[str, Any]:
        """What this worker holds: model class, layers, backends, dtypes, bytes of weights and of its device."""
        worker: Any = self
        model = worker.model_runner.get_model()
        family = load_adapter(adapter)
        layers = family.layers(model)
        tensors = [*model.parameters(), *model.buffers()]
        device = next(model.parameters()).device
        cuda = device.type == "cuda"
        free, total = torch.cuda.mem_get_info(device) if cuda else (0, 0)
        return {
            "rank": int(worker.rank),
            "model_class": type(model).__name__,
            "layer_class": type(layers[0]).__name__,
            "num_layers": len(layers),
            "runner": f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__name__}",
            "device": torch.cuda.get_device_name(device) if cuda else str(device),
            "dtype": str(worker.model_config.dtype).removeprefix("torch."),
            "quantization": worker.model_config.quantization,
            "max_model_len": int(worker.model_config.max_model_len),
            "batch_tokens": int(worker.scheduler_config.max_num_batched_tokens),
            "prefix_caching": bool(worker.cache_config.enable_prefix_caching),
            "weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            "memory_total_bytes": total,
            "context_bytes": total - free - torch.cuda.memory_reserved(device) if cuda else 0,
            "backends": model_backends(model, worker.model_config.quantization),
        }

    def eagle3_arm(self, adapter: str, layer_ids: list[int], settings: dict[str, Any]) -> None:
        """Starts a capture of `layer_ids` (ascending). Settings: hidden_size, dtype, rotation, slots, writers,
        and the address and seconds of a DiskWatch.

        A rotation of j makes rank r take the part of rank r + j, so that two captures show whether ranks agree.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        world = int(worker.parallel_config.tensor_parallel_size)
        recorder = Recorder(
            list(layer_ids),
            batch_rows=int(worker.scheduler_config.max_num_batched_tokens),
            hidden_size=int(settings["hidden_size"]),
            dtype=getattr(torch, settings["dtype"]),
            device=next(model.parameters()).device,
            rank=(int(worker.rank) + int(settings["rotation"])) % world,
            world=world,
            slots=int(settings["slots"]),
            writers=int(settings["writers"]),
            watch=DiskWatch(int(worker.rank), settings["address"], float(settings["say_s"])),
        )
        worker.eagle3_tap = Tap(model, load_adapter(adapter), list(layer_ids), recorder)
        if recorder.cuda:
            torch.cuda.reset_peak_memory_stats(recorder.device)
            worker.eagle3_allocated = torch.cuda.memory_allocated(recorder.device)

    def eagle3_open(self, shards: list[dict[str, Any]]) -> None:
        """Expects the samples of these shards (see Recorder.open)."""
        worker: Any = self
        for shard in shards:
            worker.eagle3_tap.recorder.open(shard)

    def eagle3_poll(self) -> dict[str, Any]:
        """What became of the capture so far (see Recorder.poll)."""
        worker: Any = self
        return worker.eagle3_tap.recorder.poll()

    def eagle3_disarm(self) -> dict[str, Any]:
        """Ends the capture: hooks off, everything in flight written; the last poll's answer.

        `working_bytes` is the most device memory that batches took on top of what was allocated before, `needed_bytes`
        the most that was needed of the device for everything, `device_bytes` all that is taken of it now, with what the
        allocator keeps for later; all are 0 on a CPU. `key_value_bytes` is what the engine has reserved for keys and
        values.
        """
        worker: Any = self
        tap = worker.eagle3_tap
        tap.remove()
        tap.recorder.close()
        worker.eagle3_tap = None
        memory = {"working_bytes": 0, "needed_bytes": 0, "device_bytes": 0}
        if tap.recorder.cuda:
            free, total = torch.cuda.mem_get_info(tap.recorder.device)
            peak = torch.cuda.max_memory_allocated(tap.recorder.device)
            memory = {
                "working_bytes": peak - worker.eagle3_allocated,
                "needed_bytes": total - free - torch.cuda.memory_reserved(tap.recorder.device) + peak,
                "device_bytes": total - free,
            }
        return {**tap.recorder.poll(), **memory, "key_value_bytes": key_value_bytes(worker.model_runner)}


def load_adapter(name: str) -> Adapter:
    """The adapter of a "module:Class" name, which is what crosses to a worker."""
    module, _, member = name.partition(":")
    return getattr(importlib.import_module(module), member)()


def key_value_bytes(runner: Any) -> int:
    """Bytes that a model runner has reserved for keys and values; layers may share one storage."""
    entries = [each for entry in runner.kv_caches for each in (entry if isinstance(entry, list | tuple) else [entry])]
    storages = [entry.untyped_storage() for entry in entries]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def language_model(model: nn.Module, adapter: Adapter) -> nn.Module:
    """The causal language model that owns the inner model: `language_model` of `language_model.model.layers`."""
    found: Any = model
    for part in adapter.layers_path.split(".")[:-2]:
        found = getattr(found, part)
    missing = {"input_ids", "positions"} - set(inspect.signature(found.forward).parameters)
    if missing:
        raise EngineError(
            f"{type(found).__name__}.forward takes no {sorted(missing)}: this vLLM calls models otherwise"
        )
    return found
