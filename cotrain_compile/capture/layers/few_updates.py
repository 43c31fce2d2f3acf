"""Few updates: of the updates that are alike two are lowered, and the others copied from these.

In Dynamo's graph one op stands in for an update that is left out: it adds the gradient to the
parameter, so that AOTAutograd keeps both where they are. In the ATen graph what the second of the
kind has been lowered to is put in its place, with its writes at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from cotrain_compile.capture.layers.blocks import UnlikeError, look_of_tensor
from cotrain_compile.capture.layers.memory import (
    all_storages,
    is_plain,
    of_tensors,
    shown_in,
    storages,
    tell_of_writes,
)
from cotrain_compile.capture.layers.shorten import put_into, with_graph
from cotrain_compile.capture.layers.updates import Key, Update, form_of, keys_of, updates_of
from cotrain_compile.graph import StepInput, writes

aten = torch.ops.aten
FEWEST_LEFT_OUT = 2


@dataclass(frozen=True)
class Kind:
    """Updates that are alike, by their parameters: two are lowered, the others `left_out`."""

    first: str
    second: str
    left_out: Sequence[str]


@dataclass(frozen=True)
class FewUpdates:
    """A graph without some updates, and what it takes to have them again."""

    module: fx.GraphModule
    keys: Sequence[tuple[str, Key] | None]  # by placeholder
    kinds: Sequence[Kind]

    @property
    def inputs(self) -> list[str | None]:
        """By placeholder: the parameter of an update that is one of a kind."""
        some = {name for k in self.kinds for name in (k.first, k.second, *k.left_out)}
        return [key[0] if key is not None and key[0] in some else None for key in self.keys]

    @property
    def text(self) -> str:
        """What was left out."""
        return f"{self.keys} {self.kinds}"


def with_few_updates(module: fx.GraphModule, inputs: Sequence[StepInput]) -> FewUpdates | None:
    """Dynamo's `module` without updates that are as two others; None where too few are.

    `inputs` describe its placeholders.
    """
    keys = keys_of(inputs)
    updates = updates_of(module.graph, keys)
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    alone = {name: u for name, u in updates.items() if _may_be_left_out(u, order)}
    members: list[tuple[object, list[fx.Node], list[str]]] = []
    gradients: dict[str, fx.Node] = {}
    for name, update in alone.items():
        form, outside = form_of(update, _look_before)
        for other, read, names in members:
            gradient = _what_differs(read, outside) if form == other else None
            if gradient is not None and _look(gradient) == _look(update.param):
                gradients[name] = gradient
                names.append(name)
                break
        else:
            members.append((form, outside, [name]))
    kinds = [
        Kind(names[0], names[1], names[2:])
        for *_, names in members
        if len(names) >= 2 + FEWEST_LEFT_OUT
    ]
    if not kinds:
        return None
    left_out = [name for kind in kinds for name in kind.left_out]
    stand_ins = {alone[name].nodes[0]: (alone[name], gradients[name]) for name in left_out}
    dropped = {node for name in left_out for node in alone[name].nodes}
    return FewUpdates(_without(module, stand_ins, dropped), keys, kinds)


def _may_be_left_out(update: Update, order: Mapping[fx.Node, int]) -> bool:
    """Whether nobody looks at what an update has made or written, and it writes its own alone."""
    mine, last = {*update.nodes}, order[update.nodes[-1]]
    memory = {storage for node in _outside(update) for storage in _storages_before(node)}
    return (
        update.stands_alone()
        and all(order[user] <= last for t in update.tensors.values() for user in t.users)
        and all(user.op != "output" for t in update.tensors.values() for user in t.users)
        and all(_makes_a_tensor(node) for node in mine)
        and not any(memory & {*_storages_before(node)} for node in mine)
    )


def _outside(update: Update) -> set[fx.Node]:
    read = {n for node in update.nodes for n in node.all_input_nodes}
    return read - {*update.nodes} - {*update.tensors.values()}


def _makes_a_tensor(node: fx.Node) -> bool:
    """Whether a call gives a tensor, or computes with numbers: not, if it writes a part of one."""
    value = node.meta.get("example_value")
    return type(value) is FakeTensor or isinstance(value, torch.SymFloat | torch.SymInt)


def _storages_before(node: fx.Node) -> list[int]:
    leaves = tree_leaves(node.meta.get("example_value"))
    return [v.untyped_storage()._cdata for v in leaves if isinstance(v, torch.Tensor)]


def _look(node: fx.Node) -> object:
    """What a gradient has to have of its parameter, for the op that adds it."""
    value = node.meta.get("example_value")
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _look_before(node: fx.Node) -> object:
    return _shown(node.meta.get("example_value"))


def _shown(value: object) -> list[object]:
    """What values look like; numbers as they are written, since to compare them is to guard."""
    return [
        look_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), str(leaf))
        for leaf in tree_leaves(value)
    ]


def _what_differs(some: Sequence[fx.Node], others: Sequence[fx.Node]) -> fx.Node | None:
    """The one of `others` that is not as in `some`; None if it is not just one."""
    different = [b for a, b in zip(some, others, strict=True) if a is not b]
    return different[0] if len(different) == 1 else None


def _without(
    module: fx.GraphModule,
    stand_ins: Mapping[fx.Node, tuple[Update, fx.Node]],
    dropped: set[fx.Node],
) -> fx.GraphModule:
    """`module` with a call in place of each update that is left out."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in stand_ins:
            update, gradient = stand_ins[node]
            made = graph.call_method("add_", (new[update.param], new[gradient]))
            made.meta = {
                key: node.meta[key] for key in ("custom", "stack_trace") if key in node.meta
            }
            made.meta["example_value"] = update.param.meta["example_value"]
        elif node not in dropped:
            new[node] = put_into(graph, node, node.args, node.kwargs, new.__getitem__)
    return with_graph(module, graph)


