"""Trainings for a card that is not there: one small transformer in every precision and optimizer.

Built under fake tensors on "cuda"; torch is imported here, so `card.load()` comes before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

CARD = "cuda"
WIDTH, HEADS, TOKENS, VOCABULARY = 32, 2, 16, 64

Job = tuple[Callable[..., Any], tuple[Any, ...]]


class Attention(nn.Module):
    """Causal self-attention by torch's fused op."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.attention = Attention(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.attention(self.norm(x)))


class Transformer(nn.Module):
    """An embedding, which is the head as well, and one block: each parameter costs its update.

    The block is in a checkpoint if `checkpointed` says of which kind.
    """

    def __init__(self, checkpointed: str, dropout: float) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block(dropout)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.checkpointed:
            x = checkpoint(self.block, x, use_reentrant=self.checkpointed == REENTRANT)
        else:
            x = self.block(x)
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


# Optimizers.


class SignOfMomentum(Optimizer):
    """As Lion is written by hand: its state is made in the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                average = state["average"]
                update = average.mul(first).add(param.grad, alpha=1 - first).sign_()
                param.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(param.grad, alpha=1 - second)


class TrustedAdam(Optimizer):
    """As LAMB is written by hand: Adam without bias correction, scaled by a ratio of norms."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                    state["square"] = torch.zeros_like(param)
                mean = state["mean"].lerp_(param.grad, 1 - first)
                square = (
                    state["square"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                )
                update = mean / (square.sqrt() + group["eps"])
                ratio = param.norm() / (update.norm() + 1e-12)
                param.sub_(update * (ratio * group["lr"]))


def _muon(params: list[Tensor]) -> list[Optimizer]:
    """Muon for matrices, which it is defined for, and SGD for the rest."""
    matrices = [p for p in params if p.ndim == 2]
    rest = [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.05)]


def _lion(params: list[Tensor]) -> list[Optimizer]:
    lion = importlib.import_module("lion_pytorch")  # it ships no types
    return [lion.Lion(params, lr=1e-4)]


def _one(make: Callable[[list[Tensor]], Any]) -> Callable[[list[Tensor]], list[Optimizer]]:
    return lambda params: [make(params)]


OPTIMIZERS: dict[str, Callable[[list[Tensor]], list[Optimizer]]] = {
    "AdamW": _one(torch.optim.AdamW),
    "AdamW, fused": _one(lambda p: torch.optim.AdamW(p, fused=True)),
    "AdamW, capturable": _one(lambda p: torch.optim.AdamW(p, capturable=True)),
    "Adam": _one(lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.01)),
    "SGD": _one(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "RMSprop": _one(lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True)),
    "NAdam": _one(torch.optim.NAdam),
    "RAdam": _one(torch.optim.RAdam),
    "Adamax": _one(torch.optim.Adamax),
    "ASGD": _one(torch.optim.ASGD),
    "Rprop": _one(torch.optim.Rprop),
    "Adagrad": _one(torch.optim.Adagrad),
    "Adadelta": _one(torch.optim.Adadelta),
    "Adafactor": _one(torch.optim.Adafactor),
    "Muon": _muon,
    "lion-pytorch": _lion,
    "sign of momentum": _one(SignOfMomentum),
    "trusted Adam": _one(TrustedAdam),
}

REENTRANT = "reentrant"
CHECKPOINTS = (REENTRANT, "not reentrant")
PRECISIONS = ("float32", "bfloat16 weights", "bfloat16 autocast", "float16 scaled")


# Steps.


def transformer(precision: str, checkpointed: str = "", dropout: float = 0.0) -> nn.Module:
    """The model on the card, in the precision of its weights."""
    with torch.device(CARD), in_precision(precision == "bfloat16 weights"):
        return Transformer(checkpointed, dropout)


