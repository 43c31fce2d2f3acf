"""Simulate devices: what plans for several devices take when they run beside each other.

In: a `JointProblem` and a plan for each device. Out: a `JointPlan`. Each device keeps the order of
its plan; a lane that several of them use (the host's) takes their works in the order of the ops
that they are issued after, and messages go where the op comes that makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.machine_devices import seen_from
from cotrain_compile.placement.joint import JointPlan, JointProblem, Message
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.residency import DeviceProgram, device_program
from cotrain_compile.placement.simulate.engine import Work, simulate
from cotrain_compile.placement.simulate.predict import lanes_of, works_of
from cotrain_compile.plan import Lane, Plan


def problem_of(
    problem: JointProblem, device: str, host_bytes: int, *, crowded: bool = False
) -> Problem:
    """The problem of one device's part, with so much of the host."""
    machine = seen_from(problem.machine, device, crowded=crowded)
    budgets = {Tier.DEVICE: problem.budgets[device], Tier.HOST: host_bytes}
    return formulate(problem.parts[device], machine, budgets)


def staged_bytes(problem: JointProblem) -> int:
    """Bytes of messages that go through the host, all at once."""
    return sum(m.nbytes for m in problem.messages if len(hops(problem.machine, m)) > 1)


def hops(machine: Machine, message: Message) -> tuple[str, ...]:
    """The links that `message` goes over: the direct one, or by the host."""
    ends = {link.ends: name for name, link in machine.links.items()}
    direct = ends.get((message.source, message.target))
    if direct is not None:
        return (direct,)
    return ends[message.source, Tier.HOST], ends[Tier.HOST, message.target]


def joined(problem: JointProblem, plans: Mapping[str, Plan]) -> JointPlan:
    """`plans`, simulated beside each other with what their lanes have in common."""
    if late := [plan.machine for plan in plans.values() if plan.carried]:
        raise PlanError(f"steps overlap on {late[0]}; plans of several devices keep steps apart")
    works = sorted(_placed_works(problem, plans), key=lambda placed: placed.position)
    awaited: dict[str, list[str]] = {}
    for message in problem.messages:
        last = hops(problem.machine, message)[-1]
        awaited.setdefault(_named(message.target, message.before), []).append(
            _leg(message.name, last)
        )
    names = {placed.work.name for placed in works}
    for message in problem.messages:
        _require_on_device(message, names)
    machine = problem.machine
    timeline = simulate(
        [replace(p.work, after=(*p.work.after, *awaited.get(p.work.name, ()))) for p in works],
        lanes_of(machine),
        machine.contention,
    )
    peaks = {device: plan.predicted.peak_bytes[Tier.DEVICE] for device, plan in plans.items()}
    peaks[Tier.HOST.value] = staged_bytes(problem) + sum(
        plan.predicted.peak_bytes[Tier.HOST] for plan in plans.values()
    )
    return JointPlan(dict(plans), replace(timeline, peak_bytes={}, memory={}), peaks)


def _require_on_device(message: Message, works: Set[str]) -> None:
    """A device sends: what makes a message is no op that a plan has sent to the host."""
    if _named(message.source, message.after) not in works:
        raise PlanError(
            f"{message.after} makes {message.buffer} for {message.target}, but the plan of "
            f"{message.source} has it on the host; plan with a policy that updates on the device"
        )


@dataclass(frozen=True)
class _Placed:
    """A work, and the position in the whole step before which it does not begin."""

    position: int
    work: Work


def _placed_works(problem: JointProblem, plans: Mapping[str, Plan]) -> Iterator[_Placed]:
    for device, plan in plans.items():
        yield from _works_on(problem, device, plan)
    for message in problem.messages:
        for work in _legs(problem.machine, message):
            yield _Placed(problem.dataflow.position[message.after], work)


def _works_on(problem: JointProblem, device: str, plan: Plan) -> Iterator[_Placed]:
    """The works of one plan, by the names that the machine has for its lanes."""
    alone = problem_of(problem, device, plan.budgets[Tier.HOST]).under(plan.placement)
    program = device_program(alone.dataflow, plan.placement, plan.moved)
    lanes = _lanes_seen_from(problem.machine, device)
    position = _positions(problem, program, plan)
    issued = {task.name: task.issue_after for task in plan.tasks}
    for work in works_of(alone, program, plan.tasks):
        yield _Placed(
            position[issued.get(work.name, work.name)],
            replace(
                work,
                name=_named(device, work.name),
                lane=lanes[work.lane],
                after=tuple(_named(device, name) for name in work.after),
            ),
        )


def _positions(
    problem: JointProblem, program: DeviceProgram, plan: Plan
) -> Mapping[str | None, int]:
    """Where in the whole step each op of a device runs; None is the start.

    One that was moved or is made again is where the op before it is.
    """
    known = dict(problem.dataflow.position)
    known |= {m.before: known[m.needed_by] for m in problem.messages}
    moved = {name for entry in plan.moved for name in entry.ops}
    position: dict[str | None, int] = {None: -1}
    latest = -1
    for op in program.ops:
        if op.name not in moved:
            latest = known.get(op.name, latest)
        position[op.name] = latest
    return position


def _legs(machine: Machine, message: Message) -> Sequence[Work]:
    """The copies that a message is made of, one behind the other."""
    works: list[Work] = []
    after = _named(message.source, message.after)
    for name in hops(machine, message):
        seconds = machine.copy_s(message.nbytes, *machine.links[name].ends)
        works.append(Work(_leg(message.name, name), name, seconds, after=(after,)))
        after = works[-1].name
    return works


def _lanes_seen_from(machine: Machine, device: str) -> Mapping[str, str]:
    """The lanes of the machine that the plan of a device calls by the names of `Lane`."""
    works_in = {processor.space: name for name, processor in machine.processors.items()}
    return {
        Lane.DEVICE: works_in[device],
        Lane.HOST: works_in[Tier.HOST],
        Lane.D2H: machine.link_between(device, Tier.HOST),
        Lane.H2D: machine.link_between(Tier.HOST, device),
    }


def _named(device: str, name: str) -> str:
    return f"{device}/{name}"


def _leg(message: str, link: str) -> str:
    return f"{link}/{message}"
