"""Jobs for `cotrain-compile trace`: training steps of Llama shapes.

cotrain-compile trace docs/examples/llama.py:llama_7b -o llama_7b.json
cotrain-compile analyze llama_7b.json --machine h200
cotrain-compile solve llama_7b.json --machine h200 --memory-budget 80GiB -o plan.json
"""

from training import Job, training_step
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
    use_cache=False,
)
LLAMA_7B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    vocab_size=32000,
    use_cache=False,
)
LLAMA_13B = LlamaConfig(
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
    vocab_size=32000,
    use_cache=False,
)
LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=32000,
    use_cache=False,
)


def llama_1b() -> Job:
    """Llama 3.2 1B's shape, 1,235,814,400 parameters (head and embedding tied), batch 2 x 2048."""
    return training_step(LlamaForCausalLM(LLAMA_1B), batch=2, length=2048)


def llama_7b() -> Job:
    """Llama 2 7B's shape, 6,738,415,616 parameters, batch 4 x 2048."""
    return training_step(LlamaForCausalLM(LLAMA_7B), batch=4, length=2048)


def llama_13b() -> Job:
    """Llama 2 13B's shape, 13,015,864,320 parameters, batch 2 x 2048."""
    return training_step(LlamaForCausalLM(LLAMA_13B), batch=2, length=2048)


def llama_70b() -> Job:
    """Llama 2 70B's shape, 68,976,648,192 parameters, batch 1 x 2048."""
    return training_step(LlamaForCausalLM(LLAMA_70B), batch=1, length=2048)