@contextmanager
def in_precision(low: bool) -> Iterator[None]:
    """Within it, new weights are in bfloat16 if `low`. Fake ones are not converted by `to`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if low else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, TOKENS), device=CARD)


def job(
    optimizer: str,
    precision: str,
    *,
    micro_batches: int = 1,
    checkpointed: str = "",
    dropout: float = 0.0,
) -> Job:
    """A step of the transformer and its arguments."""
    model = transformer(precision, checkpointed, dropout)
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    scaler = torch.amp.GradScaler(CARD, enabled=precision == "float16 scaled")
    low = {"bfloat16 autocast": torch.bfloat16, "float16 scaled": torch.float16}.get(precision)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(CARD, dtype=low) if low else nullcontext():
            return model(x, y)  # type: ignore[no-any-return]

    def step(x: Tensor, y: Tensor) -> Tensor:
        for one in made:
            one.zero_grad()
        total = torch.zeros((), device=CARD)
        for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = loss_of(part_x, part_y) / micro_batches
            scaler.scale(loss).backward()
            total = total + loss.detach()
        for one in made:
            scaler.unscale_(one)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in made:
            scaler.step(one)
        scaler.update()
        return total

    return step, (tokens(), tokens())


def every_optimizer_job() -> Job:
    """One small layer for each optimizer, all in one step."""
    with torch.device(CARD):
        # Muon leaves all but matrices to another optimizer, which needs one parameter.
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n == "Muon") for n in OPTIMIZERS)
    makers = zip(layers, OPTIMIZERS.values(), strict=True)
    made = [one for layer, make in makers for one in make(list(layer.parameters()))]

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.tanh(layer(x))
        loss = x.square().mean()
        loss.backward()
        for one in made:
            one.step()
            one.zero_grad()
        return loss

    return step, (torch.randn(8, WIDTH, device=CARD),)


def readme_job() -> Job:
    """The step of README.md, as it stands there."""
    with torch.device(CARD):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (torch.randn(8, 16, device=CARD), torch.randint(0, 4, (8,), device=CARD))


def install_flash_package() -> None:
    """From here on, this process finds a package called flash_attn."""
    from transformers.utils import import_utils

    sys.path.append(str(Path(__file__).parents[1] / "support" / "packages"))
    import_utils._package_distribution_mapping.cache_clear()
    import_utils.is_flash_attn_2_available.cache_clear()


def llama_job(optimizer: str = "AdamW", checkpointed: str = "", attention: str = "sdpa") -> Job:
    """A Hugging Face Llama in bfloat16 autocast, its layers in checkpoints of that kind, if any."""
    from transformers import LlamaConfig, LlamaForCausalLM

    by_package: dict[str, Any] = {}
    if attention == "flash_attention_2":
        install_flash_package()
        by_package = {"attn_implementation": attention, "dtype": torch.bfloat16}

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        use_cache=False,
        **by_package,
    )
    with torch.device(CARD):
        model = LlamaForCausalLM(config)
    if checkpointed:
        how = {"use_reentrant": checkpointed == REENTRANT}
        model.gradient_checkpointing_enable(how)  # type: ignore[no-untyped-call]
    (made,) = OPTIMIZERS[optimizer](list(model.parameters()))

    def step(x: Tensor, y: Tensor) -> Tensor:
        made.zero_grad()
        with torch.autocast(CARD, dtype=torch.bfloat16):
            loss = model(input_ids=x, labels=y).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return loss  # type: ignore[no-any-return]

    return step, (tokens(), tokens())


def package_job(packed: bool) -> Job:
    """Attention by FlashAttention's own package, of two sequences in a row or one behind another.

    Two heads share a key.
    """
    from tests.support import flash_package

    head = WIDTH // HEADS
    with torch.device(CARD):
        inputs, output = nn.Linear(WIDTH, (HEADS + 2) * head), nn.Linear(WIDTH, WIDTH)
        starts = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
    params = [*inputs.parameters(), *output.parameters()]
    optimizer = torch.optim.AdamW(params)

    def attention(x: Tensor) -> Tensor:
        q, k, v = inputs(x).unflatten(-1, (-1, head)).split([HEADS, 1, 1], -2)
        if not packed:
            return flash_package.flash_attn_func(q, k, v, causal=True)
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        mixed = flash_package.flash_attn_varlen_func(
            q, k, v, starts, starts, TOKENS, TOKENS, causal=True
        )
        return mixed.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(CARD, dtype=torch.bfloat16):
            loss: Tensor = output(attention(x).flatten(-2)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.randn(2, TOKENS, WIDTH, device=CARD),)


def flex_job() -> Job:
    """Attention by `flex_attention`, whose scores are biased, behind a branch that data chooses."""
    with torch.device(CARD):
        layer = nn.Linear(WIDTH, 3 * WIDTH)
    optimizer = torch.optim.AdamW(layer.parameters())

    def biased(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + (query - key)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        parts = layer(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = flex_attention(query, key, value, score_mod=biased)
        chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (mixed,))
        loss: Tensor = chosen.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.randn(2, TOKENS, WIDTH, device=CARD),)
