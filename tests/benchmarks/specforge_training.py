"""SpecForge's own training of a drafter, on states that eagle3 has stored, as `acceptance_peer` compares it.

Its draft model, its unroll and loss (7 steps, decay 0.8), its optimizer and schedule, unpatched but for speed: its sdpa
attention, nothing compiled. Its rules for the mask and for the mean over a padded batch are part of it. Needs
`pip install --no-deps specforge==0.2.0`, and triton.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.checkpoint import Target
from eagle3.drafter import DrafterShape
from eagle3.vocab import VocabMap
from tests.drafters import Document

STEPS = 7  # its ttt_length


class SpecForgeTraining:
    """A drafter of `shape` for `target`, over `vocab`'s draft vocabulary, trained for `steps` batches from `seed`."""

    def __init__(
        self, shape: DrafterShape, target: Target, vocab: VocabMap, steps: int, lr: float, seed: int, device: str
    ) -> None:
        import specforge.algorithms.eagle3.model as eagle3_model
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from specforge.modeling.target.target_head import TargetHead
        from specforge.optimizer import BF16Optimizer
        from specforge.training.strategies.base import Eagle3TrainStrategy
        from transformers import LlamaConfig

        torch.compiler.set_stance("force_eager")
        torch.cuda.empty_cache = lambda: None  # called in every step, and slow
        if device == "cpu":  # its loss kernel needs a GPU; this is the formula beside it
            eagle3_model.LogSoftmaxLoss = _EagerLoss
        self.device = device
        torch.manual_seed(seed)
        config: Any = LlamaConfig(
            architectures=["LlamaForCausalLMEagle3"],
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            num_hidden_layers=1,
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.max_position_embeddings,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=False,
            pad_token_id=0,
        )
        config.draft_vocab_size, config.pretraining_tp = shape.draft_vocab_size, 1
        self.draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        self.draft.load_embedding(str(target.folder), target.adapter.weight_names.embedding)
        self.draft.t2d.copy_(vocab.t2d)
        self.draft.d2t.copy_(vocab.d2t)
        self.draft.freeze_embedding()
        self.draft = self.draft.to(device, torch.bfloat16)
        model = eagle3_model.OnlineEagle3Model(self.draft, length=STEPS, attention_backend="sdpa").to(device)
        head = TargetHead.__new__(TargetHead)  # its constructor wants a checkpoint whose head is not tied
        torch.nn.Module.__init__(head)
        weight = target.head()
        head.fc = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=device, dtype=torch.bfloat16)
        head.fc.weight.data.copy_(weight)
        head.freeze_weights()
        head.config = types.SimpleNamespace(vocab_size=len(weight))
        self.strategy = Eagle3TrainStrategy(model, target_head=head)
        self.optimizer = BF16Optimizer(self.draft, lr=lr, total_steps=steps)
        self.final_norm = target.teacher_head().to(device).normed

    def batch(self, documents: Sequence[Document]) -> Any:
        """Documents as rows, padded to the longest; states as its capture stores them, the last ones normed."""
        from specforge.runtime.contracts import TrainBatch

        size = (len(documents), max(len(document.input_ids) for document in documents))
        ids = torch.zeros(size, dtype=torch.long, device=self.device)
        present, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        width = documents[0].final_states.shape[1]
        states = torch.zeros(*size, len(documents[0].hidden_states) * width, dtype=torch.bfloat16, device=self.device)
        final = torch.zeros(*size, width, dtype=torch.bfloat16, device=self.device)
        for row, document in enumerate(documents):
            length = len(document.input_ids)
            ids[row, :length] = torch.as_tensor(document.input_ids)
            mask[row, : length - 1] = torch.as_tensor(document.loss_mask[:-1])  # its capture drops a row's last
            present[row, :length] = 1
            states[row, :length] = torch.cat([x.to(self.device) for x in document.hidden_states], dim=-1)
            final[row, :length] = self.final_norm(document.final_states.to(self.device, torch.float32))
        return TrainBatch(
            sample_ids=[document.sample_id for document in documents],
            strategy="eagle3",
            tensors={
                "input_ids": ids,
                "attention_mask": present,
                "loss_mask": mask,
                "target": final,
                "hidden_state": states,
            },
            metadata={"target_repr": "hidden_state"},
        )

    def step(self, documents: Sequence[Document]) -> Tensor:
        """One optimizer step; the loss, detached."""
        loss = self.strategy.forward_loss(self.batch(documents)).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def save(self, folder: Path) -> None:
        """The folder that SpecForge publishes: config.json and bf16 weights."""
        self.draft.save_pretrained(folder)


class _EagerLoss:
    """What SpecForge's loss kernel computes."""

    @staticmethod
    def apply(logits: Tensor, target_p: Tensor, position_mask: Tensor) -> Tensor:
        return -(position_mask * target_p * torch.log_softmax(logits.float(), 2)).sum(2).mean()
