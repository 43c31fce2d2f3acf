"""What must not run twice: random ops, statistics, what is written in place, what decides.

A step with all of them, with all values made again that may be: the bits of everything kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import PlanError
from cotrain_compile.files import save
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.rewrite import recomputed, recomputed_ops
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from tests.support.steps import cotrain

WIDTH = 8


class Net(nn.Module):
    """Noise, statistics, a buffer that is written before it is read again, a gate by `topk`."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.dropout, self.last = nn.Dropout(0.5), nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).mul_(2.0)
        hidden = (hidden + self.scale).sin()
        with torch.no_grad():
            self.scale.mul_(0.9)
        gate = torch.zeros_like(hidden).scatter(1, hidden.topk(2).indices, 1.0)
        found: Tensor = self.last(self.dropout((hidden * gate).exp() + torch.rand_like(hidden)))
        return found


def trained(steps: int = 3, **options: object) -> tuple[list[Tensor], CompiledStep]:
    """All that a few steps leave, the state of the generator too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    compiled = cotrain(quiet=True, lowering="eager", **options)(step)
    losses = [compiled(torch.randn(4, WIDTH)).clone() for _ in range(steps)]
    left = [value.clone() for value in model.state_dict().values()]
    return [*losses, *left, torch.get_rng_state()], cotrain_compile.inspect(compiled)


@pytest.fixture(scope="module")
def kept() -> tuple[list[Tensor], CompiledStep]:
    return trained(policy="resident")


def making_again(step: CompiledStep, names: tuple[str, ...]) -> Plan:
    placement = replace(resident(step.problem.dataflow), recomputed=names)
    return schedule(step.problem, placement)


def test_all_that_may_be_is_made_again_to_the_same_bits(
    kept: tuple[list[Tensor], CompiledStep], tmp_path: Path
) -> None:
    expected, step = kept
    dataflow = step.problem.dataflow
    names = tuple(sorted(recomputable(dataflow)))
    again = recomputed_ops(dataflow, names)
    ops = {op.name: op.target.removeprefix("aten.").split(".")[0] for op in dataflow.ops}
    made = {op.name: op.target for op in recomputed(dataflow, names).ops}
    twice = {made[copy].removeprefix("aten.").split(".")[0] for copy in again}
    assert {"sin", "exp", "mul", "_native_batch_norm_legit_functional"} <= twice
    assert "native_dropout_backward" in twice  # by the mask that was drawn
    once = {"native_dropout", "rand_like", "rand", "topk", "copy_"}
    assert not twice & once
    assert {"native_dropout", "topk", "copy_"} <= set(ops.values())
    save(making_again(step, names), tmp_path / "plan.json")
    found, _ = trained(plan=str(tmp_path / "plan.json"))
    assert all(map(torch.equal, found, expected))


def test_a_plan_with_what_must_not_run_twice_is_refused(
    kept: tuple[list[Tensor], CompiledStep],
) -> None:
    """A mask, what was made of a buffer that is overwritten since, the next running mean."""
    _, step = kept
    dataflow = step.problem.dataflow
    (mask,) = (o.writes[-1] for o in dataflow.ops if o.target.startswith("aten.native_dropout.d"))
    scale = next(b.name for b in dataflow.buffers if b.name.endswith("scale") and b.is_input)
    shifted = next(
        op.writes[0]
        for op in dataflow.ops
        if scale in op.reads and op.target.startswith("aten.add") and op.writes != (scale,)
    )
    (mean,) = (o.writes[-2] for o in dataflow.ops if "batch_norm_legit" in o.target)
    wrong = {mask: "run again", shifted: "was overwritten", mean: "the next average"}
    for name, told in wrong.items():
        assert name not in recomputable(dataflow)
        with pytest.raises(PlanError, match=told):
            check(step.problem, making_again(step, (name,)))


def gradients(forward: Callable[[Tensor], Tensor], budget: float) -> tuple[list[Tensor], Tensor]:
    """By stock torch.compile, with that share of what its partitioner would keep."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH, requires_grad=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5), nn.Sigmoid())
    with functorch.patch(activation_memory_budget=budget):
        compiled = torch.compile(lambda x: forward(model(x)), backend="aot_eager_decomp_partition")
        compiled(x).backward()
    return [p.grad for p in (x, *model.parameters()) if p.grad is not None], torch.get_rng_state()


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="says what torch 2.13 does")
def test_torchs_own_budget_draws_the_mask_of_dropout_twice() -> None:
    """So its gradients are those of another mask: what ours must not do (pytorch issue 190758)."""
    (expected, state), (found, ends) = (gradients(Tensor.sum, budget) for budget in (1.0, 0.0))
    assert not all(map(torch.equal, found, expected))
    assert not torch.equal(state, ends)
