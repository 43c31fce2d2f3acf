"""Buckets of exchanges: small collectives that are near each other become one flat collective.

In: the ATen graph. Out: the same graph, where a latency is paid once for many small tensors.

```
wait(all_reduce(a)), wait(all_reduce(b))  ->  split_copy(wait(all_reduce(cat(a, b))))
```

A reduction adds up what all ranks have at each element, wherever that is in its buffer, so with two
ranks no bit changes. With more, the order in which gloo or NCCL add up the ranks may depend on the
place in the buffer: sums then differ by their rounding, as those of the buckets of eager's reducer
do. What is gathered or broadcast is copied, and stays what it is.

A bucket begins when the last of its tensors is complete, and before the first use of any of its
results. Every rank makes the same buckets: they follow from the graph alone.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.nodes.exchanges import (
    UNPACK,
    Exchange,
    Writes,
    exchanges_in,
    last_write,
    writes_into,
)
from cotrain_compile.capture.nodes.storages import read_instead, storage_key, traced_again
from cotrain_compile.dataflow import SMALL_EXCHANGE_BYTES

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

SMALL_BYTES = SMALL_EXCHANGE_BYTES
# A bucket of a few times as much hides most latencies.
BUCKET_BYTES = 4 * SMALL_BYTES
# Of what is exchanged so in a step, so that the first bucket begins long before the backward ends,
# and little memory waits in it. Buffers are broadcast before there is anything to do beside it.
SHARE = 0.25

# Where a collective has how many ranks it is for; 1 part where each gives and gets the whole.
_REDUCE = _c10d.all_reduce.default
_SCATTER = _c10d.reduce_scatter_tensor.default
_GATHER = _c10d.all_gather_into_tensor.default
_BROADCAST = _c10d.broadcast.default
_RANKS_AT: dict[Any, int] = {_GATHER: 1, _SCATTER: 2}
_KINDS = frozenset({_REDUCE, _SCATTER, _GATHER, _BROADCAST})


@dataclass
class _Bucket:
    """Exchanges that begin together `after` a node, before the first use of what any brings."""

    after: fx.Node
    first_use: fx.Node
    most_bytes: float
    nbytes: int = 0
    members: list[Exchange] = field(default_factory=list)

    def takes(self, exchange: Exchange, written: Writes) -> bool:
        """Whether `exchange` can go with the others."""
        after = max(self.after, _possible_after(exchange, written))
        fits = self.nbytes + exchange.nbytes <= self.most_bytes
        first_use = min(self.first_use, exchange.first_use)
        members = [*self.members, exchange]
        # A buffer is broadcast before each forward: the second time, what the first one brought.
        brought = {node for member in self.members for node in (member.wait, *member.shown)}
        if not brought.isdisjoint(exchange.sources):
            return False
        return fits and after < first_use and not _written(members, after, written)

    def add(self, exchange: Exchange, written: Writes) -> None:
        self.after = max(self.after, _possible_after(exchange, written))
        self.first_use = min(self.first_use, exchange.first_use)
        self.nbytes += exchange.nbytes
        self.members.append(exchange)


def bucket_exchanges(graph: fx.Graph) -> None:
    """Put small exchanges of one kind, group and dtype into flat buckets."""
    written, filling = writes_into(graph), dict[object, _Bucket]()
    exchanges, all_bytes = exchanges_in(graph), Counter[object]()
    for exchange in exchanges:
        all_bytes[_kind(exchange)] += exchange.nbytes
    buckets: list[_Bucket] = []
    for exchange in filter(_is_small, exchanges):
        kind = _kind(exchange)
        if kind not in filling or not filling[kind].takes(exchange, written):
            share = 1.0 if exchange.begin.target is _BROADCAST else SHARE
            most = min(BUCKET_BYTES, share * all_bytes[kind])
            filling[kind] = _Bucket(exchange.begin.prev, exchange.first_use, most)
            buckets.append(filling[kind])
        filling[kind].add(exchange, written)
    joined = [bucket for bucket in buckets if len(bucket.members) > 1]
    for bucket in joined:
        _join(graph, bucket)
    if joined:
        graph.eliminate_dead_code(lambda node: node.op != "call_function" or node.is_impure())


def _is_small(exchange: Exchange) -> bool:
    begin, given, made = exchange.begin, exchange.given.meta["val"], exchange.begin.meta["val"]
    return (
        begin.target in _KINDS
        and all(isinstance(size, int) for size in (*given.shape, *made.shape))
        and given.is_contiguous()
        and made.is_contiguous()
        and 0 < exchange.nbytes <= SMALL_BYTES
    )


def _kind(exchange: Exchange) -> object:
    """Equal for what one collective can exchange together."""
    given = exchange.given.meta["val"]
    return exchange.begin.target, exchange.begin.args[1:], given.dtype, given.device


def _possible_after(exchange: Exchange, written: Writes) -> fx.Node:
    """The node behind which `exchange` can begin."""
    write = last_write(exchange, written) if exchange.lead is not None else None
    return max([*exchange.sources, *([write] if write is not None else [])])


def _written(members: Sequence[Exchange], after: fx.Node, written: Writes) -> bool:
    """Whether what one of them gives is written between its place and where all begin."""
    for member in members:
        given = set(map(storage_key, member.sources))
        first, last = sorted((member.begin, after))
        if any(first < write < last for key in given for write in written.get(key, ())):
            return True
    return False


def _join(graph: fx.Graph, bucket: _Bucket) -> None:
    """Replace the exchanges of `bucket` by one of them all."""
    first = bucket.members[0].begin
    rows = _ranks(bucket.members[0])
    scatters, gathers = first.target is _SCATTER, first.target is _GATHER
    place = bucket.after
    for node in (node for member in bucket.members for node in member.lead or ()):
        if place < node:
            place.append(node)
            place = node
    before = place.next
    made = _Making(graph, before, first)
    given_rows = rows if scatters else 1
    sizes = [prod(m.given.meta["val"].shape) // given_rows for m in bucket.members]
    parts = [
        made(aten.view.default, member.given, [given_rows, size])
        for member, size in zip(bucket.members, sizes, strict=True)
    ]
    flat = made(aten.view.default, made(aten.cat.default, parts, 1), [given_rows * sum(sizes)])
    begun = made(first.target, flat, *first.args[1:])
    made_rows = rows if gathers else 1
    wait = made(_c10d.wait_tensor.default, begun)
    whole = made(aten.view.default, wait, [made_rows, sum(sizes)])
    apart = made(UNPACK, whole, sizes, 1)
    results = [
        made(aten.view.default, made.item(apart, number), list(member.wait.meta["val"].shape))
        for number, member in enumerate(bucket.members)
    ]
    for member, result in zip(bucket.members, results, strict=True):
        for node in member.shown:
            if node < before:
                before.prepend(node)
        for user in list(member.wait.users):
            read_instead(user, member.wait, result)
    for member in bucket.members:
        graph.erase_node(member.wait)
        graph.erase_node(member.begin)


def _ranks(exchange: Exchange) -> int:
    place = _RANKS_AT.get(exchange.begin.target)
    ranks: Any = 1 if place is None else exchange.begin.args[place]
    return int(ranks)


class _Making:
    """Makes nodes before another one, of the same phase and module as `like`."""

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node) -> None:
        self.graph, self.before = graph, before
        self.meta = {key: value for key, value in like.meta.items() if key != "val"}

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            name = getattr(target, "_opname", target.__name__)
            node = self.graph.create_node("call_function", target, args, name=name)
        node.meta = dict(self.meta)
        node.meta["val"] = traced_again(node)
        return node

    def item(self, source: fx.Node, number: int) -> fx.Node:
        return self(operator.getitem, source, number)
