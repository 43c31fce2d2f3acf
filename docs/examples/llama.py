"""Jobs for `cotrain-compile trace`: training steps of Llama shapes.

cotrain-compile trace docs/examples/llama.py:llama_7b -o llama_7b.json
cotrain-compile analyze llama_7b.json --machine h200
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def training_step(config: LlamaConfig, batch: int, length: int) -> tuple[Callable, tuple[Any, ...]]:
    """AdamW with clipping, bfloat16 autocast, on `batch` sequences of `length` tokens."""
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (torch.randint(0, config.vocab_size, (batch, length)),)


def llama_1b() -> tuple[Callable, tuple[Any, ...]]:
    """Llama 3.2 1B's shape, batch 2 x 2048."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return training_step(config, batch=2, length=2048)


def llama_7b() -> tuple[Callable, tuple[Any, ...]]:
    """Llama 2 7B's shape, batch 4 x 2048."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    return training_step(config, batch=4, length=2048)
