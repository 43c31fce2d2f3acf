"""AutoTM: the best placement in the model of AutoTM (Hildebrand et al., ASPLOS 2020), a reference.

In: a `Problem`. Out: the optimum of an integer program that moves whole tensors at whole slots, a
slot being an op or a short run of ops (`autotm_step`).

A tensor is one unit of flow through the places it can be at before, between and after the slots:
DEVICE, HOST, or BOTH as long as neither copy is written, so that leaving again is free. An update
is something that either side can run. The variants are three nested sets of arcs:

- `static`: nothing moves but what a host update takes and returns; its states rest on the host;
- `synchronous`: also copies between two slots, for which the device waits;
- `asynchronous`: also copies and host updates beside a slot, in parallel with it.

x[a] = 1 when arc a is taken, T[s] is the time of slot s, h[g] the sum of the arcs that update
parameter g on the host. Minimise sum T[s] + sum stall[a] x[a] so that

- each tensor takes one path, from its home back to its home (`_add_paths`),
- a slot lasts as long as its ops, and as each lane beside it (`minimise_time`),
- an update finds its tensors on the side that runs it (`_add_update`),
- at each op the device holds no more than its budget (`_limit_memory`).

Host memory is not limited here, nor is it in the paper; `schedule` checks it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, count, pairwise
from typing import Any, Literal, NoReturn

from cotrain_compile.dataflow import PERSISTENT_ROLES, UpdateGroup
from cotrain_compile.errors import OptionError, PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.autotm.arcs import Arc, Place, Variant, arcs_of, homes_of, is_home
from cotrain_compile.placement.autotm.step import MemoryRow, Step, Tensor, TensorKind
from cotrain_compile.placement.milp.highs_process import SolverAnswer, has_highs, solve_elsewhere
from cotrain_compile.placement.milp.linear import Expression, LinearProgram, summed
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import HOST_MODES
from cotrain_compile.placement.work import UNLIMITED
from cotrain_compile.plan import Lane, Placement, UpdateMode
from cotrain_compile.support.units import format_budget, format_bytes, format_exactly

MAX_TENSORS = 400
# Added to the objective, of the seconds of work beside a slot: nothing moves without a reason.
OVERLAP_PRICE = 1e-4


@dataclass(frozen=True)
class AutoTM:
    """What the program found.

    `objective_s` is the step time that it claims (with `OVERLAP_PRICE`), `bound_s` the least that
    any answer of it can have; `status` is "optimal" or "time limit".
    """

    objective_s: float
    bound_s: float
    status: str
    placement: Placement


def autotm(
    problem: Problem, variant: Variant, *, time_limit_s: float = 60.0, seed: int = 0
) -> AutoTM:
    """The best placement for `problem` in the model of `variant`.

    Raises:
        PlacementError: none fits the device's budget; `shortfall_bytes` is by how much the least
            feasible budget is larger, or the least one found within `time_limit_s`.
        PlanError: the step has more than `MAX_TENSORS` tensors, or no answer was found in time.
        OptionError: HiGHS is not installed.
    """
    if not has_highs():
        raise OptionError(f"policy 'autotm-{variant}' needs HiGHS: pip install highspy")
    step = Step(problem)
    if len(step.tensors) > MAX_TENSORS:
        raise PlanError(
            f"policy 'autotm-{variant}' decides about {MAX_TENSORS} tensors at most, this step has "
            f"{len(step.tensors)}; use the bucketed program (policy 'auto')"
        )
    program = _Program(step, variant)
    program.minimise_time(problem.budgets[Tier.DEVICE])
    status = program.solve(time_limit_s, seed)
    if status == "infeasible":
        _refuse(step, variant, time_limit_s, seed)
    objective, bound = program.objective_and_bound()
    return AutoTM(objective * step.unit_s, bound * step.unit_s, status, _placement(program))


class _Program:
    """The integer program: paths and updates, then one of the two objectives, then `solve`.

    Time is in units of `step.unit_s`, memory in units of `step.unit_bytes`.
    """

    def __init__(self, step: Step, variant: Variant) -> None:
        self.step, self.variant = step, variant
        self.linear = LinearProgram()
        self.answer: SolverAnswer | None = None
        self.names = count()
        self.on_host: dict[str, Any] = {}
        self.arcs: dict[str, list[tuple[Arc, Any]]] = {}
        self.crossing: dict[tuple[str, int], list[tuple[Arc, Any]]] = defaultdict(list)
        for tensor in step.tensors.values():
            self._add_paths(tensor)
        self.hosted = {
            group.param: summed(x for arc, x in self.arcs[group.param] if arc.updates)
            for group in step.dataflow.updates
        }
        for group in step.dataflow.updates:
            self._add_update(group)

    def _binary(self) -> Any:
        return self.linear.choice(f"x{next(self.names)}")

    def _add_paths(self, tensor: Tensor) -> None:
        """One unit flows from one of the tensor's homes to the same home."""
        homes = homes_of(self.variant, tensor)
        starts = {home: self._binary() for home in homes}
        self.linear.add(summed(starts.values()) == 1)
        self.on_host[tensor.name] = starts.get(Tier.HOST, 0)
        self.arcs[tensor.name] = []
        for home, start in starts.items():
            flow: dict[tuple[int, Place], list[Any]] = defaultdict(list)
            flow[tensor.first, Place.HOST if home is Tier.HOST else Place.DEVICE].append(start)
            for arc in arcs_of(self.step, self.variant, tensor, home):
                taken = self._binary()
                flow[arc.at, arc.tail].append(-taken)
                flow[arc.at + arc.crosses, arc.head].append(taken)
                self.arcs[tensor.name].append((arc, taken))
                if arc.crosses:
                    self.crossing[tensor.name, arc.at].append((arc, taken))
            for (point, place), terms in flow.items():
                if point <= tensor.last or not is_home(tensor, home, place):
                    self.linear.add(summed(terms) == 0)

    def _add_update(self, group: UpdateGroup) -> None:
        """An update runs once, where its tensors are. Homes are those that an `UpdateMode` has."""
        states = next((t for t in self._of(group) if t.kind is TensorKind.STATES), None)
        self.linear.add(self.hosted[group.param] <= 1)
        for slot in self.step.window[group.param]:
            here = self._sum(group.param, slot, lambda arc: arc.updates)
            self.linear.add(here <= self._sum(group.gradient, slot, lambda arc: arc.is_on_host))
            if states:
                self.linear.add(
                    here <= self._sum(states.name, slot, lambda arc: arc.is_on_host_only)
                )
        for tensor in self._of(group):
            for slot, writes in tensor.update_uses.items():
                crossing = self.crossing[tensor.name, slot]
                found = summed(x for arc, x in crossing if arc.serves(writes))
                self.linear.add(found + self.hosted[group.param] >= 1)
        if states:
            self.linear.add(self.on_host[group.param] <= self.on_host[states.name])

    def _of(self, group: UpdateGroup) -> list[Tensor]:
        return [t for t in self.step.tensors.values() if t.param == group.param]

    def _sum(self, tensor: str, slot: int, which: Callable[[Arc], bool]) -> Any:
        return summed(x for arc, x in self.crossing[tensor, slot] if which(arc))

    def minimise_time(self, budget_bytes: int) -> None:
        """The time of the step, within a budget."""
        self._limit_memory(budget_bytes)
        unit_s, costs = self.step.unit_s, self.step.problem.costs
        slots = [self.linear.column(f"T{s}") for s in range(self.step.end + 1)]
        device_s: dict[tuple[int, str], float] = defaultdict(float)
        for op, slot in zip(self.step.dataflow.ops, self.step.slot_of, strict=False):
            device_s[slot, self.step.group_of.get(op.name, "")] += costs.device_s[op.name] / unit_s
        work: dict[tuple[int, Lane], list[Any]] = defaultdict(list)
        stalls = []
        for arc, taken in (pair for arcs in self.arcs.values() for pair in arcs if pair[0].seconds):
            if arc.lane is None:
                stalls.append(arc.seconds / unit_s * taken)
            else:
                work[arc.at, arc.lane].append(arc.seconds / unit_s * taken)
        ops: dict[int, list[Any]] = defaultdict(list)
        for (slot, param), seconds in device_s.items():
            ops[slot].append(seconds * (1 - self.hosted[param]) if param else seconds)
        for slot, terms in [*ops.items(), *((slot, terms) for (slot, _), terms in work.items())]:
            self.linear.add(slots[slot] >= summed(terms))
        price = OVERLAP_PRICE * summed(chain.from_iterable(work.values()))
        self.linear.objective = summed(slots) + summed(stalls) + price

    def minimise_memory(self) -> None:
        """The least budget, whatever the time."""
        budget = self.linear.column("budget")
        self._limit_memory(0, budget)
        self.linear.objective = budget

    def _limit_memory(self, budget_bytes: int, more: Any = 0) -> None:
        """At each op at most `budget_bytes`, and `more` units where that is a variable."""
        unit = self.step.unit_bytes
        for row in self.step.rows:
            terms = self._memory(row)
            if row.fixed_bytes + sum(nbytes for nbytes, _ in terms) > budget_bytes:
                used = summed(nbytes / unit * there for nbytes, there in terms)
                self.linear.add(used - more <= (budget_bytes - row.fixed_bytes) / unit)

    def _memory(self, row: MemoryRow) -> list[tuple[int, Any]]:
        """What may be on the device at `row`: bytes, and an expression that is 1 if it is."""
        step, slot = self.step, self.step.slot_of[row.op]
        tensors = [
            (step.tensors[name].nbytes, self._sum(name, slot, lambda arc: arc.held))
            for name in sorted(row.tensors)
        ]
        made = [
            (step.dataflow.buffer[name].nbytes, 1 - self.hosted[step.made_by[name]])
            for name in sorted(row.made)
        ]
        return tensors + made

    def used_bytes(self, row: MemoryRow) -> int:
        """Bytes on the device at `row` in the solution."""
        moving: int = sum(n * round(self.value(there)) for n, there in self._memory(row))
        return row.fixed_bytes + moving

    def solve(
        self, time_limit_s: float, seed: int
    ) -> Literal["optimal", "time limit", "infeasible"]:
        """Raises PlanError when the time limit passes without any answer."""
        options = {
            "mip_rel_gap": 1e-4,
            "random_seed": seed,
            "time_limit": time_limit_s,
            # In MiB, a thousandth of a byte.
            "mip_feasibility_tolerance": 1e-9,
            "primal_feasibility_tolerance": 1e-9,
        }
        answer = self.answer = solve_elsewhere(self.linear, options, UNLIMITED)
        if answer.is_optimal:
            return "optimal"
        if answer.values is not None:
            return "time limit"
        if answer.is_infeasible:
            return "infeasible"
        raise PlanError(
            f"policy 'autotm-{self.variant}' found no placement within {time_limit_s:g} s; raise "
            "time_limit_s, or use the bucketed program (policy 'auto')"
        )

    def value(self, expression: Expression | float) -> float:
        """What it is in the solution."""
        assert self.answer is not None
        assert self.answer.values is not None
        if isinstance(expression, Expression):
            return expression.at(self.answer.values)
        return expression

    def takes(self, expression: Expression | float) -> bool:
        """Whether it is 1 in the solution, and not 0."""
        return self.value(expression) > 0.5

    def objective_and_bound(self) -> tuple[float, float]:
        """Of the solution, in `step.unit_s`."""
        assert self.answer is not None
        objective = self.value(self.linear.objective)
        return objective, min(objective, self.answer.bound)

    def path(self, tensor: str) -> list[Arc]:
        """The arcs that the solution takes."""
        return [arc for arc, taken in self.arcs[tensor] if self.takes(taken)]


