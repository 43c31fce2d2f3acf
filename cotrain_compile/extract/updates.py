"""Update groups: for each parameter, the ops that run for its update alone.

An op belongs to a parameter when everything that uses its result does. What several parameters
share (a clipping coefficient) stays outside and is an input of each group; what follows from
hyper-parameters alone costs nothing to repeat, so there the group's input is the hyper-parameter.

A random op belongs to no update: it stays in the order of the step, with what it reads, and so does
the op that adds its numbers to a gradient. The update begins behind it. So does a collective, which
every rank issues in the order of the step.

An update works on each element of its parameter by itself (`by_element`) where none of its
nodes mixes elements (a norm, as LAMB's; a product, as Muon's), shows them in another order, or
works on memory with gaps; what is left works on single numbers. Kept gradients are the buffers that
are found in, or kept in, the `.grad` of a parameter. One that shares its storage with something
else (a flat buffer of all gradients, a tensor that the step returns a second time) is left out:
nothing says where it rests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cotrain_compile.dataflow import Phase, Role, UpdateGroup
from cotrain_compile.extract.optimizer_loops import has_loop
from cotrain_compile.graph import StepGraph, returned_values, writes
from cotrain_compile.graph.collectives import is_collective, is_wait
from cotrain_compile.graph.random_ops import is_random

# With fewer, a buffer of single numbers could not be told from one of elements by its bytes.
FEWEST_ELEMENTS = 4096
# By name: torch registers its prims when they are first imported.
_ALSO_BY_ELEMENT = (
    "aten.copy_.default",
    "aten._to_copy.default",
    "aten.clone.default",
    "prims.fma.default",
)


def elements_of(step: StepGraph, members: Sequence[fx.Node], param: fx.Node) -> int:
    """How many elements an update may be divided into; 0 where it has to go as a whole."""
    count = param.meta["val"].numel()
    if not isinstance(count, int) or count < FEWEST_ELEMENTS:
        return 0
    return count if by_element(step, members, param) else 0


def by_element(step: StepGraph, members: Sequence[fx.Node], param: fx.Node) -> list[fx.Node]:
    """Those of `members`, the nodes of an update, that work on all elements of `param`, in order.

    None where not all of them do so by themselves, or others use what they make.
    """
    inside, shape = set(members), param.meta["val"].shape
    written = {node.args[0] for node in members if node.target is aten.copy_.default}
    found = []
    for node in members:
        values = [value for value in (node, *node.all_input_nodes) if _is_tensor(value)]
        full = [value for value in values if value.meta["val"].numel() > 1]
        if not full:
            continue
        of_numbers = [v for v in node.all_input_nodes if v not in full and v in written]
        alike = all(_is_dense(v.meta["val"]) and v.meta["val"].shape == shape for v in full)
        if not (alike and node in full and _is_by_element(node)) or of_numbers:
            return []
        if not inside.issuperset(node.users):
            return []
        found.append(node)
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether it is all of its memory, one element after the other."""
    nbytes = value.numel() * value.itemsize
    return value.is_contiguous() and value.untyped_storage().nbytes() == nbytes


def _is_by_element(node: fx.Node) -> bool:
    if str(node.target) in _ALSO_BY_ELEMENT:
        return len({v.meta["val"].device for v in (node, *node.all_input_nodes)}) == 1
    tags: Collection[torch.Tag] = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


aten = torch.ops.aten


def update_groups(step: StepGraph, buffer_of: Mapping[str, str]) -> tuple[UpdateGroup, ...]:
    """The update groups of `step` in the order of their first op.

    `buffer_of` names the buffer each node shows. A parameter whose states are read outside its own
    update, whose update reads a storage that several inputs are parts of (as gradients in one flat
    buffer are), or reads what another one writes, has no group: it cannot be updated anywhere but
    on the device.
    """
    draws = _draws(step)
    owner = _owners(step, draws)
    members: dict[str, list[fx.Node]] = {}
    for node in step.nodes:
        if node in owner:
            members.setdefault(owner[node], []).append(node)
    inputs: dict[str, list[fx.Node]] = {}
    for node in step.module.graph.find_nodes(op="placeholder"):
        item = step.input_of_node[node.name]
        if item.role in (Role.PARAM, Role.OPTIMIZER_STATE):
            inputs.setdefault(item.param or item.name, []).append(node)
    derived = from_hyperparameters(step)
    place = {node: position for position, node in enumerate(step.module.graph.nodes)}
    groups = [
        _group(step, nodes, inputs.get(param, []), derived, draws, buffer_of, place)
        for param, nodes in members.items()
    ]
    placeholders = step.module.graph.find_nodes(op="placeholder")
    inputs_in = Counter(buffer_of[n.name] for n in placeholders if n.name in buffer_of)
    written = {buffer_of[d.name] for _, d, _ in writes(step.module.graph) if _is_updated(step, d)}
    return tuple(
        group
        for group in groups
        if group is not None
        and all(inputs_in[b] == 1 for b in (group.param, *group.states))
        and all(inputs_in[b] <= 1 for b in (group.gradient, *group.scalars))
        and written.isdisjoint((group.gradient, *group.scalars))
    )


