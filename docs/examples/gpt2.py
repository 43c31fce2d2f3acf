"""A job for `cotrain-compile trace`: a training step of GPT-2.

cotrain-compile trace docs/examples/gpt2.py:gpt2_124m -o gpt2.json
cotrain-compile solve gpt2.json --machine rtx4090 --memory-budget 6GiB -o plan.json
"""

from training import Job, training_step
from transformers import GPT2Config, GPT2LMHeadModel

# As for pretraining: no dropout.
GPT2_124M = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)


def gpt2_124m() -> Job:
    """GPT-2 small, 124,439,808 parameters (head and embedding tied), batch 8 x 1024."""
    return training_step(GPT2LMHeadModel(GPT2_124M), batch=8, length=1024)
