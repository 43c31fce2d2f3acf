"""Joint check: do plans for several devices, with their messages, compute the one step?

Each plan is checked on its part of the step as any plan is. Here is what only shows between them:
the parts are the step, whatever crosses has the right value and is there in time, no two wait for
each other, and every space has room for all that is in it. Shares no code with what splits steps
and makes plans.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from cotrain_compile.dataflow import PERSISTENT_ROLES, Op
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.as_placed import as_placed
from cotrain_compile.placement.check.check import check_budget, peaks_of
from cotrain_compile.placement.check.copies import values_of
from cotrain_compile.placement.check.replay import Peak
from cotrain_compile.placement.check.rules import require
from cotrain_compile.placement.check.run_order import run_order
from cotrain_compile.placement.joint import RECEIVE, JointPlan, JointProblem, Message


def check_joint(problem: JointProblem, plan: JointPlan) -> None:
    """Raise `PlanError` unless `plan` computes the step of `problem` within its budgets."""
    require(set(plan.plans) == set(problem.parts), "every device with ops needs one plan")
    for device, of_device in plan.plans.items():
        part = problem.parts[device]
        require(
            of_device.fingerprint == part.fingerprint,
            f"the plan of {device} was made for {of_device.fingerprint}, not {part.fingerprint}",
        )
        require(not of_device.carried, f"tasks of {device} go on in the next step")
    _check_parts(problem)
    _check_budgets(problem, plan)
    _Crossings(problem, plan).check()


def _check_parts(problem: JointProblem) -> None:
    """Each op is in the part of its device, as the step has it, and so is all that it touches."""
    dataflow, device_of = problem.dataflow, problem.device_of
    updates = sum(len(part.updates) for part in problem.parts.values())
    require(updates == len(dataflow.updates), "the parts have other updates than the step")
    require(set(device_of.values()) == set(problem.parts), "every device with ops has one part")
    for device, part in problem.parts.items():
        receiving = {m.before for m in problem.messages if m.target == device}
        ops = tuple(op for op in dataflow.ops if device_of[op.name] == device)
        own = tuple(op for op in part.ops if op.name not in receiving)
        require(own == ops, f"the part of {device} has other ops than the step has there")
        require(len(part.ops) == len(own) + len(receiving), f"{device} does not receive all of it")
        strange = [group.param for group in part.updates if group not in dataflow.updates]
        require(not strange, f"{device} updates {strange[:3]} otherwise than the step")
        sent = {m.buffer for m in problem.messages if m.source == device}
        received = {m.buffer for m in problem.messages if m.target == device}
        for buffer in part.buffers:
            whole = dataflow.buffer.get(buffer.name)
            if whole is None:
                nothing = buffer.nbytes == 0 and buffer.is_input
                require(nothing, f"{buffer.name} on {device} is none of the step's")
                continue
            same = (whole.nbytes, whole.role, whole.param) == (
                buffer.nbytes,
                buffer.role,
                buffer.param,
            )
            require(same, f"{buffer.name} on {device} is not as in the step")
            same = buffer.is_input is whole.is_input
            require(same, f"{device} has {buffer.name} without a message")
            kept = buffer.is_output or buffer.name not in sent
            require(kept, f"{device} does not keep {buffer.name}, which it sends")
            returned = whole.is_output and buffer.name not in received
            require(buffer.is_output or not returned, f"{device} does not keep {buffer.name}")


def _check_budgets(problem: JointProblem, plan: JointPlan) -> None:
    """In every space, the sum of what all plans and messages have there at the most."""
    require(set(problem.budgets) == set(problem.machine.spaces), "every space needs one budget")
    on_host = sum(m.nbytes for m in problem.messages if len(_way(problem, m)) > 1)
    workers = problem.machine.host_update.workers
    for device, of_device in plan.plans.items():
        peaks = peaks_of(problem.parts[device], of_device, workers)
        check_budget(device, peaks[Tier.DEVICE], problem.budgets[device])
        on_host += peaks[Tier.HOST].nbytes
    host = Peak(on_host, "for all devices together")
    check_budget(Tier.HOST, host, problem.budgets[Tier.HOST])


def _way(problem: JointProblem, message: Message) -> tuple[tuple[str, str], ...]:
    """The links that a message crosses, by their ends."""
    source, target, host = message.source, message.target, Tier.HOST.value
    ends = {(link.source, link.target) for link in problem.machine.links.values()}
    if (source, target) in ends:
        return ((source, target),)
    way = ((source, host), (host, target))
    require(set(way) <= ends, f"{message.name} has no way from {source} to {target}")
    return way


class _Crossings:
    """What the devices of a step have of each other. `check` once."""

    def __init__(self, problem: JointProblem, plan: JointPlan) -> None:
        self.problem, self.dataflow = problem, problem.dataflow
        self.order = {
            device: run_order(as_placed(problem.parts[device], of_device.placement), of_device)
            for device, of_device in plan.plans.items()
        }
        self.slot = {op.name: i for ops in self.order.values() for i, op in enumerate(ops)}
        self.runs = {op.name: d for d, ops in self.order.items() for op in ops}
        self.message = {(m.buffer, m.target): m for m in problem.messages}

    def check(self) -> None:
        require(
            len(self.message) == len(self.problem.messages), "a buffer is sent to a device twice"
        )
        for message in self.problem.messages:
            self._check_message(message)
        values = values_of(self.dataflow).needed
        for op in self.dataflow.ops:
            for name in op.reads:
                self._check_read(op, name, values[op.name][name])
        self._check_written_once()
        self._check_order()

    def _device(self, op: str) -> str:
        return self.problem.device_of[op]

    def _check_message(self, m: Message) -> None:
        require(m.after in self.slot, f"{m.name} follows {m.after}, which no device runs")
        require(m.before in self.slot, f"{m.name} is for {m.before}, which no device runs")
        ends = (self.runs[m.after], self.runs[m.before])
        require(ends == (m.source, m.target), f"{m.name} goes from {m.source} to {m.target}")
        size = self.dataflow.buffer[m.buffer].nbytes
        require(m.nbytes == size, f"{m.name} moves {m.nbytes} bytes of {size}")
        _way(self.problem, m)
        target = self.problem.parts[m.target]
        receives = target.ops[target.position[m.before]]
        wrote = (receives.target, receives.writes, receives.flops)
        require(wrote == (RECEIVE, (m.buffer,), 0), f"{m.before} does not receive {m.buffer}")
        for op in self.dataflow.ops:
            if m.buffer in op.writes:
                early = op.name in self.slot and self.slot[op.name] <= self.slot[m.after]
                require(
                    self._device(op.name) == m.source and early,
                    f"{op.name} writes {m.buffer} after {m.name} is sent, or elsewhere",
                )

    def _check_read(self, op: Op, name: str, writer: str) -> None:
        """`op` reads what `writer` has left, "" for what the step began with."""
        here = self._device(op.name)
        if not writer or self._device(writer) == here:
            return
        message = self.message.get((name, here))
        require(message is not None, f"{op.name} reads {name} on {here}, where nothing sends it")
        assert message is not None
        position = self.problem.parts[here].position
        in_time = position[message.before] < position[op.name]
        require(in_time, f"{op.name} reads {name} before {message.name} is received")

    def _check_written_once(self) -> None:
        """What the step finds is written on one device at most, and then on no other touched."""
        touching: dict[str, set[str]] = {}
        writing: dict[str, set[str]] = {}
        for op in self.dataflow.ops:
            for name in (*op.reads, *op.writes):
                touching.setdefault(name, set()).add(self._device(op.name))
            for name in op.writes:
                writing.setdefault(name, set()).add(self._device(op.name))
        for name, devices in writing.items():
            buffer = self.dataflow.buffer[name]
            is_found = buffer.is_input or buffer.role in PERSISTENT_ROLES
            allowed = touching[name] if is_found else devices
            require(len(allowed) == 1, f"{name} is written while {sorted(allowed)} have it")

    def _check_order(self) -> None:
        """No device waits for a message of one that waits for it."""
        before: dict[str, set[str]] = {name: set() for name in self.slot}
        for ops in self.order.values():
            for earlier, later in pairwise(ops):
                before[later.name].add(earlier.name)
        for m in self.problem.messages:
            before[m.before].add(m.after)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            circle = " -> ".join(error.args[1])
            raise PlanError(f"unsound plan: devices wait for each other: {circle}") from None
