"""Models in stages: what ranks train by a pipeline, and one process by the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cotrain_compile
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CotrainError, DistributeError
from cotrain_compile.machine import Tier
from tests.support.example_scripts import example

STEPS = 2
SAMPLES = 8


class Logits(nn.Module):
    """A language model of Hugging Face that gives logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Logits(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv2(torch.relu(self.bn1(self.conv1(x)))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.layers = nn.ModuleList(Residual(8) for _ in range(4))
        self.fc = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (SAMPLES, 16), generator=generator)
    return ids, ids.roll(-1, 1)


def pictures(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(SAMPLES, 3, 8, 8, generator=generator),
        torch.randint(0, 64, (SAMPLES,), generator=generator),
    )


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Kind:
    """A model, where its layers are, and its batches."""

    make: Callable[[], nn.Module]
    layers: str
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]


KINDS = {
    "gpt2": Kind(gpt2, "model.transformer.h", tokens),
    "llama": Kind(llama, "model.model.layers", tokens),
    "resnet": Kind(ResNet, "layers", pictures),
}


@dataclass(frozen=True)
class Trained:
    """The mean loss of each step, and what a rank holds at the end."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def plan_of(kind: str, schedule: str, layers: tuple[int, ...], micro_batches: int = 4) -> StagePlan:
    points = tuple(f"{KINDS[kind].layers}.{layer}" for layer in layers)
    return StagePlan(schedule, points, micro_batches, SAMPLES // micro_batches)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind].make()


def alone(kind: str, micro_batches: int = 4) -> Trained:
    """One process, in eager, with as many micro-batches."""
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        inputs, target = KINDS[kind].batch(step)
        found = []
        for part, wanted in zip(
            inputs.chunk(micro_batches), target.chunk(micro_batches), strict=True
        ):
            loss = loss_of(model(part), wanted)
            (loss / micro_batches).backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(found) / micro_batches)
    return Trained(losses, model.state_dict())


class Run:
    """The training of a rank."""

    def __init__(self, kind: str, plan: Any, options: dict[str, Any] | None = None) -> None:
        self.kind = KINDS[kind]
        self.model = made(kind)
        inputs, target = self.kind.batch(0)
        self.pipe = cotrain_compile.pipeline(
            self.model, plan, loss_of, (inputs,), target, options={"quiet": True, **(options or {})}
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.update = self.pipe.compiled_update(self.optimizer)

    def train(self, first: int = 0, steps: int = STEPS, *, just_in_time: bool = False) -> Trained:
        means = []
        early = self.update if just_in_time else None
        for step in range(first, first + steps):
            inputs, target = self.kind.batch(step)
            losses: list[torch.Tensor] = []
            self.pipe.step(inputs, target=target, losses=losses, update=early)
            if early is None:
                self.update()
            means.append(float(torch.stack(losses).mean()))
        return Trained(means, dict(self.model.state_dict()))


def trained(rank: int, kind: str, plan: Any, options: dict[str, Any] | None = None) -> Trained:
    return Run(kind, plan, options).train()


@dataclass(frozen=True)
class Clipped:
    """Of a rank, after a step: the norm it clipped by, its gradients, and what torch's tells."""

    norm: float
    gradients: dict[str, torch.Tensor]
    told: list[str]


def clipped(rank: int, kind: str, plan: StagePlan, max_norm: float) -> Clipped:
    """The gradients of a step, clipped by the norm of the whole model's."""
    run = Run(kind, plan)
    inputs, target = run.kind.batch(0)
    run.pipe.step(inputs, target=target)
    params = dict(run.model.named_parameters())
    told = [
        told_by(lambda: torch.nn.utils.clip_grad_norm_(params.values(), max_norm)),
        told_by(lambda: torch.nn.utils.get_total_norm(gradients_of(run.model))),
    ]
    norm = run.pipe.clip_grad_norm(max_norm)
    gradients = {name: p.grad.clone() for name, p in params.items() if p.grad is not None}
    return Clipped(float(norm), gradients, told)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def told_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except DistributeError as error:
        return str(error)
    return "nothing"


