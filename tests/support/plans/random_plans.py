"""Random plans: sound plans over every mode of placement, naive and of any quality.

A Problem and a random generator in, a Plan out. Independent of the scheduler: each task is issued
and waited for in random gaps in which it may be. Gap k lies before op k of the device's ops; the
last one is the end of the step. Budgets are exactly the peaks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow, Role, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import place
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import (
    HOST_MODES,
    DeviceProgram,
)
from cotrain_compile.plan import (
    HostRegion,
    MovedOps,
    Placement,
    Plan,
    Task,
    Timeline,
    Transfer,
    UpdateMode,
)
from tests.support.plans.random_moves import Mover


def random_plan(problem: Problem, rng: random.Random) -> Plan:
    """A plan whose placement and schedule are random, with budgets that it just fits.

    What is made again is what `problem` makes again, the order of micro-batches its order, and
    parameters are cast once where it does so.
    """
    placement = _random_placement(problem.dataflow, rng)
    size = problem.layers_per_pack
    placement = replace(
        placement,
        recomputed=problem.recomputed,
        recomputed_apart=problem.apart,
        layers_per_pack=size,
        casts_once=problem.cast_once,
    )
    moved = Mover(problem.dataflow, placement, rng).moved()
    program = place(problem, placement, moved=moved).program
    return _plan(problem, moved, _TaskPlacer(program, placement, rng))


def last_moment_plan(problem: Problem, placement: Placement, *, offloaded: bool = False) -> Plan:
    """A plan in which everything happens as late as it may; `offloaded`: all that can be."""
    program = place(problem, placement).program
    return _plan(problem, (), _LastMoment(program, placement, random.Random(0), offloaded))


def _plan(problem: Problem, moved: tuple[MovedOps, ...], placer: _TaskPlacer) -> Plan:
    placer.place_all()
    again = tuple(placer.refetched)
    placement = replace(placer.placement, offloaded=tuple(placer.offloaded), refetched=again)
    tasks = placer.in_order_of_issue()
    placed = place(problem, placement, tasks, moved)
    peaks = {Tier.DEVICE: max(placed.device_bytes), Tier.HOST: placed.host_bytes}
    return Plan(
        fingerprint=problem.dataflow.fingerprint,
        machine=problem.machine.name,
        budgets=peaks,
        placement=placement,
        tasks=tasks,
        predicted=Timeline("predicted", (), peaks),
        moved=moved,
    )


# Which tier, and which way to update.


def _random_placement(dataflow: Dataflow, rng: random.Random) -> Placement:
    homes = {b.name: Tier.DEVICE for b in dataflow.buffers if b.role in PERSISTENT_ROLES}
    updates: dict[str, UpdateMode] = {}
    for group in dataflow.updates:
        mode = rng.choice(list(UpdateMode))
        if mode is UpdateMode.HOST_STREAMED and _is_read_after_its_update(dataflow, group):
            mode = UpdateMode.HOST
        on_host = list(group.states) if mode is not UpdateMode.RESIDENT else []
        if mode is UpdateMode.STREAMED:
            on_host = [state for state in group.states if rng.random() < 0.8]
        if mode is UpdateMode.HOST_STREAMED or (
            mode is UpdateMode.STREAMED and (rng.random() < 0.5 or not on_host)
        ):
            on_host.append(group.param)
        homes.update(dict.fromkeys(on_host, Tier.HOST))
        updates[group.param] = mode
    written = {name for op in dataflow.ops for name in op.writes}
    for buffer in dataflow.buffers:
        is_frozen = buffer.role is Role.PARAM and buffer.name not in written
        if is_frozen and rng.random() < 0.5:
            homes[buffer.name] = Tier.HOST
    for param, gradients in dataflow.kept_gradients.items():
        homes.update(dict.fromkeys(gradients, homes[param]))
    return Placement("random", homes, updates)


def _is_read_after_its_update(dataflow: Dataflow, group: UpdateGroup) -> bool:
    last = max(dataflow.position[name] for name in group.ops)
    return any(group.param in op.reads for op in dataflow.ops[last + 1 :])


# When everything moves.


@dataclass(frozen=True)
class _Placed:
    """A task with the gap it is issued in."""

    gap: int
    task: Task

    @property
    def order(self) -> tuple[int, bool]:
        return self.gap, isinstance(self.task, Transfer) and self.task.is_fetch


class _TaskPlacer:
    """Finds the tasks of a placement and puts each where it may be, after what it needs."""

    def __init__(self, program: DeviceProgram, placement: Placement, rng: random.Random) -> None:
        self.program, self.placement, self.rng = program, placement, rng
        self.dataflow, self.end = program.dataflow, program.end
        self.placed: dict[str, _Placed] = {}
        self.offloaded: list[str] = []
        self.refetched: list[str] = []

    def in_order_of_issue(self) -> tuple[Task, ...]:
        return tuple(p.task for p in sorted(self.placed.values(), key=lambda p: p.order))

    def place_all(self) -> None:
        for buffer in self.dataflow.buffers:
            if buffer.role is Role.PARAM and self._is_on_host(buffer.name):
                self._place_weight(buffer.name)
            if buffer.param and buffer.is_input and self._is_on_host(buffer.name):
                self._place_found_gradient(buffer.name)
        for group in self.dataflow.updates:
            mode = self.placement.updates[group.param]
            if mode is UpdateMode.STREAMED:
                self._place_streamed_update(group)
            elif mode in HOST_MODES:
                self._place_host_update(group)
        for buffer in self.dataflow.buffers:
            if buffer.param and not buffer.is_input and self._is_on_host(buffer.name):
                self._place_offload(buffer.name, self.end)
        for buffer in self.dataflow.buffers:
            is_sent = f"offload.{buffer.name}" in self.placed
            moves = not (buffer.is_input or buffer.is_output or is_sent)
            if moves and buffer.name not in self.program.fetched.values():
                self._place_activation(buffer.name)

    def _is_on_host(self, name: str) -> bool:
        return self.placement.homes.get(name) is Tier.HOST

    def _place_weight(self, param: str) -> None:
        fetched = self.program.fetched[param]
        touches = self.program.touches.get(fetched, [])
        after: tuple[str, ...] = ()
        ready = 0
        if fetched != param and touches:
            ready = self._between(0, touches[0])
            ops = tuple(op.name for op in self.dataflow.ops if fetched in op.writes)
            wait = self._between(ready, self.end)
            cast = HostRegion(f"cast.{param}", param, ops, None, None, makes=fetched)
            self._place(cast, ready, wait)
            after = (cast.name,)
        written = self.program.last_write(fetched)
        # A second copy has to be there for the update: the home has the old value until then.
        splits = [i for i in range(1, len(touches)) if not 0 <= written <= touches[i - 1]]
        split = self.rng.choice(splits) if splits and self._is_offloaded() else len(touches)
        stays = [stay for stay in (touches[:split], touches[split:]) if stay]
        if len(stays) == 2:
            self.offloaded.append(fetched)
        free_from = 0
        for number, stay in enumerate(stays):
            name = f"{'refetch' if number else 'fetch'}.{fetched}"
            self._place_fetch(name, fetched, ready, free_from, stay[0], after)
            free_from = stay[-1] + 1
        if fetched != param:
            self._place_own_fetch(param)

    def _place_found_gradient(self, name: str) -> None:
        """The fetches of a kept gradient at home on the host, and its way back where it is written.

        The steps here write none after the update that reads it.
        """
        touches, written = self.program.touches.get(name, []), self.program.last_write(name)
        splits = [i for i in range(1, len(touches)) if not 0 <= written <= touches[i - 1]]
        split = self.rng.choice(splits) if splits and self._is_offloaded() else len(touches)
        free_from = 0
        for number, stay in enumerate(s for s in (touches[:split], touches[split:]) if s):
            fetch = f"{'refetch' if number else 'fetch'}.{name}"
            self._place_fetch(fetch, name, 0, free_from, stay[0], ())
            free_from = stay[-1] + 1
        if written >= 0:
            issue = self._between(written + 1, self._use_of_home(name))
            store = replace(self._transfer(f"store.{name}", "offload", name, ()), destination=name)
            self._place(store, issue, self._between(issue, self.end))

    def _use_of_home(self, gradient: str) -> int:
        """The gap in which the home of a kept gradient is needed: by an update on the host."""
        return min(
            [
                self._window(group)[1]
                for group in self.program.host_groups
                if group.gradient == gradient
            ],
            default=self.end,
        )

    def _place_own_fetch(self, name: str) -> None:
        """The one fetch of a buffer at home on the host."""
        touches = self.program.touches.get(name)
        if touches:
            self._place_fetch(f"fetch.{name}", name, 0, 0, touches[0], ())

    def _place_fetch(
        self, name: str, buffer: str, ready: int, free_from: int, use: int, after: tuple[str, ...]
    ) -> None:
        wait = self._between(max(ready, free_from), use)
        issue = self._between(ready, wait)
        self._place(self._transfer(name, "prefetch", buffer, after), issue, wait)

    def _place_streamed_update(self, group: UpdateGroup) -> None:
        for state in group.states:
            if self._is_on_host(state):
                self._place_own_fetch(state)
        for name in filter(self._is_on_host, (group.param, *group.states)):
            written = self.program.last_write(name)
            if written >= 0:
                after = tuple(t for t in (f"cast.{group.param}",) if t in self.placed)
                ready = max([written + 1, *(self.placed[task].gap for task in after)])
                issue = self._between(ready, self.end)
                store = replace(
                    self._transfer(f"store.{name}", "offload", name, after), destination=name
                )
                self._place(store, issue, self._between(issue, self.end))

    def _place_host_update(self, group: UpdateGroup) -> None:
        returns = not self._is_on_host(group.param)
        host_side = (Role.HYPERPARAMETER, Role.CONSTANT)
        scalars = [n for n in group.scalars if self.dataflow.buffer[n].role not in host_side]
        found = self.dataflow.buffer[group.gradient].is_input and not returns
        gradient = [] if found and self._is_on_host(group.gradient) else [group.gradient]
        sent = [*gradient, *scalars, *([group.param] if returns else [])]
        old_use, limit = self._window(group)
        after = [self._place_offload(name, limit) for name in sent]
        after += [task for task in (f"store.{group.gradient}",) if task in self.placed]
        # A home is overwritten when what reads it is done.
        fetched = self.program.fetched.get(group.param, "")
        readers = [f"cast.{group.param}", f"fetch.{group.param}", f"refetch.{group.param}"]
        after += [task for task in readers if fetched and task in self.placed]
        gaps = [self.placed[task].gap + self.placed[task].order[1] for task in after]
        ready = max(gaps, default=0)
        issue = self._between(ready, limit)
        region = HostRegion(
            f"update.{group.param}", group.param, group.ops, None, None, tuple(after)
        )
        self._place(region, issue, self._between(issue, self.end))
        if returns:
            back = self._transfer(f"back.{group.param}", "prefetch", group.param, (region.name,))
            issue = self._between(max(issue, old_use + 1), limit)
            wait = self._between(issue, limit)
            self._place(replace(back, destination=group.param), issue, wait)

    def _window(self, group: UpdateGroup) -> tuple[int, int]:
        """The last slot that uses the old parameter, and the first that uses the new one."""
        position = self.dataflow.position
        write = max(position[name] for name in group.ops)
        touched = self.program.touches.get(group.param, [])
        late = [slot for slot in touched if position[self.program.ops[slot].name] > write]
        old = [slot for slot in touched if slot not in late]
        return max(old, default=-1), min(late, default=self.end)

    def _place_offload(self, name: str, limit: int) -> str:
        task = self._transfer(f"offload.{name}", "offload", name, ())
        if task.name not in self.placed:
            ready = self.program.last_write(name) + 1
            # What several updates share is sent at once: each of them has its own limit.
            issue = self._between(ready, limit) if self._is_used_once(name) else ready
            self._place(task, issue, self._between(issue, self.end))
        return task.name

    def _is_used_once(self, name: str) -> bool:
        return sum(name in (g.param, g.gradient, *g.scalars) for g in self.dataflow.updates) == 1

    def _place_activation(self, name: str) -> None:
        touches = self.program.touches.get(name, [])
        splits = [i for i in range(1, len(touches)) if touches[i] > touches[i - 1] + 1]
        # What is made again leaves by itself.
        if not splits or name in self.placement.recomputed or not self._is_offloaded():
            return
        split = self.rng.choice(splits)
        before, use = touches[split - 1], touches[split]
        ready = self.program.last_write(name) + 1
        if ready > before + 1:
            return
        self.offloaded.append(name)
        # Sent in an earlier gap than that of this wait, in which the fetched copy takes over.
        wait = self._between(max(before, ready) + 1, use)
        sent = self._between(ready, wait - 1)
        offload = self._transfer(f"offload.{name}", "offload", name, ())
        self._place(offload, sent, self._between(sent, self.end))
        fetch = self._transfer(f"fetch.{name}", "prefetch", name, (offload.name,))
        self._place(fetch, self._between(sent, wait), wait)
        later = [i for i in splits if i > split]
        if later and self._is_fetched_again():
            self._fetch_again(name, touches, self.rng.choice(later), wait)

    def _fetch_again(self, name: str, touches: Sequence[int], split: int, fetched: int) -> None:
        """One more copy of what is on the host, for the touches from `split` on."""
        self.refetched.append(name)
        again = self._transfer(f"refetch.{name}", "prefetch", name, (f"offload.{name}",))
        wait = self._between(touches[split - 1] + 1, touches[split])
        self._place(again, self._between(fetched, wait), wait)

    def _is_offloaded(self) -> bool:
        return self.rng.random() < 0.4

    def _is_fetched_again(self) -> bool:
        return self.rng.random() < 0.7

    def _transfer(self, name: str, direction: str, buffer: str, after: tuple[str, ...]) -> Transfer:
        nbytes = self.dataflow.buffer[buffer].nbytes
        return Transfer(name, direction, buffer, nbytes, None, None, after)  # type: ignore[arg-type]

    def _place(self, task: Task, issue: int, wait: int) -> None:
        ops = self.program.ops
        timed = replace(
            task,
            issue_after=ops[issue - 1].name if issue else None,
            wait_before=ops[wait].name if wait < self.end else None,
        )
        self.placed[task.name] = _Placed(issue, timed)

    def _between(self, first: int, last: int) -> int:
        """A gap from `first` to `last`; often one of the two, where mistakes are."""
        return self.rng.choice((first, last, self.rng.randint(first, last)))


class _LastMoment(_TaskPlacer):
    """Places every task as late as it may be."""

    def __init__(
        self, program: DeviceProgram, placement: Placement, rng: random.Random, offloaded: bool
    ) -> None:
        super().__init__(program, placement, rng)
        self._everything_offloaded = offloaded

    def _is_offloaded(self) -> bool:
        return self._everything_offloaded

    def _is_fetched_again(self) -> bool:
        return False

    def _between(self, first: int, last: int) -> int:
        return last
