"""Check: is a plan sound for its problem? Written without the code that makes plans.

Replays the step op by op with the bytes on the device and the state of every task, and says which
rule is broken where.
"""

from __future__ import annotations

from cotrain_compile.dataflow import PERSISTENT_ROLES, Op, Role, UpdateGroup
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer, UpdateMode


def check(problem: Problem, plan: Plan) -> None:
    """Raise `PlanError` unless `plan` computes the step of `problem` within its budgets."""
    dataflow = problem.dataflow
    if plan.fingerprint != dataflow.fingerprint:
        raise PlanError(
            f"the plan was made for step {plan.fingerprint}, this step is {dataflow.fingerprint}; "
            "make a new plan for it"
        )
    persistent = {b.name for b in dataflow.buffers if b.role in PERSISTENT_ROLES}
    _require(set(plan.placement.homes) == persistent, "every persistent buffer needs one home")
    groups = set(dataflow.update)
    _require(set(plan.placement.updates) == groups, "every parameter needs one update mode")
    _check_regions(problem, plan)
    _Replay(problem, plan).run()


def _check_regions(problem: Problem, plan: Plan) -> None:
    """Each host update has its region, its inputs and its way back; nothing else has one."""
    tasks = {task.name: task for task in plan.tasks}
    _require(len(tasks) == len(plan.tasks), "two tasks share a name")
    hosted = {p for p, mode in plan.placement.updates.items() if mode is UpdateMode.HOST}
    regions = {region.param: region for region in plan.host_regions}
    _require(set(regions) == hosted, "host regions and host updates do not match")
    for param, region in regions.items():
        group = problem.dataflow.update[param]
        needed = [tasks[name] for name in region.after if name in tasks]
        sent = {task.buffer for task in needed if isinstance(task, Transfer)}
        inputs = {param, group.gradient, *_made_on_device(problem, group)}
        _require(inputs <= sent, f"the update of {param} does not wait for its inputs")
        for state in group.states:
            _require(
                plan.placement.homes[state] is Tier.HOST, f"{state} is not at home on the host"
            )
        back = [t for t in plan.transfers if t.destination == param]
        _require(len(back) == 1, f"the new {param} is not moved back once")
        _require(region.name in back[0].after, f"{param} is moved back before its update")


def _made_on_device(problem: Problem, group: UpdateGroup) -> set[str]:
    """The scalars of `group` that the host does not have anyway."""
    host_side = (Role.HYPERPARAMETER, Role.CONSTANT)
    return {name for name in group.scalars if problem.dataflow.buffer[name].role not in host_side}


class _Replay:
    """One pass over the device's ops with what is on the device."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        hosted = {region.param for region in plan.host_regions}
        groups = [group for group in problem.dataflow.updates if group.param in hosted]
        away = {op for group in groups for op in group.ops}
        position = problem.dataflow.position
        self.update_end = {g.param: max(position[op] for op in g.ops) for g in groups}
        self.on_the_way_back: set[str] = set()
        self.updated: set[str] = set()
        self.ops = [op for op in problem.dataflow.ops if op.name not in away]
        self.last_use = {
            name: index for index, op in enumerate(self.ops) for name in (*op.reads, *op.writes)
        }
        self.slot = {op.name: index for index, op in enumerate(self.ops)}
        self.issue_at: dict[str | None, list[Task]] = {}
        self.wait_at: dict[str | None, list[Task]] = {}
        for task in plan.tasks:
            self.issue_at.setdefault(task.issue_after, []).append(task)
            self.wait_at.setdefault(task.wait_before, []).append(task)
        self.last_write = {name: index for index, op in enumerate(self.ops) for name in op.writes}
        self.alive: dict[str, int] = {}
        self.pinned: dict[str, set[str]] = {}
        self.waited: set[str] = set()
        self.issued: set[str] = set()

    def run(self) -> None:
        for buffer in self.problem.dataflow.buffers:
            if buffer.is_input and self.plan.placement.homes.get(buffer.name) is not Tier.HOST:
                self.alive[buffer.name] = buffer.nbytes
        self._issue(None)
        self._check_budget("the start of the step")
        for index, op in enumerate(self.ops):
            self._wait(op.name, index)
            for name in op.reads:
                _require(name in self.alive, f"{op.name} reads {name}, which is not on the device")
            for name in {*op.reads, *op.writes} & self.update_end.keys():
                self._check_side(op, name)
            for name in op.writes:
                self.alive.setdefault(name, self.problem.dataflow.buffer[name].nbytes)
            self._check_budget(op.name)
            self._issue(op.name)
            self._free(index, {*op.reads, *op.writes})
        self._wait(None, len(self.ops))
        names = {task.name for task in self.plan.tasks}
        _require(self.issued == names, f"never issued: {sorted(names - self.issued)[:3]}")
        _require(self.waited == names, f"never waited for: {sorted(names - self.waited)[:3]}")

    def _check_side(self, op: Op, param: str) -> None:
        """`op` finds the old value of `param` before its update and the new one after it."""
        wants_new = self.problem.dataflow.position[op.name] > self.update_end[param]
        is_right = param not in self.on_the_way_back and (param in self.updated) == wants_new
        _require(is_right, f"{op.name} touches {param} on the wrong side of its update")

    def _issue(self, op: str | None) -> None:
        for task in self.issue_at.get(op, ()):
            missing = [name for name in task.after if name not in self.issued]
            _require(not missing, f"{task.name} is issued before {missing[:1]}")
            self._check_source(task)
            self.issued.add(task.name)
            if isinstance(task, Transfer) and task.direction == "offload":
                self.pinned.setdefault(task.buffer, set()).add(task.name)
            elif isinstance(task, Transfer):
                self.on_the_way_back.add(task.destination)

    def _check_source(self, task: Task) -> None:
        if isinstance(task, HostRegion):
            return
        size = self.problem.dataflow.buffer[task.buffer].nbytes
        _require(task.nbytes == size, f"{task.name} moves {task.nbytes} bytes of {size}")
        if task.direction == "offload":
            _require(task.buffer in self.alive, f"{task.name}: nothing there to copy yet")
            issued = -1 if task.issue_after is None else self.slot[task.issue_after]
            last = self.last_write.get(task.buffer, -1)
            _require(last <= issued, f"{task.name}: a later op still writes the buffer")

    def _wait(self, op: str | None, index: int) -> None:
        for task in self.wait_at.get(op, ()):
            _require(task.name in self.issued, f"{task.name} is waited for before its issue")
            self.waited.add(task.name)
            if isinstance(task, Transfer) and task.direction == "offload":
                self.pinned[task.buffer].discard(task.name)
                self._free(index - 1, {task.buffer})
            elif isinstance(task, Transfer):
                self.on_the_way_back.remove(task.destination)
                self.updated.add(task.destination)

    def _free(self, index: int, names: set[str]) -> None:
        for name in names:
            buffer = self.problem.dataflow.buffer[name]
            kept = buffer.is_input or buffer.is_output or self.pinned.get(name)
            if not kept and self.last_use.get(name, -1) <= index:
                self.alive.pop(name, None)

    def _check_budget(self, where: str) -> None:
        used, budget = sum(self.alive.values()), self.plan.budgets[Tier.DEVICE]
        _require(used <= budget, f"{used} bytes on the device at {where}, budget {budget}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(f"unsound plan: {message}")
