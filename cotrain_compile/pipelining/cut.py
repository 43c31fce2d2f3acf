"""Cut: the part of a model that one stage of a pipeline runs.

In: a model and its `Visits`. Out: a `StagePart` for a stage. It runs the model's own forward, from
the module where the stage begins to the one where the next begins. Modules of other stages are not
in it. Where the forward calls one of them before the stage begins, it gets NaN; so a model that
hands on anything beside the first argument of a split point is found out, by a trial with one
batch.

Visits: in which stage of a pipeline each module of a model runs, and what it gives.

In: a model, the modules at which stages begin, one micro-batch. Out: `Visits`. The model runs once
on fake tensors, so nothing is computed and no device is needed; what it counts and averages is as
before (`kept_buffers`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from cotrain_compile.errors import DistributeError


class Reached(Exception):
    """The forward has come to where the next stage begins."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class StagePart:
    """What a stage runs: `module` has the parameters that are its own, by the model's names."""

    def __init__(
        self,
        module: nn.Module,
        begins_at: str,
        enters: TensorShape | None,
        leaves: TensorShape | None,
    ) -> None:
        """`begins_at` is "" for the first stage; `leaves` is None for the last one."""
        self.module = module
        self.begins_at = begins_at
        self.enters = enters
        self.leaves = leaves
        self._received: torch.Tensor | None = None
        if begins_at:
            entry = module.get_submodule(begins_at)
            entry.register_forward_pre_hook(self._give_received)

    def __call__(self, received: torch.Tensor | None, batch: Sequence[torch.Tensor]) -> Any:
        """What the next stage begins with, or what the model returns."""
        self._received = received
        try:
            return self.module(*batch)
        except Reached as reached:
            return reached.value
        finally:
            self._received = None

    def divide_tokens(self, parts: int) -> None:
        """From here on what enters and leaves has an equal part of the tokens of each sample."""
        self.enters = self.enters and self.enters.by_tokens(parts)
        self.leaves = self.leaves and self.leaves.by_tokens(parts)

    def _give_received(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._received, *args[1:])


class _Before(nn.Module):
    """Stands for a module of an earlier stage: what it gives is nobody's to read."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self._given = given

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda item: item.full(float("nan")), self._given)


class _Behind(nn.Module):
    """Stands for a module of a later stage, the first of which is where that begins."""

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Reached(value)


def cut(model: nn.Module, split_points: Sequence[str], found: Visits, stage: int) -> StagePart:
    """The part of `model` for `stage`; parameters are shared with it.

    Raises `DistributeError` where parameters are used in several stages.
    """
    module = _same_tensors(model)
    last = len(split_points)
    owners = _owners(model, found)
    for name, owner in owners.items():
        if owner != stage:
            stand_in = _Before(found.given.get(name)) if owner < stage else _Behind()
            _replace(module, name, stand_in)
    if stage:
        _poison_parameters_of_containers(module, owners)
    return StagePart(
        module,
        split_points[stage - 1] if stage else "",
        found.crossing[stage - 1] if stage else None,
        found.crossing[stage] if stage < last else None,
    )


def keep(model: nn.Module, split_points: Sequence[str], found: Visits, stages: set[int]) -> None:
    """Leave `model` those parameters that `stages` have, so that the others can be freed."""
    owners = _owners(model, found)
    for name, owner in owners.items():
        if owner not in stages:
            _replace(model, name, nn.Identity())
    if 0 not in stages:
        _poison_parameters_of_containers(model, owners)


def try_out(part: StagePart, batch: Sequence[torch.Tensor]) -> None:
    """Run `part` once in eager on `batch` and made-up activations, and leave no trace.

    Raises `DistributeError` where it reads more of earlier stages than what enters it.
    """
    received = None
    with kept_buffers(part.module), torch.no_grad(), torch.random.fork_rng():
        if part.enters is not None:
            received = part.enters.full(0.0).normal_()
        result = part(received, batch)
    if part.leaves is not None and result.shape != part.leaves.size:
        raise DistributeError(
            f"what leaves a stage has {list(result.shape)} on a rank, and {list(part.leaves.size)} "
            "goes from stage to stage; let what is between layers be divided by tokens on both "
            "sides of each split point, or on none (sequence=False)"
        )
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.isnan().any():
            raise DistributeError(
                "a stage reads what earlier ones have made beside the first argument of its split "
                "point (a skip connection, or a parameter of the model itself); split the model "
                "where one tensor goes on"
            )


def _owners(model: nn.Module, found: Visits) -> dict[str, int]:
    """The stage of each unit that has parameters, or buffers that belong in a checkpoint."""
    used: dict[int, tuple[int, str]] = {}
    owners: dict[str, int] = {}
    for name, stages in found.stage.items():
        unit = model.get_submodule(name)
        if not unit.state_dict(keep_vars=True):
            continue
        if len(stages) > 1:
            raise DistributeError(
                f"{name} runs in stages {sorted(stages)}; its gradients would have to be added up "
                "between them. Split the model elsewhere"
            )
        (owners[name],) = stages
        for param in unit.parameters():
            stage, other = used.setdefault(id(param), (owners[name], name))
            if stage != owners[name]:
                raise DistributeError(
                    f"{other} in stage {stage} and {name} in stage {owners[name]} share a "
                    "parameter; untie them (tie_word_embeddings=False in a configuration of "
                    "Hugging Face), or split the model so that one stage has both"
                )
    return owners


def _poison_parameters_of_containers(module: nn.Module, owners: dict[str, int]) -> None:
    """Parameters beside the units are the first stage's: elsewhere they are constants of NaN."""
    for name, container in module.named_modules():
        if any(unit.startswith(name and f"{name}.") for unit in owners):
            for own, param in list(container._parameters.items()):
                if param is not None:
                    del container._parameters[own]
                    setattr(container, own, torch.full_like(param.detach(), float("nan")))


def _same_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules of `model`, with the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


@dataclass(frozen=True)
class TensorShape:
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

    def by_tokens(self, parts: int) -> TensorShape:
        """Of one of so many ranks, each of which has equal parts of the tokens.

        Raises `DistributeError` where they cannot be divided so.
        """
        if len(self.size) < 2 or self.size[1] % parts:
            raise DistributeError(
                f"the plan divides what goes from stage to stage by tokens, its second dimension, "
                f"over {parts} ranks, and it has {list(self.size)}; take sequence=False, or a "
                "length that they divide"
            )
        first, tokens, *others = self.size
        return TensorShape((first, tokens // parts, *others), self.dtype, self.device)

    def full(self, value: float, *, device: torch.device | str | None = None) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.full(self.size, value, dtype=self.dtype, device=device or self.device)


@dataclass(frozen=True)
class Visits:
    """`stage` has by module all stages in which it runs; `given` what it gave the first time.

    Modules are units: the outermost with no split point below them. `crossing` has what enters each
    stage after the first. In `given` a floating tensor is a `TensorShape`, all else what the run
    gave.
    """

    stage: Mapping[str, frozenset[int]]
    given: Mapping[str, Any]
    crossing: tuple[TensorShape, ...]


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
        self.crossing: list[TensorShape] = []
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
        return TensorShape(tuple(value.shape), value.dtype, value.device)
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
