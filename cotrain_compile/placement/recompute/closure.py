"""Closure: which ops of a stretch of the forward run again, the dearer a byte of memory the more.

Running an op again spends its seconds and saves what the backward reads of its outputs. What it
reads itself has to be there then, which costs bytes where the backward does not read it:

    y[o] = 1   op o runs again
    k[v] = 1   value v, which the backward does not read, is kept for ops that run again

    minimise   sum_o (seconds[o] / price - gain[o]) y[o]  +  sum_v nbytes[v] k[v]
    where      k[v] >= y[o] - y[maker of v]      for each op o that reads v

`price` is in seconds a byte. Every row has at most one variable on either side of the cut and costs
are bytes on one of them, so this is a minimum cut; of all minimum cuts the smallest is taken. As
the price rises, ops only get cheaper, so what runs again only grows (Gallo, Grigoriadis and Tarjan,
SIAM J. Computing 1989), and the distinct optima are the corners of a convex curve of seconds over
bytes: between two of them the price at which they are equal finds another, or there is none
(Eisner and Severance, JACM 1976). Capacities are whole bytes, so no rounding breaks this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import networkx
from networkx.algorithms.flow import preflow_push

# Seconds a byte: half a minute for a GiB, which no link takes.
DEAREST = 3e-8

_START, _END = "start", "end"
Node = int | str | tuple[str, int]


@dataclass(frozen=True)
class Need:
    """A value that ops read to run again and that the backward does not read.

    `maker` is the op that makes it when it runs again itself; None where it can only be kept.
    """

    nbytes: int
    readers: tuple[int, ...]
    maker: int | None = None


@dataclass(frozen=True)
class ForwardStretch:
    """The ops that may run again, by number: what each saves, takes and needs."""

    gains: tuple[int, ...]
    seconds: tuple[float, ...]
    needs: tuple[Need, ...]

    def saved_bytes(self, again: Collection[int]) -> int:
        """Bytes that are not kept over the forward's end when the ops `again` run again."""
        kept = sum(
            need.nbytes
            for need in self.needs
            if need.maker not in again and any(reader in again for reader in need.readers)
        )
        return sum(self.gains[op] for op in again) - kept

    def spent_s(self, again: Collection[int]) -> float:
        """Seconds that the ops `again` take."""
        return sum(self.seconds[op] for op in sorted(again))


def closures(stretch: ForwardStretch) -> list[frozenset[int]]:
    """The ops that run again, for every price up to `DEAREST` at which it is other ones.

    Each contains the one before it, spends more seconds and saves more bytes, at a higher price for
    each further byte. That nothing runs again, which is best while memory is free, is left out.
    """
    nothing, most = frozenset[int](), at_price(stretch, DEAREST)
    found = [*_between(stretch, nothing, most), most] if most else []
    for less, more in pairwise((nothing, *found)):
        assert less < more, "what is worth running again at a low price is not at a higher one"
    return found


def at_price(stretch: ForwardStretch, price: float) -> frozenset[int]:
    """The fewest ops whose running again is best where a byte costs `price` seconds."""
    side = _source_side(_flow_graph(stretch, price))
    return frozenset(node for node in side if isinstance(node, int))


def _between(
    stretch: ForwardStretch, less: frozenset[int], more: frozenset[int]
) -> Iterator[frozenset[int]]:
    """All closures with `less` < closure < `more`, smallest first."""
    spent_s = stretch.spent_s(more) - stretch.spent_s(less)
    saved_bytes = stretch.saved_bytes(more) - stretch.saved_bytes(less)
    if spent_s <= 0 or saved_bytes <= 0:
        return
    found = at_price(stretch, spent_s / saved_bytes)
    if less < found < more:
        yield from _between(stretch, less, found)
        yield found
        yield from _between(stretch, found, more)


def _flow_graph(stretch: ForwardStretch, price: float) -> networkx.DiGraph[Node]:
    """Ops on the side of the start run again; a cut costs bytes, seconds at their price."""
    graph: networkx.DiGraph[Node] = networkx.DiGraph()
    graph.add_nodes_from((_START, _END))

    def pay(source: Node, target: Node, nbytes: int) -> None:
        paid = graph.edges[source, target]["capacity"] if graph.has_edge(source, target) else 0
        graph.add_edge(source, target, capacity=paid + nbytes)

    for op, (gain, seconds) in enumerate(zip(stretch.gains, stretch.seconds, strict=True)):
        profit = gain - round(seconds / price)
        if profit > 0:
            pay(_START, op, profit)
        elif profit < 0:
            pay(op, _END, -profit)
    for number, need in enumerate(stretch.needs):
        otherwise: Node = _END if need.maker is None else need.maker
        if len(need.readers) == 1:
            pay(need.readers[0], otherwise, need.nbytes)
            continue
        kept: Node = "kept", number
        pay(kept, otherwise, need.nbytes)
        for reader in need.readers:
            graph.add_edge(reader, kept)  # of infinite capacity: it is kept once for all of them
    return graph


def _source_side(graph: networkx.DiGraph[Node]) -> set[Node]:
    """The smallest source side of all minimum cuts: what a maximum flow leaves within reach."""
    residual = preflow_push(graph, _START, _END)
    reached: set[Node] = {_START}
    waiting: list[Node] = [_START]
    while waiting:
        node = waiting.pop()
        for other, edge in residual[node].items():
            if other not in reached and edge["flow"] < edge["capacity"]:
                reached.add(other)
                waiting.append(other)
    return reached
