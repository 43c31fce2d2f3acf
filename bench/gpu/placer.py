"""A step that is captured once, and placed and run in many ways as `torch.compile` would run it.

In: a step function and its arguments. Out: what runs it under a policy and a budget, and what was
predicted of it beside what its first runs show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.dry_run import AfterDryRun
from cotrain_compile.capture.offline.only_trace import only_traced
from cotrain_compile.entry.compile_step import compile_step
from cotrain_compile.entry.planner import Planner
from cotrain_compile.extract.extract import extract
from cotrain_compile.machine import MEMORIES, Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.cuda.setup import within_free_memory

PLENTY = 1 << 50


class Placer:
    """One captured step; `device` is where it computes, "cuda" or "cpu"."""

    def __init__(self, step: Callable[..., Any], arguments: Sequence[Any], device: str) -> None:
        self.device = device
        torch._dynamo.reset()  # else sizes that differ from the last step's are symbols
        options: dict[str, Any] = {"device": "cuda"} if device == "cuda" else {}
        compiled: Callable[..., Any] = torch.compile(step, backend="cotrain", options=options)
        began = time.monotonic()
        traced = only_traced(lambda: compiled(*arguments))
        assert traced is not None, "the step was not traced"
        self.step, self.values = traced.step, list(traced.values)
        self.traced_s = time.monotonic() - began
        self.dataflow = extract(self.step)

    def compiled(self, **options: Any) -> AfterDryRun:
        """The step placed and compiled by these options; its first call is after a dry run."""
        asked = Options(poison=False, **options)

        def compile_within(
            limit: int | None, inputs: Sequence[Any], workspace: Mapping[str, int]
        ) -> CompiledStep:
            given = asked
            if self.device == "cuda":
                card = torch.device("cuda", torch.cuda.current_device())
                given = within_free_memory(asked, inputs, card)
            planner = Planner(given, plan_bytes=limit, workspace=workspace)
            made = compile_step(self.step, self.dataflow, planner, given)
            if self.device == "cuda":
                made.bring_home(inputs)
            return made

        return AfterDryRun(compile_within, self.values)

    def plan(self, machine: Machine, policy: str, budget_bytes: int | None = None) -> Plan:
        """What `policy` makes of the step on `machine`, where nothing is run."""
        budgets = dict.fromkeys(MEMORIES, PLENTY)
        if budget_bytes is not None:
            budgets[Tier.DEVICE] = budget_bytes
        problem = formulate(self.dataflow, machine, budgets, compiled=True)
        return solve(problem, SolveSettings(policy=policy))


def foretold(compiled: CompiledStep) -> dict[str, Any]:
    """The part of a row that a plan says before it runs."""
    plan = compiled.plan
    return {
        "policy": plan.placement.policy,
        "predicted_s": compiled.predict_steps().period_s,
        "budget_bytes": plan.budgets[Tier.DEVICE],
        "predicted_peak_bytes": plan.predicted.peak_bytes[Tier.DEVICE],
        "host_bytes": plan.predicted.peak_bytes[Tier.HOST],
        "offloaded_bytes": plan.bytes_moved("offload"),
        "fetched_bytes": plan.bytes_moved("prefetch"),
        "host_updates": len(plan.host_updates),
        "notes": list(plan.notes),
    }
