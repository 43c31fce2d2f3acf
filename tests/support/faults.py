"""Faults: steps of every mode of placement, and ways to let something fail in them.

`check_left` compares what a failed step leaves, to the bit, with the start of the step and with
steps of the captured graph that nothing has disturbed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

from cotrain_compile.backends.eager.calls import Call
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Phase, Role
from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import Link, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Placement, UpdateMode
from cotrain_compile.presets import find
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.ops import cotrain as ops
from cotrain_compile.runtime.ops import host_region
from tests.support.captured_steps import Captured, captured, differences, place

WATCHDOG_S = 60
NOTHING_CHANGED = "No parameter or optimizer state was changed by this step"
LINK_IS_DOWN = "the link is down"


# The steps that faults are let into.


@dataclass(frozen=True)
class Setting:
    """A training whose parameters are updated by `modes` in turn; what moves besides."""

    training: str
    modes: tuple[UpdateMode, ...]
    weights_on_host: bool = False
    offloaded: tuple[str, ...] = ()
    early: bool = False

    def placement(self) -> Placement:
        dataflow = captured(self.training).dataflow
        base = resident(dataflow)
        modes = dict(zip((g.param for g in dataflow.updates), cycle(self.modes), strict=False))
        on_host = [p for p, m in modes.items() if m is HOST_STREAMED]
        for param, mode in modes.items():
            if mode is not RESIDENT:
                on_host += dataflow.update[param].states
            if mode is STREAMED and self.weights_on_host:
                on_host.append(param)
        for param, gradients in dataflow.kept_gradients.items():
            if param in on_host:
                on_host += gradients
        return replace(
            base,
            homes={**base.homes, **dict.fromkeys(on_host, Tier.HOST)},
            updates=modes,
            offloaded=self.offloaded,
            early_updates=self.early,
        )


RESIDENT, STREAMED, HOST, HOST_STREAMED = UpdateMode
SETTINGS = {
    "streamed": Setting("clipped", (STREAMED,)),
    "streamed weights": Setting("autocast", (STREAMED,), weights_on_host=True),
    "host": Setting("clipped", (HOST,)),
    "host streamed": Setting("autocast", (HOST_STREAMED,)),
    "activations": Setting("clipped", (RESIDENT,), offloaded=("addmm", "native_layer_norm.0")),
    "all": Setting(
        "autocast-unclipped",
        (HOST, STREAMED, HOST_STREAMED, RESIDENT),
        weights_on_host=True,
        offloaded=("addmm", "gelu"),
        early=True,
    ),
}

# What a step writes besides: running statistics, and gradients that are kept.
MORE_SETTINGS = {
    "statistics": Setting("conv", (HOST, RESIDENT, STREAMED)),
    "kept gradients": Setting("keeping", (RESIDENT, HOST, STREAMED, HOST_STREAMED)),
}


def setting_of(name: str) -> Setting:
    return (SETTINGS | MORE_SETTINGS)[name]


def compile_setting(name: str) -> CompiledStep:
    setting = setting_of(name)
    link = Link(bytes_per_s=1e9, latency_s=2e-4)  # so slow that work is in flight when a fault hits
    machine = find("this-machine").but(h2d=link, d2h=link)
    problem = captured(setting.training).problem(machine)
    plan = schedule(problem, setting.placement())
    check(problem, plan)
    return place(setting.training, plan, machine, throttle=True)


# One compiled step meets every fault: each must leave it as good as new.
compiled_setting = functools.cache(compile_setting)


@dataclass(frozen=True)
class Trial:
    """A compiled step, and tensors of its own to run on."""

    step: Captured
    run: Callable[[list[Any]], Any]
    inputs: list[Any]

    def take_step(self) -> None:
        """The same step each time: same batch, same dropout."""
        torch.manual_seed(1)
        batch = [i for i, item in enumerate(self.step.step.inputs) if item.role is Role.BATCH]
        for position, value in zip(batch, self.step.batches[0], strict=True):
            self.inputs[position] = value
        # As AOTAutograd does before it calls a step.
        torch.autograd.graph.increment_version(v for v in self.inputs if isinstance(v, Tensor))
        # `torch.no_grad` is Python: a Ctrl-C in its own lines would leave the mode off.
        was_on = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            self.run(list(self.inputs))
        finally:
            torch._C._set_grad_enabled(was_on)

    def changed_since(self, before: list[Any]) -> set[str]:
        items = [self.step.step.inputs[position] for position in differences(self.inputs, before)]
        return {item.name for item in items if item.role is not Role.BATCH}

    def load(self, saved: list[Any]) -> None:
        with torch.no_grad():
            for value, old in zip(self.inputs, saved, strict=True):
                if isinstance(value, Tensor):
                    value.copy_(old)


@functools.cache
def undisturbed(training: str) -> list[list[Any]]:
    """What the captured graph leaves after one and after two steps."""
    step = captured(training)
    trial = Trial(step, lambda inputs: step.step.module(*inputs), clones(step.inputs))
    left = []
    for _ in range(2):
        trial.take_step()
        left.append(clones(trial.inputs))
    return left


def trial_of(name: str) -> tuple[Trial, CompiledStep]:
    """A trial that has taken one step."""
    training, compiled = setting_of(name).training, compiled_setting(name)
    return Trial(captured(training), compiled, clones(undisturbed(training)[0])), compiled


def clones(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def check_left(trial: Trial, compiled: CompiledStep, name: str, error: BaseException) -> None:
    """What the error says is true; nothing is left at work; the next step is right or refused."""
    first, second = undisturbed(SETTINGS[name].training)
    assert all(task.done.is_set() for task in compiled._device._tasks.values())
    assert not compiled._program.env
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    changed = trial.changed_since(first)
    if changed:
        assert NOTHING_CHANGED not in said
        assert said.count("load the last checkpoint") == 1
        listed = re.findall(r"(?:of the rest|half written) \((.*?)\)", said)
        named = {item for names in listed for item in names.split(", ")}
        assert changed <= named or "..." in named
        assert changed <= set(compiled.deferred.partial.left)
        with pytest.raises(StepFailed, match=r"an earlier step failed .* load the last checkpoint"):
            trial.take_step()
        assert trial.changed_since(first) == changed
        trial.load(first)
    else:
        assert NOTHING_CHANGED in said or "half written" in said
        trial.load(first)
    trial.take_step()
    assert not differences(trial.inputs, second)


# The faults.


def failing_call(work: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`work`, but for one call of it, which fails."""
    calls = iter(range(1 << 30))

    def call(*arguments: Any) -> Any:
        if next(calls) == number:
            raise RuntimeError(LINK_IS_DOWN)
        return work(*arguments)

    return call