@dataclass(frozen=True)
class _Draws:
    """What random ops leave to the device, of the nodes that are not forward or backward.

    `noise` are random ops, and what follows from them and hyper-parameters alone; `staying` are
    these, the ops in which they meet a gradient, and collectives.
    """

    noise: frozenset[fx.Node]
    staying: frozenset[fx.Node]


def _draws(step: StepGraph) -> _Draws:
    noise, staying, of_states = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in step.nodes:
        if step.phases.get(node.name) is not Phase.OPTIMIZER:
            continue
        sources = node.all_input_nodes
        if any(source in of_states or _is_updated(step, source) for source in sources):
            of_states.add(node)
        drawn = noise.intersection(sources)
        known = all(source in noise or _is_hyperparameter(step, source) for source in sources)
        if is_random(node) or (drawn and known):
            noise.add(node)
        if is_collective(node) or is_wait(node):
            staying.add(node)
        if node in noise or (drawn and node not in of_states):
            staying.add(node)
    return _Draws(frozenset(noise), frozenset(staying))


def _is_updated(step: StepGraph, node: fx.Node) -> bool:
    item = step.input_of_node.get(node.name)
    return item is not None and item.role in (Role.PARAM, Role.OPTIMIZER_STATE)


def _owners(step: StepGraph, draws: _Draws) -> dict[fx.Node, str]:
    """The parameter that each node of the optimizer phase works for, where it is a single one."""
    owner: dict[fx.Node, str] = {}
    written: dict[fx.Node, str] = {}
    for node, destination, _ in writes(step.module.graph):
        item = step.input_of_node.get(destination.name)
        if item is None:
            continue
        written[destination] = item.param or item.name
        if item.role in (Role.PARAM, Role.OPTIMIZER_STATE):
            owner[node] = written[destination]
    for node in reversed(step.nodes):
        if node.op != "call_function" or node.target is aten.copy_.default:
            continue
        if node in draws.staying:
            continue
        if step.phases.get(node.name) is Phase.OPTIMIZER:
            users = {owner.get(user) for user in node.users}
            if len(users) != 1 or (only := users.pop()) is None:
                continue
            # What another update writes (a loss scale) may be new by the time this one runs.
            if all(written.get(source, only) == only for source in node.all_input_nodes):
                owner[node] = only
    return owner


def _group(
    step: StepGraph,
    nodes: list[fx.Node],
    inputs: list[fx.Node],
    derived: set[fx.Node],
    draws: _Draws,
    buffer_of: Mapping[str, str],
    place: Mapping[fx.Node, int],
) -> UpdateGroup | None:
    """The group of one parameter: `nodes` work for it, `inputs` are it and its states."""
    inside = set(nodes)
    params = [node for node in inputs if step.input_of_node[node.name].role is Role.PARAM]
    states = [node for node in inputs if node not in params]
    written = {node.args[0]: node for node in nodes if node.target is aten.copy_.default}
    if len(params) != 1 or params[0] not in written:
        return None
    rule = step.rules.get(step.input_of_node[params[0].name].name)
    if rule is None:
        return None  # not an optimizer's: a moving average is written in the step as well
    values = [*states, *(written[state] for state in states if state in written)]
    if any(user not in inside for value in values for user in value.users):
        return None
    outside = _outside_inputs(nodes, set(inputs), derived, buffer_of)
    if not outside:
        return None
    gradient = max(
        outside, key=lambda name: _like_a_gradient(step, outside[name], params[0], draws)
    )
    copies = [buffer_of[cast.name] for cast in equal_casts(params[0], place)]
    return UpdateGroup(
        param=buffer_of[params[0].name],
        gradient=gradient,
        states=tuple(buffer_of[node.name] for node in states),
        scalars=tuple(name for name in outside if name != gradient),
        ops=tuple(node.name for node in nodes),
        low_precision=copies[0] if copies else "",
        has_loop=has_loop(rule, _dtypes(step, inputs)),
        elements=elements_of(step, nodes, params[0]),
        recasts=tuple(copies[1:]),
    )


