"""Models that `scale` arranges on ranks, and the same step by one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import cotrain_compile
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.machine import Tier
from tests.support.failing_stages import short_of_memory, told
from tests.support.pipelines import llama, loss_of

WIDTH, HEADS, WORDS, TOKENS, SAMPLES, STEPS, EXPERTS = 16, 4, 32, 8, 8, 3, 4
MAX_NORM = 0.5


class Attention(nn.Module):
    """Causal attention; a rank may have some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (-1, WIDTH // HEADS)
        q, k, v = (
            layer(x).unflatten(-1, shape).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: torch.Tensor = self.o(out.transpose(1, 2).flatten(2))
        return mixed


class Experts(nn.Module):
    """MLPs, each for rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)


class Mixture(nn.Module):
    """Each token goes to one expert, which has room for some of each sequence (GShard)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        room = 2 * x.shape[1] // EXPERTS
        weights, chosen = self.router(x).softmax(-1).max(-1)
        wanted = F.one_hot(chosen, EXPERTS)
        place = wanted.cumsum(1) * wanted - 1
        taken = (place[..., None] == torch.arange(room)).to(x.dtype)
        rows = torch.einsum("bsec,bsd->ebcd", taken, x).flatten(1, 2)
        made = self.experts(rows).unflatten(1, (-1, room))
        mixed: torch.Tensor = torch.einsum("bsec,ebcd->bsd", taken * weights[..., None, None], made)
        return x + mixed


class Block(nn.Module):
    """An MLP, and before it attention if there is some."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.before = nn.LayerNorm(WIDTH) if attends else None
        self.attention = Attention() if attends else None
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None and self.before is not None:
            x = x + self.attention(self.before(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class MixedBlock(Block):
    """A block whose tokens go to experts after its MLP."""

    def __init__(self, attends: bool) -> None:
        super().__init__(attends)
        self.mixture = Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mixture(super().forward(x))
        return mixed


class Language(nn.Module):
    """A small language model, whose blocks are MLPs, or `mixes` experts, or have both."""

    def __init__(self, attends: bool, mixes: bool = False, *, both: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        block: Callable[[bool], nn.Module] = MixedBlock if both else Block
        self.blocks = nn.ModuleList(Mixture() if mixes else block(attends) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def mlp_split() -> dict[str, ParallelStyle]:
    """The products of each MLP, divided over ranks."""
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def plain_split() -> dict[str, ParallelStyle]:
    """The products and the heads of each block, divided over ranks."""
    split: dict[str, ParallelStyle] = {
        f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"
    }
    return mlp_split() | split | {"blocks.*.attention.o": RowwiseParallel()}


def split_by_tokens() -> dict[str, ParallelStyle]:
    """All of the model: products as before, and what is between them by tokens."""
    by_token = Shard(1)
    whole = PrepareModuleInput(input_layouts=(by_token,), desired_input_layouts=(Replicate(),))
    return plain_split() | {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=by_token),
        "blocks.*.before": SequenceParallel(),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.attention": whole,
        "blocks.*.attention.o": RowwiseParallel(output_layouts=by_token),
        "blocks.*.up": ColwiseParallel(input_layouts=by_token),
        "blocks.*.down": RowwiseParallel(output_layouts=by_token),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=by_token, output_layouts=Replicate()),
    }


SPLITS: Mapping[str, Callable[[], dict[str, ParallelStyle] | None]] = {
    "": lambda: None,
    "mlp": mlp_split,
    "plain": plain_split,
    "tokens": split_by_tokens,
    "its own": lambda: None,
}


@dataclass(frozen=True)
class Case:
    """A layout, by which of `SPLITS` layers are split, and what a rank may take of its device.

    A model of Hugging Face has a split of its own.
    """

    layout: Layout
    split: str = ""
    attends: bool = False
    budget: int | None = None
    stages: StagePlan | None = None


@dataclass(frozen=True)
class Trained:
    """Losses of this rank's samples by step, what it has in the end, and metered peaks.

    `overrun` is what it was told of a step that failed, `gathered_bytes` what it sends in a step
    for parameters that are gathered once.
    """

    losses: list[float]
    replica: int
    state: dict[str, torch.Tensor]
    peak_bytes: int = 0
    moves: int = 0
    overrun: str = ""
    gathered_bytes: float = 0.0


def model_of(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if case.split == "its own":
        return llama()
    mixes = case.layout.experts > 1
    both = mixes and case.layout.tensor > 1
    return Language(case.attends, mixes and not both, both=both)


def optimizer_of(case: Case, params: Any) -> torch.optim.Optimizer:
    if case.split == "its own":  # small gradients, of which Adam makes as much of their rounding
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    # Powers of these are exact in float32, so that bias corrections agree, in whichever width.
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.5, 0.75))


def samples_of(
    step: int, layout: Layout | None = None, replica: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a replica, or all of them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=generator)
    if layout is None:
        return ids, ids.roll(-1, 1)
    shares = layout.samples or [SAMPLES // layout.replicas] * layout.replicas
    own = ids.split(list(shares))[replica]
    return own, own.roll(-1, 1)


def trained(rank: int, case: Case, fails: bool = False) -> Trained:
    """A training of this rank's part, which begins with the model of rank 0.

    If it `fails`, rank 1 has no memory for a turn of a step before that.
    """
    layout = case.layout
    model = model_of(case, seed=rank)
    ids, target = samples_of(0, layout, layout.replica(rank))
    names = "blocks.*.mixture.experts" if layout.tensor > 1 else "blocks.*.experts"
    options = {"quiet": True, "host_kernels": "captured", "policy": "greedy"}
    if case.budget is not None:
        options |= {"memory_budget": case.budget}
    scaled = cotrain_compile.scale(
        model, layout, loss_of, (ids,), target,
        stages=case.stages, tensor_plan=SPLITS[case.split](), experts=[names],
        options=options,
    )  # fmt: skip
    step = scaled.compiled_step(optimizer_of(case, scaled.parameters()), MAX_NORM)
    overrun = ""
    if fails and scaled.pipe is not None:
        with short_of_memory(scaled.pipe.stages[0].turns.functions[0], rank):
            overrun = told(lambda: step(ids, target=target))
    losses = []
    for number in range(STEPS):
        ids, target = samples_of(number, layout, scaled.replica)
        losses.append(float(step(ids, target=target)))
    state = {
        name.removeprefix("module."): value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in scaled.model.state_dict().items()
    }
    functions: list[Callable[..., object]] = [step]
    held = 0
    if scaled.pipe is not None:
        functions = [f for stage in scaled.pipe.stages for f in stage.turns.functions]
        budgets = scaled.pipe.memory.budgets
        held = 0 if budgets is None else budgets.held
    steps = [cotrain_compile.inspect(function) for function in functions]
    peaks = [each.measured.peak_bytes[Tier.DEVICE] for each in steps if each.measured is not None]
    moves = sum(len(each.plan.tasks) for each in steps)
    gathered = None if scaled.pipe is None else scaled.pipe.gathered
    sent = 0.0 if gathered is None else gathered.sent_bytes / STEPS
    return Trained(losses, scaled.replica, state, held + max(peaks), moves, overrun, sent)


def alone(case: Case) -> Trained:
    """One process in eager, with the samples of all replicas; losses by step and replica."""
    model = model_of(case)
    optimizer = optimizer_of(case, model.parameters())
    losses: list[float] = []
    replicas = case.layout.replicas
    for number in range(STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            ids, target = samples_of(number, case.layout, replica)
            loss = loss_of(model(ids), target)
            (loss * len(ids) / SAMPLES).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return Trained(losses, 0, dict(model.state_dict()))


def losses_by_width(rank: int | None, widths: Sequence[int]) -> list[float]:
    """Two steps of each of several models in one process, sharded; in eager where there is no rank.

    All ranks have the same samples.
    """
    losses = []
    for width in widths:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 6))
        x = torch.randn(4, 6)
        if rank is None:
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5, 0.75))
        else:
            options = {"quiet": True, "policy": "resident"}
            scaled = cotrain_compile.scale(
                model, Layout(shard=2), F.mse_loss, (x,), x, options=options
            )
            optimizer = torch.optim.AdamW(scaled.parameters(), betas=(0.5, 0.75))
            step = scaled.compiled_step(optimizer)
        for _ in range(2):
            if rank is not None:
                losses.append(step(x, target=x).item())
                continue
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def refused(rank: int, plan: Any, split: str = "") -> str:
    """What a rank is told of a plan."""
    ids, target = samples_of(0)
    return told(
        lambda: cotrain_compile.scale(
            Language(False), plan, loss_of, (ids,), target, tensor_plan=SPLITS[split]()
        )
    )
