"""The target in Hugging Face transformers, in this process: for the CPU and for models that fit one GPU (step 3).

Capture uses forward hooks on the decoder layers that the adapter points to, so no forward pass is written twice.
Samples are padded on the right and no attention mask is passed: under causal attention no token can see what stands to
its right, so padding changes nothing, and the mask-free kernels are the fast ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle3.checkpoint import Target
from eagle3.config import HardwareConfig
from eagle3.engines import CapturedStates, EngineInfo, Generation, Prompt, check_engine, compute_dtype
from eagle3.engines.generation import Generator
from eagle3.engines.packed_linear import pack_linears
from eagle3.engines.padding import length_batches, pad
from eagle3.engines.taps import AllCaught, StateTaps
from eagle3.errors import EngineError, RequestError

if TYPE_CHECKING:
    from eagle3.tokens import Sample

NAME = "transformers"


class TransformersEngine:
    """The target model, loaded once. A context manager; `model` is the Hugging Face module in eval mode."""

    def __init__(self, target: Target, hardware: HardwareConfig) -> None:
        import transformers

        if hardware.threads is not None:
            torch.set_num_threads(hardware.threads)
        self.target, self.hardware = target, hardware
        self.device = torch.device("cpu" if hardware.accelerator == "cpu" else "cuda")
        self.dtype: torch.dtype = getattr(torch, compute_dtype(hardware, target))
        self.version = transformers.__version__
        self.model: Any = _load(target, self.dtype).to(self.device)
        self.layers = target.adapter.layers(self.model)
        # Renamed within transformers 5; the old name warns there, and the new one is unknown to older versions.
        known = inspect.signature(self.model.base_model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        if len(self.layers) != target.shape.num_layers:
            raise EngineError(
                f"{target.folder}: config.json says {target.shape.num_layers} layers, the loaded model has "
                f"{len(self.layers)}; is model.adapter={target.adapter.name} the right family?"
            )
        if self.device.type == "cpu":
            pack_linears(self.model)

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def info(self) -> EngineInfo:
        """What is loaded."""
        shape = self.target.shape
        return EngineInfo(
            name=NAME,
            version=self.version,
            model_class=type(self.model).__name__,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            details={"torch": str(torch.__version__), "threads": torch.get_num_threads()},
        )

    @torch.no_grad()
    def capture(self, samples: Sequence[Sample], layer_ids: Sequence[int]) -> Iterator[CapturedStates]:
        """Yields each sample's states, longest samples first; the head is never computed.

        Each state is a contiguous [T, H] slice on the CPU in the engine's dtype. Raises EngineError when a batch fails.
        """
        lengths = [len(sample.input_ids) for sample in samples]
        for batch in length_batches(lengths, self.hardware.batch_tokens):
            input_ids = pad([samples[i].input_ids for i in batch]).to(self.device)
            states = self._states(input_ids, layer_ids)
            for row, i in enumerate(batch):
                yield CapturedStates(samples[i].id, {k: state[row, : lengths[i]] for k, state in states.items()})

    def _states(self, input_ids: Tensor, layer_ids: Sequence[int]) -> dict[int, Tensor]:
        """The residual streams [B, T, H] of one padded batch at the given ids."""
        try:
            with (
                StateTaps(self.layers, self.target.adapter, layer_ids, leave_early=True) as caught,
                suppress(AllCaught),
            ):
                self.model.base_model(input_ids, use_cache=False)
        except RuntimeError as error:
            rows, width = input_ids.shape
            raise EngineError(
                f"hardware.batch_tokens={self.hardware.batch_tokens}: the target failed on {rows} samples of up to "
                f"{width} tokens ({type(error).__name__}: {error}); try a smaller hardware.batch_tokens"
            ) from error
        return {k: caught[k].to("cpu") for k in layer_ids}

    def generate(
        self, prompts: Sequence[Prompt], *, temperature: float, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[Generation]:
        """Yields finished continuations in any order; see `eagle3.engines.generation`."""
        return Generator(self, temperature=temperature, seed=seed, stop_ids=stop_ids).run(prompts)

    def forward_cached(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Hidden states [B, T, H] after the final norm of new tokens [B, T] at `positions` [B, T] on top of a cache.

        mask [1 or B, 1, T, columns of the cache] is added to the attention scores.
        """
        device = self.device
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        return self.model.base_model(
            input_ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device), **arguments
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of normed hidden states [..., H]."""
        return self.model.get_output_embeddings()(hidden)

    def close(self) -> None:
        """Frees the model."""
        self.model, self.layers = None, nn.ModuleList()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _load(target: Target, dtype: torch.dtype) -> Any:
    """The checkpoint as a causal language model in eval mode. RequestError when tensors are missing from it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    check_engine(target.adapter, NAME)
    transformers_logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        target.folder,
        dtype=dtype,
        # None, over what config.json asks for, is sdpa, and eager for a class that cannot have it (gpt-oss: sinks).
        attn_implementation=None,
        trust_remote_code=target.model.trust_remote_code,
        output_loading_info=True,
    )
    model, report = loaded
    if report["missing_keys"]:
        # transformers fills them with random numbers and goes on.
        missing = sorted(report["missing_keys"])
        raise RequestError(
            f"{target.folder}: {len(missing)} tensors of {type(model).__name__} are not in the checkpoint, first "
            f"{missing[0]}; fetch the checkpoint again"
        )
    return model.eval().requires_grad_(False)
