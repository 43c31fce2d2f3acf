"""Lower: what runs a step, lowered without the layers that repeat others where that can be.

In: Dynamo's graph and a function that lowers a graph. Out: what that function gives, of the graph
of all layers. A step whose lowered graph does not repeat itself is lowered once more as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, fx
from torch._subclasses.fake_tensor import FakeTensor

from cotrain_compile.capture.layers.extend import extend
from cotrain_compile.capture.layers.few_inputs import FewInputs, put_inputs_back, with_few_inputs
from cotrain_compile.capture.layers.few_updates import (
    FewUpdates,
    put_updates_back,
    with_few_updates,
)
from cotrain_compile.capture.layers.shorten import Shortened, shortened
from cotrain_compile.capture.offline.only_trace import is_only_traced
from cotrain_compile.graph import StepInput
from cotrain_compile.support.raised_by_handler import raised_by_handler

LOG = logging.getLogger(__name__)
TRIED = ("2.13.",)
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)

Part = Shortened | FewUpdates
Prepare = Callable[[fx.GraphModule], None]
Lower = Callable[[fx.GraphModule, Sequence[Any], Prepare, tuple[object, ...]], Callable[..., Any]]


def lower_few_layers(
    module: fx.GraphModule, values: Sequence[Any], inputs: Sequence[StepInput], lower: Lower
) -> Callable[..., Any]:
    """What `lower` gives for Dynamo's `module`, whose placeholders are `inputs` with `values`.

    `lower` gets the graph to lower, the values of its inputs, what it has to do with the ATen graph
    first, and what else the result depends on. Errors of what comes behind that are its own.
    """
    parts = _parts(module, values, inputs)
    while parts:
        reached = len(parts)
        short, given = parts[-1].module, values
        few = with_few_inputs(short, values, _owned(parts)) if is_only_traced() else None
        if few is not None:
            short, given = few.module, few.values

        def extended(
            graph: fx.GraphModule, some: Sequence[Part] = parts, few: FewInputs | None = few
        ) -> None:
            nonlocal reached
            if few is not None:
                put_inputs_back(graph, few)
            for part in reversed(some):
                if isinstance(part, FewUpdates):
                    put_updates_back(graph, part)
                else:
                    extend(graph, part)
                reached -= 1

        try:
            return lower(short, given, extended, tuple(part.text for part in parts))
        except Exception as error:  # what is wrong with the step itself is raised again below
            if not reached or raised_by_handler(error) is not None:
                raise
            LOG.debug("more is lowered: %s", error)
            updates_alone = reached == len(parts) and isinstance(parts[-1], FewUpdates)
            parts = parts[:-1] if updates_alone else []
    return lower(module, values, lambda graph: None, ())


def _parts(
    module: fx.GraphModule, values: Sequence[Any], inputs: Sequence[StepInput]
) -> list[Part]:
    """`module` shortened by one stack of layers after the other, and then by updates."""
    parts: list[Part] = []
    known = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    if not _may_be_shortened(values) or not _may_be_shortened(known):
        return parts
    while (part := shortened(module, inputs)) is not None:
        if not _have_own_memory(part, values):
            break
        parts.append(part)
        module = part.module
    few = with_few_updates(module, inputs)
    if few is not None and _have_own_memory(few, values):
        parts.append(few)
    return parts


def _owned(parts: Sequence[Part]) -> list[bool]:
    """By input, whether it is of a layer or update of some part, and shares no memory."""
    by_input = zip(*(part.inputs for part in parts), strict=True)
    return [any(owner is not None for owner in owners) for owners in by_input]


def _may_be_shortened(values: Sequence[Any]) -> bool:
    """Whether a step has only plain tensors of known sizes, and trains alone."""
    return (
        torch.__version__.startswith(TRIED)
        and not (distributed.is_available() and distributed.is_initialized())
        and all(type(value) in _PLAIN and value.layout is torch.strided for value in values)
        and all(type(size) is int for value in values for size in value.shape)
    )


def _have_own_memory(part: Part, values: Sequence[Any]) -> bool:
    """Whether no input of what is left out shares its memory: AOTAutograd puts those together."""
    storages = [value.untyped_storage()._cdata for value in values]
    users = Counter(storages)
    owners = zip(storages, part.inputs, strict=True)
    return all(users[storage] == 1 for storage, owner in owners if owner is not None)
