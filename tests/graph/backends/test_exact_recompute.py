"""Under Inductor, what is made again is what was made first, where that is asked for.

Compiled code rounds by what is fused with it; an op that runs twice, in no compiled code, does not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

import cotrain_compile
from cotrain_compile.backends.inductor import lower as lowering
from cotrain_compile.backends.inductor.lower import LoweredStep, lower
from cotrain_compile.files import save
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from tests.graph.backends.test_segments_of_steps import Interpreted
from tests.support.captured_steps import captured
from tests.support.steps import CASES, OPTIMIZERS, cotrain, make_step


class Run(fx.Interpreter):
    """Runs the graph around the segments, and keeps what each node of it makes."""

    def __init__(self, lowered: LoweredStep) -> None:
        super().__init__(lowered.segmented.step.module)
        self.code, self.made = lowered.code, dict[str, Any]()

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        tensors = found if isinstance(found, tuple) else (found,)
        self.made[n.name] = [t.clone() for t in tensors if isinstance(t, Tensor)]
        return found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return tuple(self.code[target](list(args)))


def all_made_again(name: str) -> Plan:
    """Everything stays on the device, but for all values that may be made again."""
    step = captured(name)
    names = tuple(sorted(recomputable(step.dataflow)))
    return schedule(step.problem(), replace(resident(step.dataflow), recomputed=names))


@pytest.mark.long  # compiles C++; that no such op is in compiled code is shown below
def test_all_that_is_made_again_has_the_bits_of_the_first_time() -> None:
    """Beside compiled code that makes what it reads, and that reads it."""
    step, plan = captured("clipped"), all_made_again("clipped")
    again = recomputed_ops(step.dataflow, plan.placement.recomputed)
    placed, dataflow = run_passes(step.step, plan), step.problem().under(plan.placement).dataflow
    lowered = lower(step.step, placed, dataflow, {}, (), {*again, *again.values()})
    assert lowered.code
    assert len(again) > 3
    runs = list[Run]()

    def run(inputs: list[Any]) -> Any:
        runs.append(Run(lowered))
        return runs[-1].run(*inputs)

    step.train(run)
    for copy, op in again.items():
        for one in runs:
            assert one.made[op]
            assert all(map(torch.equal, one.made[op], one.made[copy])), op


@pytest.mark.parametrize(("recompute", "inside"), [("auto", True), ("exact", False)])
def test_a_user_may_ask_for_it(recompute: str, inside: bool, tmp_path: Path) -> None:
    """Then no segment has an op that runs twice."""
    plan = all_made_again("clipped")
    save(plan, tmp_path / "plan.json")
    options = {"plan": str(tmp_path / "plan.json"), "lowering": "inductor", "recompute": recompute}
    case = CASES["mlp"]
    model = case.make_model().train()
    step = make_step(model, OPTIMIZERS["adamw"](model), case.loss_of)
    torch._dynamo.reset()
    with mock.patch.object(lowering, "compile_graph", Interpreted):
        compiled = cotrain(**options)(step)
        compiled(*captured("clipped").batches[0])
    lowered = cotrain_compile.inspect(compiled).lowered
    assert lowered is not None
    again = recomputed_ops(captured("clipped").dataflow, plan.placement.recomputed)
    compiled_ops = {op for s in lowered.segmented.segments.values() for op in s.ops}
    assert bool(compiled_ops & {*again, *again.values()}) is inside
