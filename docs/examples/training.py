"""The training step that the example jobs share: AdamW with clipping, bfloat16 autocast."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Job = tuple[Callable[[torch.Tensor], torch.Tensor], tuple[Any, ...]]


def training_step(model: nn.Module, batch: int, length: int) -> Job:
    """A step of a causal language model on `batch` sequences of `length` tokens, and its tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (torch.randint(0, model.config.vocab_size, (batch, length)),)