def _placement(program: _Program) -> Placement:
    step = program.step
    on_host = {name for name, x in program.on_host.items() if program.takes(x)}
    host_buffers = {b.name for name in on_host for b in step.tensors[name].buffers}
    updates = {
        group.param: _mode(
            is_hosted=program.takes(program.hosted[group.param]),
            is_param_offloaded=group.param in host_buffers,
            are_states_offloaded=not host_buffers.isdisjoint(group.states),
        )
        for group in step.dataflow.updates
    }
    return Placement(
        policy=f"autotm-{program.variant}",
        homes={
            b.name: Tier.HOST if b.name in host_buffers else Tier.DEVICE
            for b in step.dataflow.buffers
            if b.role in PERSISTENT_ROLES
        },
        updates=updates,
        offloaded=tuple(t.name for t in step.tensors.values() if _is_off(program, t, updates)),
        early_updates=program.variant == "asynchronous",
    )


def _mode(*, is_hosted: bool, is_param_offloaded: bool, are_states_offloaded: bool) -> UpdateMode:
    if is_hosted:
        return UpdateMode.HOST_STREAMED if is_param_offloaded else UpdateMode.HOST
    return (
        UpdateMode.STREAMED if is_param_offloaded or are_states_offloaded else UpdateMode.RESIDENT
    )


