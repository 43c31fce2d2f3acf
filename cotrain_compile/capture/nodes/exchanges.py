"""Exchanges in a graph: from what a rank gives to the first use of what all have made of it.

What is cheap on the way belongs to the exchange and moves with it: the cast or padding of a
parameter before a gather, the views of a result behind the wait. Ranks whose parts differ in size
pad and slice in their own ways; since nothing here counts that, all of them decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import is_view, storage_key
from cotrain_compile.graph import writes
from cotrain_compile.graph.collectives import is_collective, is_wait

aten = torch.ops.aten

# Takes the tensors of a bucket apart, each into memory of its own.
UNPACK = aten.split_with_sizes_copy.default
# What may stand between a parameter and its gather.
_LIGHT = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.cat.default,
    }
)


Writes = Mapping[object, Sequence[fx.Node]]


@dataclass(frozen=True)
class Exchange:
    """An exchange that one node waits for.

    `lead` is what makes its input out of inputs of the step, in order; None where something is
    computed for it. `shown` is what only shows its result. `first_use` is the first node that does
    anything with that.
    """

    begin: fx.Node
    wait: fx.Node
    lead: tuple[fx.Node, ...] | None
    shown: tuple[fx.Node, ...]
    first_use: fx.Node

    @property
    def given(self) -> fx.Node:
        """What this rank gives."""
        given = self.begin.args[0]
        assert isinstance(given, fx.Node)
        return given

    @property
    def nbytes(self) -> int:
        """Bytes of the whole; those of the trace, where they are dynamic."""
        values = (self.given.meta["val"], self.begin.meta["val"])
        return max(_number(value.numel()) * int(value.element_size()) for value in values)

    @property
    def sources(self) -> set[fx.Node]:
        """What is read for it: inputs of the step, or what is computed for it."""
        if self.lead is None:
            return {self.given}
        read = {source for node in (*self.lead, self.begin) for source in node.all_input_nodes}
        return read.difference(self.lead)


def exchanges_in(graph: fx.Graph) -> list[Exchange]:
    """The exchanges of `graph` in the order in which they begin, but those that nobody needs."""
    found = []
    for begin in graph.nodes:
        waits = [user for user in begin.users if is_wait(user)]
        one_each = len(begin.users) == len(waits) == 1 and isinstance(begin.args[0], fx.Node)
        if is_collective(begin) and one_each:
            shown = _shown(waits[0])
            uses = [u for node in (waits[0], *shown) for u in node.users if u not in shown]
            if uses:
                lead = _lead(begin.args[0])
                found.append(Exchange(begin, waits[0], lead, tuple(sorted(shown)), min(uses)))
    return found


def writes_into(graph: fx.Graph) -> Writes:
    """The writes into inputs of the step, by what they write."""
    found: dict[object, list[fx.Node]] = {}
    for write, into, _ in writes(graph):
        found.setdefault(storage_key(into), []).append(write)
    return found


def last_write(exchange: Exchange, written: Writes) -> fx.Node | None:
    """The last write, before it begins, into what is read for it."""
    assert exchange.lead is not None
    read = set(map(storage_key, exchange.sources))
    found = [w for key in read for w in written.get(key, ()) if w < exchange.begin]
    return max(found, default=None)


def put_wait(exchange: Exchange, before: fx.Node) -> None:
    """Put the wait before another node, and what shows its result, unless that comes later."""
    for node in (exchange.wait, *exchange.shown):
        if node < before or node is exchange.wait:
            before.prepend(node)


def _lead(given: object) -> tuple[fx.Node, ...] | None:
    if not isinstance(given, fx.Node):
        return None
    if given.op == "placeholder":
        return ()
    if not (given.target in _LIGHT or is_view(given)):
        return None
    found: dict[fx.Node, None] = {}
    for source in given.all_input_nodes:
        before = _lead(source)
        if before is None:
            return None
        found |= dict.fromkeys(before)
    return (*found, given)


def _shown(wait: fx.Node) -> list[fx.Node]:
    """What only shows the result of an exchange, or takes a bucket apart."""
    found: list[fx.Node] = []
    queue = [wait]
    for node in queue:  # grows while it is read
        shown = [user for user in node.users if is_view(user) or user.target is UNPACK]
        queue += [user for user in shown if user not in found]
        found += [user for user in shown if user not in found]
    return found


def _number(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
