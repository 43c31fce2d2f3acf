"""Random ops: which nodes draw random numbers, and from which generator.

In: a node of a step graph. Out: the devices whose generators it draws from. What an op draws hangs
on how much was drawn before it, so each reads and writes the state of its generator; `extract`
says so in the Dataflow, and from there on the order of these ops is kept like that of any writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from cotrain_compile.graph.op_calls import arguments_of, target_of

# Attention has torch's tag of random ops whatever its dropout is (2.11 to 2.15).
_DROPOUT = "dropout_p"
_TAG = torch.Tag.nondeterministic_seeded


def is_random(node: fx.Node) -> bool:
    """Whether running `node` again gives another result."""
    return next(_generators(node), None) is not None


def has_random_tag(node: fx.Node) -> bool:
    """Whether torch says that `node` may be random, as of attention even without dropout."""
    return _TAG in getattr(node.target, "tags", ())


def generators_of(node: fx.Node) -> tuple[str, ...]:
    """The devices whose generators `node` draws from, each once; none where it draws nothing.

    An op with a subgraph, as a branch or a region, draws what the ops in there draw.
    """
    return tuple(dict.fromkeys(_generators(node)))


def generators_in(graph: fx.Graph) -> tuple[str, ...]:
    """The devices whose generators the nodes of `graph` draw from, each once."""
    return tuple(dict.fromkeys(device for node in graph.nodes for device in _generators(node)))


def _generators(node: fx.Node) -> Iterator[str]:
    if node.op != "call_function" or _never_draws(node.target):
        return
    if has_random_tag(node):
        if _argument(node, _DROPOUT) != 0:
            yield _device(node)
        return
    if _drops_untagged(node):
        yield _device(node)
        return
    for source in node.all_input_nodes:
        called = _called_graph(source)
        if called is not None:
            yield from generators_in(called)


@cache
def _never_draws(target: object) -> bool:
    """Whether `target` draws nothing, whatever it is given: an op without tag and dropout."""
    if not isinstance(target, torch._ops.OpOverload) or _TAG in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    return str(target).startswith("aten.") or _DROPOUT not in names


def _drops_untagged(node: fx.Node) -> bool:
    """Whether it is an op of a package that drops out and has no tag, as FlashAttention's forward.

    A backward, and what is run again, is given the state that the forward has drawn.
    """
    target = target_of(node)
    if not isinstance(target, torch._ops.OpOverload) or str(target).startswith("aten."):
        return False
    named = arguments_of(node)
    return named.get(_DROPOUT, 0) != 0 and named.get("rng_state") is None


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of an op called `name`; None where the op has no such argument."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == name:
            given = dict(enumerate(node.args)).get(position, argument.default_value)
            return node.kwargs.get(name, given)
    return None


def _device(node: fx.Node) -> str:
    """The device of what `node` makes, and so of the generator that it draws from."""
    values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return str(values[0].device) if values else "cpu"


def _called_graph(node: fx.Node) -> fx.Graph | None:
    """The graph of a module that `node` fetches, for an op that takes a subgraph."""
    if node.op != "get_attr":
        return None
    module: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        module = getattr(module, name, None)
    return module.graph if isinstance(module, fx.GraphModule) else None
