"""Values made again in every kind of step that people write: the bits of the resident plan.

Each kind trains twice, with everything on the device and in 0.6 of the memory that this takes, on a
link so slow that the plan makes values again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.machine import Tier
from cotrain_compile.placement.recompute.rewrite import again_name
from cotrain_compile.plan import Lane
from tests.graph.exactness.test_recompute import slow_link
from tests.support.steps import Batch, Step, all_tensors
from tests.support.work import LITTLE_WORK

WIDTH, ROWS, SHARE = 16, 64, 0.6
# What compiled code may round otherwise over a few steps.
ROUNDING = 1e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(F.gelu(self.widen(self.norm(x))))
        return x + self.dropout(hidden)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


# Steps.


def plain(model: Net, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def accumulating(model: Net, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for half in (slice(None, ROWS // 2), slice(ROWS // 2, None)):
            loss = F.cross_entropy(model(x[half]), y[half]) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


def stepping_in_hooks(model: Net, optimizer: Optimizer) -> Step:
    """Each parameter has an optimizer, which steps while the backward goes on."""
    params = list[Tensor](model.parameters())
    own = {p: torch.optim.SGD([p], lr=0.05, foreach=False) for p in params}

    def update(param: Tensor) -> None:
        own[param].step()
        own[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step


def penalised(model: Net, optimizer: Optimizer) -> Step:
    """A gradient in the loss; an activation and a gradient of a parameter are returned."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        hidden = model.blocks[0](x)
        loss = F.cross_entropy(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + 0.1 * gradient.pow(2).sum()
        total.backward()
        optimizer.step()
        kept = model.head.weight.grad
        assert kept is not None
        return total.detach(), hidden.detach(), kept

    return step


def attacked(model: Net, optimizer: Optimizer) -> Step:
    """Two updates; the second batch follows from the gradient of the first."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        loss = F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# Kinds.


def of_one_size(model: Net, optimizer: Optimizer) -> Iterator[Batch]:
    for _ in range(3):
        yield torch.randn(ROWS, WIDTH), torch.randint(0, 4, (ROWS,))


def of_other_sizes_and_rates(model: Net, optimizer: Optimizer) -> Iterator[Batch]:
    """The second is a graph of any size; a learning rate that changes is one more trace."""
    for number, rows in enumerate((ROWS, ROWS - 8, ROWS - 8)):
        if number == 2:
            optimizer.param_groups[0]["lr"] *= 0.5
        yield torch.randn(rows, WIDTH), torch.randint(0, 4, (rows,))


@dataclass(frozen=True)
class Kind:
    make: Callable[[Net, Optimizer], Step] = plain
    batches: Callable[[Net, Optimizer], Iterator[Batch]] = of_one_size
    options: dict[str, Any] = field(default_factory=dict)
    rounding: float = 0.0


KINDS = {
    "sizes and rates": Kind(batches=of_other_sizes_and_rates),
    "hooks": Kind(stepping_in_hooks),
    "penalty": Kind(penalised, options={"keep_grads": True}),
    "overlap": Kind(options={"overlap_steps": True}),
    "accumulating": Kind(accumulating),
    "attack": Kind(attacked),
    "cheap ones too": Kind(options={"remat": True}),
    "inductor": Kind(options={"lowering": "inductor"}, rounding=ROUNDING),
}
IN_EVERY_RUN = ("penalty",)


def trained(kind: Kind, **options: Any) -> tuple[list[Tensor], list[CompiledStep]]:
    """All that steps return, leave in gradients and change, and the compiled steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    asked = {"quiet": True, "host_kernels": "captured", **kind.options, **options}
    step = torch.compile(kind.make(model, optimizer), backend="cotrain", options=asked)
    found, steps = list[Tensor](), list[CompiledStep]()
    for batch in kind.batches(model, optimizer):
        returned = step(*batch)
        found += [t.detach().clone() for t in (returned if type(returned) is tuple else [returned])]
        cotrain_compile.synchronize()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        steps.append(cotrain_compile.inspect(step))
    tensors = all_tensors(model, [optimizer])
    return [*found, *(tensors[name] for name in sorted(tensors)), torch.get_rng_state()], steps


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=[] if k in IN_EVERY_RUN else [pytest.mark.long]) for k in KINDS]
)
def test_a_step_that_makes_values_again_is_that_of_everything_kept(
    name: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    expected, resident = trained(kind, policy="resident")
    tight = smallest(resident)
    found, steps = trained(kind, machine=slow_link(tmp_path), work_limit=LITTLE_WORK, **tight)
    assert all(step.plan.placement.recomputed for step in steps)
    if not kind.rounding:  # compiled segments are measured as a whole
        assert not untold_ops(steps[-1])
        assert steps[-1].measured is not None
        peak_bytes = steps[-1].measured.peak_bytes[Tier.DEVICE]
        assert peak_bytes == steps[-1].predicted.peak_bytes[Tier.DEVICE]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if kind.rounding:
            torch.testing.assert_close(a, b, rtol=kind.rounding, atol=kind.rounding)
        else:
            assert torch.equal(a, b)


def untold_ops(step: CompiledStep) -> set[str]:
    """What was measured that is no op of the step, run once or again: no profile may have it."""
    assert step.measured is not None
    ops = step.problem.dataflow.position
    told = {span.name for span in step.measured.lane(Lane.DEVICE)}
    return told - ops.keys() - {again_name(op) for op in ops}


def smallest(resident: list[CompiledStep]) -> dict[str, int]:
    """The budget: a share of the least that a step takes with everything on the device."""
    peaks = [step.plan.predicted.peak_bytes[Tier.DEVICE] for step in resident]
    return {"memory_budget": int(SHARE * min(peaks))}


@pytest.mark.long
def test_a_profile_of_a_step_that_makes_values_again_plans_it_once_more(tmp_path: Path) -> None:
    kind, machine = KINDS["accumulating"], slow_link(tmp_path)
    expected, resident = trained(kind, policy="resident")
    tight = smallest(resident)
    _, steps = trained(kind, machine=machine, work_limit=LITTLE_WORK, **tight)
    assert steps[-1].measured is not None
    files.save(measured_costs([steps[-1].measured], steps[-1].plan), tmp_path / "profile.json")
    profile = str(tmp_path / "profile.json")
    found, planned = trained(
        kind, machine=machine, work_limit=LITTLE_WORK, profile=profile, **tight
    )
    assert planned[-1].plan.placement.recomputed
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