def judged(rank: int, kind: str, plan: StagePlan) -> list[float]:
    """The losses of micro-batches without training, less those of a step."""
    run = Run(kind, plan)
    inputs, target = run.kind.batch(0)
    losses: list[torch.Tensor] = []
    run.pipe.eval(inputs, target=target, losses=losses)
    assert all(param.grad is None or not param.grad.any() for param in run.model.parameters())
    stepped: list[torch.Tensor] = []
    run.pipe.step(inputs, target=target, losses=stepped)
    assert len(losses) == len(stepped)
    return [float(a - b) for a, b in zip(losses, stepped, strict=True)]


@dataclass(frozen=True)
class Metered:
    """Of each turn and the update of a rank: planned and metered peak of the device, in bytes.

    `beside` has the same of what other stages of the rank have there meanwhile.
    """

    trained: Trained
    peaks: list[tuple[int, int]]
    beside: list[tuple[int, int]]
    homes: set[Tier]
    held: int
    param_bytes: int
    buffer_bytes: int
    sent_bytes: int
    swaps: tuple[int, int, int]  # of swapped stages: fetched, sent home, the part that stays once
    told: str  # of a batch that is not the plan's


def metered(
    rank: int, kind: str, plan: StagePlan, budget: int, options: Mapping[str, Any] | None = None
) -> Metered:
    """A training within `budget`."""
    run = Run(kind, plan, {"memory_budget": budget, **(options or {})})
    found = run.train()
    turns = [function for stage in run.pipe.stages for function in stage.turns.functions]
    peaks, homes = [], set[Tier]()
    for function in (*turns, run.update):
        compiled = cotrain_compile.inspect(function)
        assert compiled.measured is not None
        planned, seen = compiled.plan.predicted.peak_bytes, compiled.measured.peak_bytes
        roles = {b.name: b.role for b in compiled.problem.dataflow.buffers}
        placed = compiled.plan.placement.homes.items()
        homes |= {home for name, home in placed if roles[name] is not Role.BUFFER}
        peaks.append((planned[Tier.DEVICE], seen[Tier.DEVICE]))
    budgets, swaps = run.pipe.memory.budgets, run.pipe.memory.swaps
    assert budgets is not None
    last = run.pipe.stages[-1].turns.part.module.parameters()
    swapped, beside = (0, 0, 0), [(0, 0)] * len(peaks)
    if swaps is not None:
        swapped = swaps.fetched_bytes, swaps.sent_bytes, sum(param.nbytes for param in last)
        beside[:-1] = [
            (budgets.update - of_turn, swaps.beside_bytes[number, has_backward])
            for number, stage in enumerate(run.pipe.stages)
            for has_backward, of_turn in (
                (False, budgets.forward[number]),
                (True, budgets.backward[number]),
            )
            if has_backward or not stage.is_last
        ]
    return Metered(
        found,
        peaks,
        beside,
        homes,
        budgets.held,
        sum(param.numel() * param.element_size() for param in run.model.parameters()),
        sum(buffer.numel() * buffer.element_size() for buffer in run.model.buffers()),
        sum(stage.sent_bytes for stage in run.pipe.stages),
        swapped,
        told_of_short_batch(run),
    )


def refused(rank: int, plans: list[StagePlan], budgets: list[int]) -> str:
    """What a rank with its own plan and budget is told."""
    try:
        Run("resnet", plans[rank], {"memory_budget": budgets[rank]})
    except CotrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def told_of_short_batch(run: Run) -> str:
    inputs, target = run.kind.batch(0)
    try:
        run.pipe.step(inputs[:7], target=target[:7])
    except DistributeError as error:
        return str(error)
    return "nothing"


def example_trained(
    rank: int, plan: Path, steps: int, load: Path | None, save: Path, budget: str = "64KiB"
) -> list[float]:
    """`docs/examples/pipeline.py` on this rank."""
    losses: list[float] = example("pipeline").train(plan, steps, budget, load, save)
    return losses
