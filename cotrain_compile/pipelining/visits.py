"""Visits: in which stage of a pipeline each module of a model runs, and what it gives.

In: a model, the modules at which stages begin, one micro-batch. Out: `Visits`. The model runs once
on fake tensors, so nothing is computed and no device is needed; what it counts and averages is as
before (`kept_buffers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cotrain_compile.errors import DistributeError


@dataclass(frozen=True)
class Shape:
    """A tensor that a module takes or gives."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.size:
            count *= extent
        return count * self.dtype.itemsize

    def full(self, value: float, *, device: torch.device | str | None = None) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.full(self.size, value, dtype=self.dtype, device=device or self.device)


@dataclass(frozen=True)
class Visits:
    """`stage` has by module all stages in which it runs; `given` what it gave the first time.

    Modules are units: the outermost with no split point below them. `crossing` has what enters each
    stage after the first. In `given` a floating tensor is a `Shape`, all else what the run gave.
    """

    stage: Mapping[str, frozenset[int]]
    given: Mapping[str, Any]
    crossing: tuple[Shape, ...]


def visits(model: nn.Module, split_points: Sequence[str], batch: Sequence[torch.Tensor]) -> Visits:
    """Run `model` on fake copies of `batch`.

    Raises `DistributeError` where a split point is no module of the model, is within another, does
    not run in the order of the plan, or is not given what enters it as its first argument.
    """
    known = dict(model.named_modules())
    _refuse_unknown(known, split_points)
    recorder = _Recorder(split_points)
    watched = {
        name: module
        for name, module in known.items()
        if not any(point.startswith(name and f"{name}.") for point in split_points)
    }
    handles = [handle for item in watched.items() for handle in recorder.watch(*item)]
    try:
        # A fake counter of one number is a real one: its additions happen.
        with (
            kept_buffers(model),
            torch.no_grad(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            model(*(mode.from_tensor(tensor) for tensor in batch))
    finally:
        for handle in handles:
            handle.remove()
    missed = [point for point in split_points if point not in recorder.entered]
    if missed:
        raise DistributeError(
            f"the plan begins a stage at {missed[0]}, which does not run in a forward of this model"
        )
    if recorder.entered != list(split_points):
        raise DistributeError(
            f"the model runs {', '.join(recorder.entered)} in this order, and the plan has stages "
            f"begin at {', '.join(split_points)}; give split points as they run, each once"
        )
    stages = {name: frozenset(found) for name, found in recorder.stage.items()}
    # What never runs stays with the first stage, so that some rank has it in its checkpoints.
    idle = [name for name in watched if name.rpartition(".")[0] not in watched]
    stages = {**dict.fromkeys(idle, frozenset({0})), **stages}
    return Visits(stages, recorder.given, tuple(recorder.crossing))


def _refuse_unknown(known: Mapping[str, nn.Module], split_points: Sequence[str]) -> None:
    for point in split_points:
        if not point or point not in known:
            near = [name for name in known if name.rpartition(".")[2] == point.rpartition(".")[2]]
            hint = f" (is it {near[0]}?)" if near else ""
            raise DistributeError(
                f"the plan begins a stage at {point!r}, and the model has no module of that name"
                f"{hint}; take a plan that was made for this model"
            )
        outer = [other for other in split_points if point.startswith(f"{other}.")]
        if outer:
            raise DistributeError(f"stages begin at {outer[0]} and at {point}, which is within it")


class _Recorder:
    """What hooks see of one forward."""

    def __init__(self, split_points: Sequence[str]) -> None:
        self._points = frozenset(split_points)
        self.entered: list[str] = []
        self.crossing: list[Shape] = []
        self.stage: dict[str, set[int]] = {}
        self.given: dict[str, Any] = {}
        self._inside = 0

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if name in self._points:
                self._cross(name, args)
            if not self._inside:
                self.stage.setdefault(name, set()).add(len(self.entered))
            self._inside += 1

        def leave(module: nn.Module, args: tuple[Any, ...], given: Any) -> None:
            self._inside -= 1
            if not self._inside:
                self.given.setdefault(name, torch.utils._pytree.tree_map(_shape, given))

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _cross(self, name: str, args: tuple[Any, ...]) -> None:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            raise DistributeError(
                f"a stage begins at {name}, whose first argument is no floating-point tensor; what "
                "goes from stage to stage has to be the first positional argument there"
            )
        self.entered.append(name)
        self.crossing.append(_shape(first))


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return Shape(tuple(value.shape), value.dtype, value.device)
    return value


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Give the buffers of `module` the values again that they have at the beginning."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
