"""By tokens: what is between the divided layers of a model of Hugging Face, divided too (sequence
parallelism: Korthikanti et al., MLSys 2023).

In: a model whose layers are members of one list, and how their products are split. Out: the same
plan with the tokens of a sequence divided over the ranks from the first layer to the last norm.
Masks and rotary embeddings are made of all tokens, as they are made before the first layer.

    first layer        takes whole sequences, and goes on with this rank's tokens
    attention, MLP     take the tokens of all ranks together, and give back this rank's
    norms              torch's `SequenceParallel`
    head               takes the tokens of all ranks together
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from cotrain_compile.errors import DistributeError

_TOKENS = Shard(1)
# What a layer's modules are given by keyword in Hugging Face's models.
_HIDDEN = "hidden_states"


def by_tokens(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """`plan`, by name of module, with all that is between its products by tokens.

    Raises `DistributeError` where the divided layers are not members of one list of modules.
    """
    layers = _layers_of(plan)
    found = dict(plan)
    first = f"{layers}.0"
    for name, module in model.get_submodule(first).named_children():
        pattern = f"{layers}.*.{name}"
        if any(inner.startswith(f"{pattern}.") for inner in plan):
            found[pattern] = _Tokens(_TOKENS, Replicate())
        elif next(module.parameters(), None) is not None:
            found[pattern] = SequenceParallel()
    for name, style in plan.items():
        if name.startswith(f"{layers}.*.") and isinstance(style, RowwiseParallel):
            found[name] = RowwiseParallel(output_layouts=_TOKENS)
    found[first] = _Tokens(Replicate(), _TOKENS, whole=False)
    for name, module in _behind(model, layers):
        if isinstance(plan.get(name), ColwiseParallel):
            found[name] = ColwiseParallel(input_layouts=_TOKENS, output_layouts=Replicate())
        elif isinstance(module, nn.Linear):
            found[name] = _Tokens(_TOKENS, Replicate(), whole=False)
        else:
            found[name] = SequenceParallel()
    return found


def _layers_of(plan: Mapping[str, ParallelStyle]) -> str:
    """The name of the list whose members are divided."""
    lists = {name.partition(".*.")[0] for name in plan if ".*." in name}
    if len(lists) != 1:
        raise DistributeError(
            "the plan divides what is between layers by tokens, and nobody knows where in this "
            "model; pass tensor_plan= with SequenceParallel() for its norms, and layouts of what "
            "goes in and out"
        )
    return lists.pop()


def _behind(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters, and no others in them, that come behind the list."""
    comes = False
    for name, module in model.named_modules():
        comes = comes or name == layers
        is_leaf = next(module.children(), None) is None
        has_params = next(module.parameters(), None) is not None
        if comes and is_leaf and has_params and not name.startswith(f"{layers}."):
            yield name, module


class _Tokens(ParallelStyle):
    """What a module is given first has one layout and gets another one.

    With `whole` it stays a DTensor, so that products with parts of weights sum its gradient.
    """

    def __init__(self, given: Placement, wanted: Placement, *, whole: bool = True) -> None:
        self._given, self._wanted, self._whole = given, wanted, whole

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        take = partial(self._take, device_mesh)
        module.register_forward_pre_hook(partial(_first, take), with_kwargs=True)
        return module

    def _take(self, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [self._given])
        wanted = given.redistribute(mesh, [self._wanted])
        return wanted if self._whole else wanted.to_local()


def _first(
    take: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    del module
    if args:
        return (take(args[0]), *args[1:]), kwargs
    return args, kwargs | {_HIDDEN: take(kwargs[_HIDDEN])}
