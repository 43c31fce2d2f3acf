"""Faults of writes: each in-place write of the user's tensors in a step fails, on its own.

A `WriteSite` is a node, a row of lock step, or a task that writes; `failing` lets it raise before
it writes, when half of each tensor is written, or when all is. `check_told` compares, to the bit,
what is left with what the error says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cotrain_compile.backends.lifecycle import compiled_step, deferred
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import StepFailed
from tests.support.faults import NOTHING_CHANGED, Trial, setting_of, undisturbed

BEFORE, MIDDLE, AFTER = WHEN = ("before", "in the middle of", "after")
ILL = "the memory is ill"


@dataclass(frozen=True)
class WriteSite:
    """What writes the tensors called `names`: of the calls that at `call`, of its rows `row`.

    Where it is a task, its name is in `task`.
    """

    names: tuple[str, ...]
    call: int
    row: int | None = None
    task: str | None = None


def write_sites(compiled: CompiledStep) -> list[WriteSite]:
    found = []
    for number, call in enumerate(compiled._program._calls):
        for place, row in enumerate(call.rows):
            if row.writes:
                found.append(WriteSite(tuple(w.name for w in row.writes), number, place))
        for task in dict.fromkeys(write.task for write in call.writes):
            names = tuple(write.name for write in call.writes if write.task == task)
            found.append(WriteSite(names, number, task=task))
    return found


def failing(
    trial: Trial, compiled: CompiledStep, site: WriteSite, when: str
) -> AbstractContextManager[object]:
    """Within it the write at `site` fails."""
    place = {item.name: position for position, item in enumerate(trial.step.step.inputs)}
    work_fails = _Failing([trial.inputs[place[name]] for name in site.names], when)
    program: Any = compiled._program
    device: Any = compiled._device
    if site.task is None:
        calls = list(program._calls)
        call = calls[site.call]
        if site.row is None:
            calls[site.call] = replace(call, compute=work_fails.of(call.compute))
        else:
            rows = list(call.rows)
            row = rows[site.row]
            rows[site.row] = replace(row, compute=work_fails.of(row.compute))
            calls[site.call] = replace(call, rows=rows)
        return mock.patch.object(program, "_calls", calls)
    own = {task.name: task.bundle for task in compiled.plan.tasks}.get(site.task, "")
    for name in device._kernels:
        if name == site.task or (own and name.startswith(f"{own} and ")):  # all of its bundle
            kernel = work_fails.of(device._kernels[name])
            return mock.patch.object(device, "_kernels", {**device._kernels, name: kernel})
    return _failing_copy(device, site.task, work_fails)


@contextmanager
def _failing_copy(device: Any, task: str, work_fails: _Failing) -> Iterator[None]:
    start, copy = device._start_copy, device._copy_along

    def start_copy(lane: Any, destination: Tensor, source: Tensor, launch: Any) -> None:
        along = work_fails.of(copy) if launch.task == task else copy
        with mock.patch.object(device, "_copy_along", along):
            start(lane, destination, source, launch)

    start_all, copy_all = device._start_copies, device._copy_all

    def start_copies(lane: Any, destinations: Any, sources: Any, bundle: Any) -> None:
        is_in = task in [launch.task for launch in bundle.members]
        with mock.patch.object(device, "_copy_all", work_fails.of(copy_all) if is_in else copy_all):
            start_all(lane, destinations, sources, bundle)

    with (
        mock.patch.object(device, "_start_copy", start_copy),
        mock.patch.object(device, "_start_copies", start_copies),
    ):
        yield


@dataclass(frozen=True)
class _Failing:
    """Work that writes `tensors`, and fails."""

    tensors: list[Tensor]
    when: str

    def of(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*arguments: Any) -> Any:
            before = [tensor.clone() for tensor in self.tensors]
            if self.when != BEFORE:
                work(*arguments)
            if self.when == MIDDLE:
                for tensor, old in zip(self.tensors, before, strict=True):
                    half = (tensor.numel() + 1) // 2  # of one element nothing is written
                    tensor.reshape(-1)[:half].copy_(old.reshape(-1)[:half])
            raise RuntimeError(ILL)

        return fail


def fail_write(trial: Trial, compiled: CompiledStep, site: WriteSite, when: str) -> Exception:
    """What a step raises whose write at `site` fails."""
    with (
        failing(trial, compiled, site, when),
        mock.patch.object(deferred, "few", ", ".join),  # all are named
        mock.patch.object(compiled_step, "few", ", ".join),
        pytest.raises(Exception, match=ILL) as failure,
    ):
        trial.take_step()
    return failure.value


def check_told(trial: Trial, compiled: CompiledStep, name: str, error: Exception) -> None:
    """What the error says of each tensor is so, and later steps are refused or right."""
    first, second = undisturbed(setting_of(name).training)
    assert all(task.done.is_set() for task in compiled._device._tasks.values())
    assert not compiled._program.env
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    ahead = _listed(r"one step ahead of the rest \((.*?)\)", said)
    half = _listed(r"may be half written \((.*?)\)", said)
    updated = _listed(r"its forward has updated ([^;\n]*?)(?:;|\.?$|\.?\n)", said)
    assert not ahead & half
    left = _states(trial, first, second)
    assert {n for n, state in left.items() if state == "partial"} <= half | updated
    assert {n for n, state in left.items() if state == "second"} <= ahead | half | updated
    assert all(left.get(n) in ("second", "same") for n in ahead)
    assert (NOTHING_CHANGED in said) is not bool(ahead or half)
    if ahead or half:
        assert said.count("load the last checkpoint") == 1
        with pytest.raises(StepFailed, match=r"an earlier step failed .* load the last checkpoint"):
            trial.take_step()
        assert _states(trial, first, second) == left
    trial.load(first)
    trial.take_step()
    assert set(_states(trial, first, second).values()) <= {"second", "same"}


def _listed(pattern: str, said: str) -> set[str]:
    return {name for names in re.findall(pattern, said) for name in names.split(", ")}


def _states(trial: Trial, first: list[Any], second: list[Any]) -> Mapping[str, str]:
    """Of each tensor but the batch: as after the first or second step, both alike, or "partial"."""
    states = {}
    items = trial.step.step.inputs
    for item, value, one, two in zip(items, trial.inputs, first, second, strict=True):
        if item.role is Role.BATCH or not isinstance(value, Tensor):
            continue
        was, will = torch.equal(value, one), torch.equal(value, two)
        whole = {(True, True): "same", (True, False): "first", (False, True): "second"}
        states[item.name] = whole.get((was, will), "partial")
    return states
