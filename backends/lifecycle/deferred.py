"""Tails: what overlapping steps have left to do when they return, and all who wait for it.

A `DeferredWork` belongs to one compiled step. While it is in flight it is known here, so that
`wait_for_deferred` finds it: called by `synchronize`, by every other compiled step, by hooks of the
models and optimizers, before a fork, and when the step is collected or the process ends.

PartialUpdate: tensors that a failed step has left apart from the rest, and how that is said.

In: the writes of a step and the tasks that were to carry them out. Out: `Damage` in words, and
`PartialUpdate`, which knows whether the tensors have been loaded since.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from cotrain_compile.backends.eager.calls import Write
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import StepFailed
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.lanes import Task, is_lane_thread
from cotrain_compile.runtime.task_nodes import region_calls

# What has state that a step updates.
Owner = nn.Module | Optimizer

_in_flight: dict[int, DeferredWork] = {}


class DeferredWork:
    """What one compiled step still has to do on `device`; `partial` is what a failure has ended."""

    def __init__(self, device: Device) -> None:
        self.partial = PartialUpdate({})
        self._device = device
        self._written: Sequence[Write] = ()
        self._tensors: Mapping[str, weakref.ref[Any]] = {}

    def step_returns(self, written: Sequence[Write], tensors: Mapping[str, Any]) -> None:
        """A step has returned that wrote `written`, all of which are in `tensors` by name."""
        self._let_go()
        if self._device.is_busy or self._failed():
            self._written = [write for write in written if write.is_update]
            # `torch.utils.swap_tensors` refuses a tensor that has a weak reference: now rightly so,
            # as updates go on in it, and no longer when all is done.
            self._tensors = {w.name: weakref.ref(tensors[w.name]) for w in self._written}
            _in_flight[id(self)] = self

    def wait(self) -> None:
        """Wait until all is done. Raises `StepFailed`, once, where something failed."""
        self._device.drain()
        _in_flight.pop(id(self), None)
        failed = self._failed()
        if not failed:
            self._let_go()
        else:
            self._device.take_back()
            damage = damage_by(self._written, self._device.tasks())
            found = {name: self._tensors[name]() for name in damage.names}
            self._note_partial({name: t for name, t in found.items() if t is not None})
            said = damage.text("The step before")
            raise StepFailed(f"{failed[0].name} failed: {failed[0].error}. {said}")

    def _failed(self) -> list[Any]:
        return [task for task in self._device.tasks().values() if task.error is not None]

    def wait_quietly(self) -> None:
        """Wait until all is done; whether something failed is for `wait` to say."""
        self._device.drain()

    def note_failure(self, written: Sequence[Write], tensors: Mapping[str, Any], ended: int) -> str:
        """Note what a step that failed, or the one before it, has left; in words, "" for nothing.

        All its tasks have ended; `written` and `tensors` are as for `step_returns`. The nodes of
        the first `ended` writes came to their end.
        """
        _in_flight.pop(id(self), None)
        before = self._device.tasks(previous=True)
        is_late = any(task.error is not None for task in before.values())
        late = damage_by(self._written, before) if is_late else Damage()
        own = damage_by(written, self._device.tasks(), ended)
        self._note_partial({name: tensors[name] for name in (*late.names, *own.names)})
        said = (late.text("The step before"), own.text("The step"))
        return ". ".join(text for text in said if text)

    def _note_partial(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.partial = PartialUpdate(tensors)
        self._let_go()
        self._device.forget()

    def _let_go(self) -> None:
        self._written, self._tensors = (), {}


def wait_for_deferred(but: DeferredWork | None = None) -> None:
    """Wait until no compiled step has anything left to do, not counting that of `but`.

    Raises `StepFailed` for the first that failed, when all have ended.
    """
    failures = []
    for work in [work for work in list(_in_flight.values()) if work is not but]:
        try:
            work.wait()
        except StepFailed as error:
            failures.append(error)
    if failures:
        raise failures[0]


class Removable(Protocol):
    """A hook that can be taken out again."""

    def remove(self) -> None: ...


def _wait_before_a_fork() -> None:
    """The child has no threads to end what is in flight; what failed, the parent is told."""
    if not is_lane_thread():
        for work in list(_in_flight.values()):
            work.wait_quietly()


os.register_at_fork(before=_wait_before_a_fork)


def guard_state(step: object, work: DeferredWork, owners: Sequence[Owner]) -> None:
    """Let everything that reads or loads the state of `owners` wait for it.

    That is `state_dict`, `load_state_dict` and, for modules, any forward outside a compiled step.
    When `step` is collected, or the process ends, what it deferred is waited for and its hooks go.
    """
    for item in owners:
        users, handles = _hooks.get(item, (0, []))
        _hooks[item] = users + 1, handles or _hooks_on(item)
    weakref.finalize(step, _let_go, work, [weakref.ref(item) for item in owners])


# One set of hooks for each module and optimizer, however many steps use it: their number must not
# change, or Dynamo would trace these steps again. Hooks on a module are seen by a trace.
_hooks: weakref.WeakKeyDictionary[Owner, tuple[int, list[Removable]]]
_hooks = weakref.WeakKeyDictionary()


def _hooks_on(item: Owner) -> list[Removable]:
    if isinstance(item, Optimizer) and not hasattr(item, "_optimizer_state_dict_pre_hooks"):
        return []  # a wrapper that never calls `super().__init__()`; what it wraps has hooks
    handles: list[Removable] = [
        item.register_state_dict_pre_hook(_wait_first),
        item.register_load_state_dict_pre_hook(_wait_first),
    ]
    if isinstance(item, nn.Module):
        handles.append(item.register_forward_pre_hook(_wait_unless_traced))
    return handles


# They are plain functions, so that a model that has them can be copied and pickled.


def _wait_first(*_: Any) -> None:
    wait_for_deferred()


def _wait_unless_traced(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        wait_for_deferred()


def _let_go(work: DeferredWork, items: Iterable[weakref.ref[Owner]]) -> None:
    if is_lane_thread():
        return  # it would wait for itself; the hooks stay, and wait when they are called
    try:
        work.wait()
    finally:
        for item in [item for ref in items if (item := ref()) is not None]:
            users, handles = _hooks.pop(item)
            if users > 1:
                _hooks[item] = users - 1, handles
            else:
                for handle in handles:
                    handle.remove()


GO_ON = "load the last checkpoint before going on"


@dataclass(frozen=True)
class Damage:
    """Names of the tensors that are one step ahead of the rest, or may be half written.

    `statistics` are those that the forward has updated; alone they are no damage, as in eager.
    """

    ahead: tuple[str, ...] = ()
    half: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ahead, *self.half)

    def text(self, what: str) -> str:
        """What `what` has left, in words; "" where that is nothing."""
        said = []
        if self.ahead:
            said.append(
                f"{len(self.ahead)} tensors are one step ahead of the rest ({few(self.ahead)})"
            )
        if self.half:
            said.append(f"{len(self.half)} tensors may be half written ({few(self.half)})")
        if not said:
            return ""
        if self.statistics:
            said.append(f"its forward has updated {few(self.statistics)}")
        return f"{what} failed while it updated: {' and '.join(said)}; {GO_ON}"


def damage_by(
    written: Sequence[Write], tasks: Mapping[str, Task], ended: int | None = None
) -> Damage:
    """What a step that failed has left of the updates in `written`; `tasks` have all ended.

    The nodes of the first `ended` writes came to their end, all where nothing is said.
    """
    # A tensor is written more than once where it was half written before it, or is after it.
    ahead, half, statistics = dict[str, None](), dict[str, None](), dict[str, None]()
    parts: dict[str, int] = {}  # that were written whole
    for number, write in enumerate(written):
        task = tasks.get(write.task) if write.task is not None else None
        if write.task is None:
            is_whole = ended is None or number < ended
        elif task is None or not (task.ran or task.broke_off):
            continue
        else:
            is_whole = task.ran
        if not write.is_update:
            statistics[write.name] = None
        elif not is_whole:
            half[write.name] = None
        else:
            ahead[write.name] = None
            parts[write.name] = parts.get(write.name, 0) + 1
    half |= {w.name: None for w in written if 0 < parts.get(w.name, 0) < w.parts}
    return Damage(tuple(name for name in ahead if name not in half), tuple(half), tuple(statistics))


class PartialUpdate:
    """Tensors by name that a failed step has left apart from the rest, until they are loaded.

    A write to a tensor raises its version. So does AOTAutograd, by one, each time before it calls
    the step; what has risen further since the failure was written.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._calls = 0
        self.left = {
            name: (weakref.ref(tensor.untyped_storage()), tensor._version)
            for name, tensor in tensors.items()
        }

    def names(self, tensors: Mapping[str, Any]) -> list[str]:
        """Those that are in `tensors` as they were left; to be asked once in every call."""
        self._calls += 1
        return [
            name
            for name, (storage, version) in self.left.items()
            if tensors[name].untyped_storage() is storage()
            and tensors[name]._version <= version + self._calls
        ]


def few(names: Sequence[str]) -> str:
    """The first of `names`, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def read_by_deferred(graph: StepGraph, plan: Plan) -> list[int]:
    """Positions of the inputs that a deferred update reads and the user may change meanwhile.

    Such as a learning rate that is a tensor: the update takes a copy, of the value in its step.
    """
    deferred = {task.name for task in plan.deferred}
    read: set[str] = set()
    for node, call in region_calls(graph.module.graph):
        if call.launch.task in deferred:
            read.update(source.name for source in node.all_input_nodes)
    written = {destination.name for _, destination, _ in writes(graph.module.graph)}
    return [
        position
        for position, item in enumerate(graph.inputs)
        if item.node in read - written and item.role in (Role.HYPERPARAMETER, Role.CONSTANT)
    ]
