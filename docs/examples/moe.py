"""A job for `cotrain-compile trace`: a mixture of experts with Mixtral's sizes.

cotrain-compile trace docs/examples/moe.py:moe_8x7b --dynamic -o moe.json

Each token goes to two of eight experts. Shapes do not depend on the routing, so that the step can
be traced: an expert has room for 1.25 times its share of each sequence, and what is beyond is
dropped, as in GShard (Lepikhin et al., 2020).
"""

import torch
import torch.nn.functional as F
from torch import nn
from training import Job, training_step
from transformers import LlamaConfig, LlamaForCausalLM

EXPERTS, CHOSEN = 8, 2
MOE_8X7B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    use_cache=False,
)


class Experts(nn.Module):
    """In place of a Llama layer's MLP: eight of them, of which a router chooses two a token."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, EXPERTS, bias=False)
        self.gate = nn.Parameter(torch.empty(EXPERTS, hidden, inner))
        self.up = nn.Parameter(torch.empty(EXPERTS, hidden, inner))
        self.down = nn.Parameter(torch.empty(EXPERTS, inner, hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        room = x.shape[1] * CHOSEN * 5 // (EXPERTS * 4)
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        wanted = F.one_hot(chosen, EXPERTS).flatten(1, 2)
        place = wanted.cumsum(1) * wanted - 1  # its place in the room of its expert, else -1
        slots = torch.arange(room, device=x.device)
        taken = (place[..., None] == slots).unflatten(1, (-1, CHOSEN))
        combine = (weights[..., None, None] * taken).sum(2).to(x.dtype)
        rows = torch.einsum("bsec,bsd->ebcd", taken.any(2).to(x.dtype), x).flatten(1, 2)
        gate, up, down = (w.to(x.dtype) for w in (self.gate, self.up, self.down))
        made = (F.silu(rows @ gate) * (rows @ up)) @ down
        return torch.einsum("bsec,ebcd->bsd", combine, made.unflatten(1, (x.shape[0], room)))


def mixture(config: LlamaConfig) -> LlamaForCausalLM:
    """A Llama whose MLPs are experts."""
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = Experts(config.hidden_size, config.intermediate_size)
    return model


def moe_8x7b() -> Job:
    """Mixtral 8x7B's shape, 46,702,792,704 parameters, batch 1 x 2048."""
    return training_step(mixture(MOE_8X7B), batch=1, length=2048)