def parts(count: int) -> list[int]:
    """Of so many: the first, the last, and one between."""
    return sorted({0, count // 2, count - 1}) if count else []


Find = Callable[[CompiledStep], list[fx.Node]]


def calls_of(*targets: Any) -> Find:
    return lambda compiled: [node for node in compiled.graph.nodes if node.target in targets]


def ops_of(phase: Phase) -> Find:
    def find_ops(compiled: CompiledStep) -> list[fx.Node]:
        phases = compiled.graph.phases
        return [node for node in compiled.graph.nodes if phases.get(node.name) is phase]

    return find_ops


PLACES: tuple[Find, ...] = (
    *map(ops_of, Phase),
    calls_of(ops.prefetch),
    calls_of(ops.offload, ops.host_cast),
    calls_of(host_region),
    calls_of(ops.offload_into, ops.prefetch_into),
    calls_of(ops.wait),
)


def nodes_everywhere(compiled: CompiledStep) -> list[fx.Node]:
    """Nodes of every kind, early and late ones."""
    found: dict[fx.Node, None] = {}
    for find_nodes in PLACES:
        nodes = find_nodes(compiled)
        found.update(dict.fromkeys(nodes[part] for part in parts(len(nodes))))
    return list(found)


def before_node(
    compiled: CompiledStep, node: fx.Node, act: Callable[[], None]
) -> AbstractContextManager[object]:
    """Within it, `act` is called when the device comes to `node`."""
    run_call = compiled._program.run_call

    def run(call: Call) -> Any:
        if node in call.nodes:
            act()
        return run_call(call)

    return mock.patch.object(compiled._program, "run_call", run)


@contextmanager
def restored_budgets(meter: MemoryMeter) -> Iterator[None]:
    budgets = dict(meter.budgets)
    try:
        yield
    finally:
        meter.budgets = budgets
