"""Cut: the part of a model that one stage of a pipeline runs.

In: a model and its `Visits`. Out: a `Part` for a stage. It runs the model's own forward, from the
module where the stage begins to the one where the next begins. Modules of other stages are not in
it. Where the forward calls one of them before the stage begins, it gets NaN; so a model that hands
on anything beside the first argument of a split point is found out, by a trial with one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from cotrain_compile.errors import DistributeError
from cotrain_compile.pipelining.visits import Shape, Visits, kept_buffers


class Reached(Exception):
    """The forward has come to where the next stage begins."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Part:
    """What a stage runs: `module` has the parameters that are its own, by the model's names."""

    def __init__(
        self, module: nn.Module, begins_at: str, enters: Shape | None, leaves: Shape | None
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


def cut(model: nn.Module, split_points: Sequence[str], found: Visits, stage: int) -> Part:
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
    return Part(
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


def try_out(part: Part, batch: Sequence[torch.Tensor]) -> None:
    """Run `part` once in eager on `batch` and made-up activations, and leave no trace.

    Raises `DistributeError` where it reads more of earlier stages than what enters it.
    """
    received = None
    with kept_buffers(part.module), torch.no_grad(), torch.random.fork_rng():
        if part.enters is not None:
            received = part.enters.full(0.0).normal_()
        result = part(received, batch)
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
