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
from cotrain_compile.capture.layers.shorten import Shortened, shortened
from cotrain_compile.graph import StepInput
from cotrain_compile.support.raised_by_handler import raised_by_handler

LOG = logging.getLogger(__name__)
TRIED = ("2.13.",)
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)

Prepare = Callable[[fx.GraphModule], None]
Lower = Callable[[fx.GraphModule, Prepare, tuple[object, ...]], Callable[..., Any]]


def lower_few_layers(
    module: fx.GraphModule, values: Sequence[Any], inputs: Sequence[StepInput], lower: Lower
) -> Callable[..., Any]:
    """What `lower` gives for Dynamo's `module`, whose placeholders are `inputs` with `values`.

    `lower` gets the graph to lower, what it has to do with the ATen graph first, and what else the
    result depends on. Errors of what comes behind that are its own.
    """
    parts = _parts(module, values, inputs)
    if not parts:
        return lower(module, lambda graph: None, ())
    whole = False

    def extended(graph: fx.GraphModule) -> None:
        nonlocal whole
        for part in reversed(parts):
            extend(graph, part)
        whole = True

    try:
        return lower(parts[-1].module, extended, tuple(part.text for part in parts))
    except Exception as error:  # what is wrong with the step itself is raised again below
        if whole or raised_by_handler(error) is not None:
            raise
        LOG.debug("all layers are lowered: %s", error)
    return lower(module, lambda graph: None, ())


def _parts(
    module: fx.GraphModule, values: Sequence[Any], inputs: Sequence[StepInput]
) -> list[Shortened]:
    """`module` shortened by one stack of layers after the other."""
    parts: list[Shortened] = []
    known = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    if not _may_be_shortened(values) or not _may_be_shortened(known):
        return parts
    while (part := shortened(module, inputs)) is not None:
        if not _have_own_memory(part, values):
            break
        parts.append(part)
        module = part.module
    return parts


def _may_be_shortened(values: Sequence[Any]) -> bool:
    """Whether a step has only plain tensors of known sizes, and trains alone."""
    return (
        torch.__version__.startswith(TRIED)
        and not (distributed.is_available() and distributed.is_initialized())
        and all(type(value) in _PLAIN and value.layout is torch.strided for value in values)
        and all(type(size) is int for value in values for size in value.shape)
    )


def _have_own_memory(part: Shortened, values: Sequence[Any]) -> bool:
    """Whether no input of a layer shares its memory: AOTAutograd puts those together."""
    storages = [value.untyped_storage()._cdata for value in values]
    users = Counter(storages)
    of_layers = zip(storages, part.inputs, strict=True)
    return all(users[storage] == 1 for storage, layer in of_layers if layer is not None)