def _dtypes(step: StepGraph, inputs: list[fx.Node]) -> dict[str, torch.dtype]:
    """Dtypes of a parameter ("param") and its states, by the names that its optimizer has."""
    found: dict[str, torch.dtype] = {}
    for node in inputs:
        item = step.input_of_node[node.name]
        found["param" if item.role is Role.PARAM else item.key] = node.meta["val"].dtype
    return found


def _outside_inputs(
    nodes: list[fx.Node], own: set[fx.Node], derived: set[fx.Node], buffer_of: Mapping[str, str]
) -> dict[str, fx.Node]:
    """Buffers that the group reads but neither makes nor owns, each with a node that shows it.

    A view of its parameter that others read, too, is made outside, and shows what the group owns.
    """
    seen, owned = {*nodes, *own}, {buffer_of[node.name] for node in own}
    found: dict[str, fx.Node] = {}
    queue = [source for node in nodes for source in node.all_input_nodes]
    for source in queue:  # grows while it is read
        name = buffer_of.get(source.name)
        if source in seen:
            continue
        seen.add(source)
        if source in derived:
            queue += source.all_input_nodes
        elif name is not None and name not in owned:
            found[name] = source
    return found


def _like_a_gradient(
    step: StepGraph, node: fx.Node, param: fx.Node, draws: _Draws
) -> tuple[bool, bool, bool, int]:
    """Larger for what is more like the gradient of `param`: its shape, computed, of many elements.

    A parameter may have as few elements as a learning rate, or none at all.
    """
    value = node.meta["val"]
    has_its_shape = tuple(map(int, value.shape)) == tuple(map(int, param.meta["val"].shape))
    is_computed = not _is_hyperparameter(step, node)
    return has_its_shape, is_computed, node not in draws.noise, int(value.numel())


def from_hyperparameters(step: StepGraph) -> set[fx.Node]:
    """Nodes of the optimizer phase that no parameter, state, batch, gradient or draw reaches."""
    found: set[fx.Node] = set()
    for node in step.nodes:
        if step.phases.get(node.name) is not Phase.OPTIMIZER or is_random(node):
            continue
        if all(
            source in found or _is_hyperparameter(step, source) for source in node.all_input_nodes
        ):
            found.add(node)
    return found


def _is_hyperparameter(step: StepGraph, node: fx.Node) -> bool:
    item = step.input_of_node.get(node.name)
    return item is not None and item.role is Role.HYPERPARAMETER


def equal_casts(param: fx.Node, place: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The narrower copy that autocast makes of a parameter, and those equal to it, in their order.

    `place` has the position of each node in the step. What is made when the step has written the
    parameter is another copy.
    """
    writes = (place[user] for user in param.users if user.target is aten.copy_.default)
    written = min(writes, default=math.inf)
    casts = [user for user in sorted(param.users, key=place.__getitem__) if _narrows(user, param)]
    found = casts[:1]
    for cast in casts[1:]:
        if (cast.args, cast.kwargs) == (found[0].args, found[0].kwargs) and place[cast] < written:
            found.append(cast)
    return found


def _narrows(user: fx.Node, param: fx.Node) -> bool:
    is_cast = user.target is aten._to_copy.default
    return is_cast and user.meta["val"].element_size() < param.meta["val"].element_size()


def gradients_kept(step: StepGraph, buffer_of: Mapping[str, str]) -> dict[str, str]:
    """The parameter of each buffer that is a gradient kept across calls, by buffer."""
    inputs = [buffer_of[item.node] for item in step.inputs if item.node in buffer_of]
    shared = {buffer for buffer, count in Counter(inputs).items() if count > 1}
    params = {item.name: buffer_of[item.node] for item in step.inputs if item.role is Role.PARAM}
    found = {
        buffer_of[item.node]: params[item.param]
        for item in step.inputs
        if item.role is Role.GRADIENT and item.param in params
    }
    returned = Counter(
        buffer_of.get(node.name) for node in returned_values(step) if isinstance(node, fx.Node)
    )
    for node, param in step.kept.items():
        made = buffer_of.get(node)
        if made is not None and made not in inputs and returned[made] == 1 and param in params:
            found[made] = params[param]
    return {
        buffer: param
        for buffer, param in found.items()
        if buffer not in shared and param not in shared
    }