def put_updates_back(module: fx.GraphModule, few: FewUpdates) -> None:
    """Put the updates that were left out into the ATen graph of the others, in place.

    Raises `UnlikeError` where two of a kind were not lowered to the same ops.
    """
    lowered = _Lowered(module.graph, few)
    for kind in few.kinds:
        lowered.check(kind)
    like: dict[fx.Node, fx.Node] = {}
    for kind in few.kinds:
        for name in kind.left_out:
            like |= lowered.put_back(kind, name)
    lowered.write_in_turn()
    module.recompile()
    tell_of_writes(module.graph, like)


class _Lowered:
    """An ATen graph with few updates, while others are added."""

    def __init__(self, graph: fx.Graph, few: FewUpdates) -> None:
        self.graph, self.placeholders = graph, graph.find_nodes(op="placeholder")
        if len(self.placeholders) != len(few.keys):
            raise UnlikeError("AOTAutograd has put inputs together")
        self.updates = updates_of(graph, few.keys)
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.written = {destination: node for node, destination, _ in writes(graph)}
        if list(self.written.values()) != self._last_nodes(len(self.written)):
            raise UnlikeError("something comes behind the first write")
        self.owner: dict[int, fx.Node] = {}  # by storage, who made it
        for node in graph.nodes:
            for storage in storages(node):
                self.owner.setdefault(storage, node)

    def _last_nodes(self, count: int) -> list[fx.Node]:
        return list(self.order)[-1 - count : -1]

    def _update(self, name: str) -> Update:
        if name not in self.updates:
            raise UnlikeError(f"{name} has no update")
        return self.updates[name]

    def check(self, kind: Kind) -> None:
        """Raise where what a kind was lowered to is no copy of each other, or is read elsewhere."""
        first, second = self._update(kind.first), self._update(kind.second)
        forms = [(form_of(u, _look_of_value)[0], self._memory(u)) for u in (first, second)]
        if forms[0] != forms[1]:
            raise UnlikeError("two updates that are alike are not lowered to the same ops")
        if not second.stands_alone() or any(not map(is_plain, _values(n)) for n in second.nodes):
            raise UnlikeError(f"what updates {kind.second} is no update of its own")
        gradient = self._gradient(kind)
        for name in kind.left_out:
            update = self._update(name)
            last = self.order[self._stand_in(update)]
            pairs = [(tensor, second.tensors[key]) for key, tensor in update.tensors.items()]
            for mine, model in [*pairs, (self._added(update), gradient)]:
                if _look_of_value(mine) != _look_of_value(model):
                    raise UnlikeError(f"{mine.name} does not look as {model.name}")
            for tensor, _ in pairs:
                readers = [user for user in tensor.users if user.target is not aten.copy_.default]
                if any(self.order[reader] > last for reader in readers):
                    raise UnlikeError(f"something reads {tensor.name} behind its update")

    def _memory(self, update: Update) -> list[object]:
        """Whose memory each node of an update shows, of the update's own."""
        place = update.place
        owners = [self.owner[storage] for node in update.nodes for storage in storages(node)]
        if any(owner not in place for owner in owners):
            raise UnlikeError("an update makes what is in other memory")
        return [place[owner] for owner in owners]

    def _gradient(self, kind: Kind) -> fx.Node:
        """What the second update reads in place of what the first does."""
        reads = [
            form_of(self.updates[name], _look_of_value)[1] for name in (kind.first, kind.second)
        ]
        gradient = _what_differs(*reads)
        if gradient is None:
            raise UnlikeError("an update reads more than its gradient")
        return gradient

    def _stand_in(self, update: Update) -> fx.Node:
        """The op that stands in for an update, which nothing reads but the write."""
        (*others, node) = update.nodes
        write = self.written.get(update.param)
        if (
            others
            or node.target is not aten.add.Tensor
            or write is None
            or {*node.users} != {write}
        ):
            raise UnlikeError(f"{node.name} does not stand in for an update")
        return node

    def _added(self, update: Update) -> fx.Node:
        _, gradient = self._stand_in(update).args
        assert isinstance(gradient, fx.Node)
        return gradient

    def put_back(self, kind: Kind, name: str) -> dict[fx.Node, fx.Node]:
        """Have `name` updated as the second of its kind; which of their inputs are the like."""
        model, update = self.updates[kind.second], self.updates[name]
        stand_in = self._stand_in(update)
        like = {update.tensors[key]: node for key, node in model.tensors.items()}
        new = {theirs: mine for mine, theirs in like.items()}
        memory = {
            theirs._cdata: mine
            for a, b in new.items()
            for theirs, mine in zip(all_storages(a), all_storages(b), strict=True)
        }
        new[self._gradient(kind)] = self._added(update)
        self.graph.erase_node(self.written.pop(update.param))
        with self.graph.inserting_before(stand_in):
            for node in model.nodes:
                new[node] = self._copied(node, new, memory)
        self.graph.erase_node(stand_in)
        (output,) = self.graph.find_nodes(op="output")
        with self.graph.inserting_before(output):
            for mine, theirs in like.items():
                if theirs in self.written:
                    self.written[mine] = self._copied(self.written[theirs], new, memory)
        return like

    def _copied(
        self,
        node: fx.Node,
        new: Mapping[fx.Node, fx.Node],
        memory: dict[int, torch.UntypedStorage],
    ) -> fx.Node:
        def shown(value: torch.Tensor) -> torch.Tensor:
            storage = value.untyped_storage()
            if storage._cdata not in memory:
                memory[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
            return shown_in(memory[storage._cdata], value)

        made = put_into(self.graph, node, node.args, node.kwargs, lambda n: new.get(n, n))
        if "val" in node.meta:
            made.meta["val"] = of_tensors(shown, node.meta["val"])
        return made

    def write_in_turn(self) -> None:
        """Have the writes in the order of the inputs, as AOTAutograd has them."""
        (output,) = self.graph.find_nodes(op="output")
        for node in self.placeholders:
            if node in self.written:
                output.prepend(self.written[node])


def _values(node: fx.Node) -> list[Any]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _look_of_value(node: fx.Node) -> object:
    return _shown(node.meta.get("val"))
