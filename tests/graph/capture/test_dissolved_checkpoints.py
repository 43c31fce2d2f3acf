"""Checkpoints dissolved: the step as without them, and the plan decides what is made again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Checkpoints, Dataflow, Op, Phase, Role
from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.viz.text.summary import summary
from tests.graph.capture.test_rematerialise import (
    ROWS,
    WIDTH,
    Block,
    checkpointed,
    plainly,
    selectively,
)
from tests.graph.exactness.test_recompute import slow_link
from tests.support.steps import (
    CASES,
    OPTIMIZERS,
    Case,
    Run,
    Step,
    check_peak,
    cotrain,
    make_gpt2,
    tokens,
    train,
)

Apply = Callable[..., Tensor]


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpointed(lambda x: checkpointed(layer, x.sin()), x)
    return found


def plainly_nested(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.sin())  # type: ignore[no-any-return]


@functools.cache
def traced(apply: Apply, checkpoints: str) -> Dataflow:
    """Two layers with dropout, to which `apply` puts checkpoints."""

    def build() -> tuple[Step, tuple[Tensor]]:
        layers = nn.ModuleList(Block(0.1) for _ in range(2))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            for layer in layers:
                x = apply(layer, x)
            loss = x.pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, (torch.randn(ROWS, WIDTH),)

    torch._dynamo.reset()
    return trace(build, checkpoints=checkpoints)


def ops_of(dataflow: Dataflow) -> list[Op]:
    """But for views, which a checkpoint may detach."""
    return [op for op in dataflow.ops if op.writes]


def told_apart(dataflow: Dataflow) -> list[tuple[Any, ...]]:
    size = dataflow.buffer
    return [
        (op.target, op.phase, op.flops, [size[name].nbytes for name in op.writes])
        for op in ops_of(dataflow)
    ]


@pytest.mark.parametrize(
    ("apply", "plain"),
    [
        pytest.param(checkpointed, plainly, marks=pytest.mark.long),
        pytest.param(partial(checkpoint, use_reentrant=True), plainly, marks=pytest.mark.long),
        pytest.param(selectively, plainly, marks=pytest.mark.long),
        (nested, plainly_nested),
    ],
)
def test_a_dissolved_step_is_the_one_without_checkpoints(apply: Apply, plain: Apply) -> None:
    """Each op once, dropout too; what was to be made again is known, and is the forward's."""
    respected = traced(apply, "respect")
    dissolved, without = traced(apply, "dissolve"), traced(plain, "respect")
    assert told_apart(dissolved) == told_apart(without) != told_apart(respected)
    assert without.checkpoints == Checkpoints()
    sizes, phases = asked_of(dissolved)
    sizes_again, phases_again = asked_of(respected)
    assert sizes == sizes_again
    assert phases == {Phase.FORWARD}
    assert phases_again == {Phase.BACKWARD}
    assert (dissolved.checkpoints.dissolved, respected.checkpoints.dissolved) == (True, False)


def asked_of(dataflow: Dataflow) -> tuple[list[int], set[Phase]]:
    """The bytes of what checkpoints ask for, and which part of the step makes it."""
    names = dataflow.checkpoints.values
    assert names
    assert all(dataflow.buffer[name].role is Role.TEMPORARY for name in names)
    made = {op.phase for op in dataflow.ops if set(names).intersection(op.writes)}
    return sorted(dataflow.buffer[name].nbytes for name in names), made


# A Hugging Face model with dropout, whose blocks are checkpointed as its users do it.


def make_checkpointed_gpt2() -> nn.Module:
    model: Any = make_gpt2()
    name = "activation_checkpointing_enable"  # an older one has "gradient_..." alone
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable()
    return model  # type: ignore[no-any-return]


def longer_tokens() -> tuple[Tensor, ...]:
    return tuple(torch.cat([tokens()[0] for _ in range(8)]) for _ in range(2))


HUGGING_FACE = Case(make_checkpointed_gpt2, longer_tokens, CASES["gpt2"].loss_of)


def trained(**options: Any) -> tuple[Run, Tensor, CompiledStep]:
    """A run, where it leaves the random generator, and its compiled step."""
    seen: list[CompiledStep] = []

    def after(step: Step) -> None:
        check_peak(step)
        seen.append(cotrain_compile.inspect(step))

    torch._dynamo.reset()
    exact = cotrain(host_kernels="captured", work_limit=20.0, **options)
    run = train(HUGGING_FACE, OPTIMIZERS["sgd"], exact, after, steps=3)
    return run, torch.get_rng_state(), seen[-1]


@pytest.mark.long
def test_the_plan_decides_about_a_hugging_face_model_with_checkpoints(tmp_path: Path) -> None:
    whole, state, respected = trained(policy="resident")
    roomy = trained(policy="auto", checkpoints="dissolve")
    peaks = [step.plan.predicted.peak_bytes[Tier.DEVICE] for step in (respected, roomy[2])]
    assert peaks[0] < peaks[1]
    assert sum(op.flops for op in roomy[2].problem.dataflow.ops) < sum(
        op.flops for op in respected.problem.dataflow.ops
    )
    tight = trained(memory_budget=peaks[0], machine=slow_link(tmp_path), checkpoints="dissolve")
    for run, state_after, _ in (roomy, tight):
        assert all(torch.equal(a, b) for a, b in zip(run.losses, whole.losses, strict=True))
        assert all(torch.equal(run.tensors[name], value) for name, value in whole.tensors.items())
        assert torch.equal(state_after, state)

    plan, step = tight[2].plan, tight[2].problem.dataflow
    assert plan.placement.recomputed
    assert plan.report is not None
    assert "resident+recompute:checkpoints" in plan.report.simulated_s
    assert "torch.utils.checkpoint is respected: it has" in summary(respected.plan)
    assert "the plan recomputes none of them" in summary(roomy[2].plan)
    again = set(step.checkpoints.values).intersection(plan.placement.recomputed)
    assert f"the plan recomputes {len(again)} values" in summary(plan)


def test_a_bad_word_about_checkpoints_is_refused() -> None:
    with pytest.raises(OptionError, match="'respect', 'dissolve'"):
        traced(plainly, "ignore")


def test_a_saved_step_knows_its_checkpoints(tmp_path: Path) -> None:
    dataflow = traced(checkpointed, "dissolve")
    files.save(dataflow, tmp_path / "step.json")
    assert files.load(tmp_path / "step.json", Dataflow).checkpoints == dataflow.checkpoints
