"""Layers whose widest values can be made part after part, and some that cannot, as small steps.

A `Layers` by name in; out come its model, a step of SGD and a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SEQUENCES, TOKENS, WIDTH, HEADS = 3, 40, 16, 4


class Attention(nn.Module):
    """Attention as products and a softmax, over sequences of which each may have its own mask."""

    def __init__(self, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.masked, self.dropout = masked, dropout

    def forward(self, x: Tensor) -> Tensor:
        shape = SEQUENCES, TOKENS, HEADS, WIDTH // HEADS
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * 0.5
        if self.masked:
            first = torch.arange(TOKENS) <= torch.arange(TOKENS)[:, None]
            lengths = TOKENS - torch.arange(SEQUENCES)
            mask = first & (torch.arange(TOKENS) < lengths[:, None])[:, None]
            scores = scores + torch.where(mask, 0.0, -1e9)[:, None]
        weights = F.dropout(scores.softmax(-1), self.dropout)
        return self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def turned(each: Tensor) -> Tensor:
    """As rotary embeddings turn halves of a head."""
    one, other = each.chunk(2, -1)
    return torch.cat([-other, one], -1)


class FusedAttention(nn.Module):
    """Attention by a fused kernel: of turned heads, which may share keys, from one product or 3."""

    def __init__(
        self,
        groups: int = 1,
        *,
        one_product: bool = False,
        masked: bool = False,
        dropout: float = 0,
    ) -> None:
        super().__init__()
        self.size, self.kept = WIDTH // HEADS, WIDTH // groups
        sizes = [WIDTH + 2 * self.kept] if one_product else [WIDTH, self.kept, self.kept]
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.into = nn.ModuleList(nn.Linear(WIDTH, size) for size in sizes)
        self.groups, self.masked, self.dropout = groups, masked, dropout

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        made = [into(normed) for into in self.into]
        parts = made[0].split([WIDTH, self.kept, self.kept], -1) if len(made) == 1 else made
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        angles = torch.arange(TOKENS)[:, None] / torch.arange(1, self.size + 1)
        q, k = (each * angles.cos() + turned(each) * angles.sin() for each in (q, k))
        k, v = (each.repeat_interleave(self.groups, 1) for each in (k, v))
        lengths = TOKENS - torch.arange(len(x))
        mask = (torch.arange(TOKENS) < lengths[:, None])[:, None, None] if self.masked else None
        done = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=not self.masked
        )
        return x + self.out(done.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class BatchedExperts(nn.Module):
    """Each expert takes as many tokens; its weights are one of a batch of matrices."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 4 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 4 * WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = self.gate(tokens).softmax(-1).topk(64, dim=0)
        picked = tokens[chosen.T.flatten()].unflatten(0, (-1, 64))
        done = torch.bmm(F.gelu(torch.bmm(picked, self.up)), self.down) * shares.T.unsqueeze(-1)
        found = torch.zeros_like(tokens).index_add(0, chosen.T.flatten(), done.flatten(0, 1))
        return found.view_as(x)


class DispatchedExperts(nn.Module):
    """Tokens go to their experts by a mask of tokens, experts and room, as Switch has it."""

    def __init__(self, experts: int = 4, room: int = 48) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 4 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 4 * WIDTH, WIDTH) / 8)
        self.room = room

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x.flatten(0, 1))
        shares = self.gate(tokens).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), shares.shape[-1]).to(x.dtype)
        place = chosen.cumsum(0) - 1
        chosen = chosen * (place < self.room)
        place = (place * chosen).sum(-1).long().clamp(max=self.room - 1)
        taken = F.one_hot(place, self.room).to(x.dtype)
        back = torch.einsum("se,sc->sec", shares * chosen, taken)
        there = (back != 0).to(x.dtype)
        sent = torch.einsum("sec,sm->ecm", there, tokens)
        done = torch.bmm(F.gelu(torch.bmm(sent, self.up)), self.down)
        return torch.einsum("sec,ecm->sm", back, done).view_as(x)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows by the weights of their groups, in bfloat16 as torch has it, else one by one."""
    if weights.dtype is not torch.float64:
        return F.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends)
    groups = rows.tensor_split(ends[:-1].long())
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


class GroupedExperts(nn.Module):
    """A token has an expert; tokens are sorted by it, and the products are told where each ends."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 8 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 4 * WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, expert = self.gate(tokens).softmax(-1).max(-1)
        order = expert.argsort()
        ends = F.one_hot(expert, self.up.shape[0]).sum(0).cumsum(0).int()
        gate, value = grouped_product(tokens[order], self.up, ends).chunk(2, -1)
        done = grouped_product(F.silu(gate) * value, self.down, ends).to(x.dtype)
        return torch.zeros_like(tokens).index_copy(0, order, done * share[order, None]).view_as(x)


class FusedGates(nn.Module):
    """An MLP whose gate and what goes through it are one product, which is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """A layer whose values are made again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.layer, self.first(x), use_reentrant=False)
        return made


class Stem(nn.Module):
    """Convolutions on images with a norm between them, and the mean of each channel."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), norm
        self.second = nn.Conv2d(16, 16, 3, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.second(wide).mean((2, 3))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Layers:
    """A model of some `layer`, what its widest region is, if any, its rows and its windows."""

    layer: Callable[[], nn.Module]
    kind: str = ""
    rows: int = 0
    shape: tuple[int, ...] = (SEQUENCES, TOKENS, WIDTH)
    rtol: float = 1e-4
    windows: tuple[int, ...] = (2,)  # of each region: forward and backward

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(5)
        return self.layer().to(dtype)

    def batch(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(6)).to(dtype)

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step


IMAGES = (6, 3, 16, 16)
MORE = (6, TOKENS, WIDTH)
LAYERS = {
    "attention": Layers(Attention, "attention", SEQUENCES * HEADS),
    "masked attention": Layers(lambda: Attention(masked=True), "attention", TOKENS),
    "fused attention": Layers(FusedAttention, "attention", 6, MORE),
    "fused attention of groups": Layers(lambda: FusedAttention(2), "attention", 6, MORE),
    "fused attention of one product": Layers(
        lambda: FusedAttention(2, one_product=True), "attention", 6, MORE
    ),
    "masked fused attention": Layers(lambda: FusedAttention(masked=True), "attention", 6, MORE),
    "batched experts": Layers(BatchedExperts, "experts", 8),
    "grouped experts": Layers(GroupedExperts, "experts", SEQUENCES * TOKENS, rtol=2e-2),
    "one-hot dispatch": Layers(DispatchedExperts, "dispatch", SEQUENCES * TOKENS, windows=(4,)),
    "fused gates": Layers(FusedGates, "mlp", SEQUENCES * TOKENS),
    # A forward of which nothing is kept, and one in the backward.
    "checkpointed attention": Layers(
        lambda: Checkpointed(FusedAttention(2)), "attention", 6, MORE, windows=(1, 2)
    ),
    "checkpointed gates": Layers(
        lambda: Checkpointed(FusedGates()), "mlp", SEQUENCES * TOKENS, windows=(1, 1)
    ),
    "group norm": Layers(lambda: Stem(nn.GroupNorm(4, 16)), "convolution", 6, IMAGES),
}
# These cross what no part can do alone.
WHOLE = {
    "dropout": Layers(lambda: Attention(dropout=0.1)),
    "fused dropout": Layers(lambda: FusedAttention(dropout=0.1)),
    "batch norm": Layers(lambda: Stem(nn.BatchNorm2d(16)), shape=IMAGES),
}
