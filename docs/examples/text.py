"""What the framework examples train on: a tiny Llama, and sequences that can be learned."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 32


def make_model() -> LlamaForCausalLM:
    """A Llama of 22,688 parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_dataset(size: int = 24, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards, each from another token."""
    tokens = [(torch.arange(length) + start) % VOCABULARY for start in range(size)]
    return [{"input_ids": row, "labels": row} for row in tokens]