def _is_off(program: _Program, tensor: Tensor, updates: Mapping[str, UpdateMode]) -> bool:
    """Whether `Placement.offloaded` names it: in the longest gap between two uses, its path is
    off the device, and the plan would not have it so anyway."""
    step = program.step
    if not _may_be_named(program, tensor, updates):
        return False
    group = step.dataflow.update.get(tensor.name)
    own_ops = group.ops if group else ()
    uses = [i for i in step.touches[tensor.name] if step.dataflow.ops[i].name not in own_ops]
    begin, end = max(pairwise(uses), key=lambda pair: pair[1] - pair[0], default=(0, 0))
    gap = range(step.slot_of[begin] + 1, step.slot_of[end])
    return any(not arc.held and arc.crosses and arc.at in gap for arc in program.path(tensor.name))


def _may_be_named(program: _Program, tensor: Tensor, updates: Mapping[str, UpdateMode]) -> bool:
    if tensor.kind is TensorKind.PARAM:
        # Where there is a low-precision copy, a plan fetches that: a tensor of its own.
        group = program.step.dataflow.update.get(tensor.name)
        return program.takes(program.on_host[tensor.name]) and not (group and group.low_precision)
    if tensor.kind is TensorKind.GRADIENT and updates[tensor.param] in HOST_MODES:
        return False
    return not tensor.persists


def _refuse(step: Step, variant: Variant, time_limit_s: float, seed: int) -> NoReturn:
    program = _Program(step, variant)
    program.minimise_memory()
    program.solve(time_limit_s, seed)
    used = {row.op: program.used_bytes(row) for row in step.rows}
    peak = max(used, key=used.__getitem__)
    ops, budget = step.dataflow.ops, step.problem.budgets[Tier.DEVICE]
    where = f"at {ops[peak].name}" if peak < len(ops) else "at the end of the step"
    short = used[peak] - budget
    raise PlacementError(
        f"policy 'autotm-{variant}' needs at least {format_bytes(used[peak])} on the device "
        f"({where}), but memory_budget is {format_budget(budget)}: {format_exactly(short)} "
        f"short; raise memory_budget, or make the batch smaller",
        shortfall_bytes=short,
    )
