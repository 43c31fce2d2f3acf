"""When exchanges begin and are awaited, so that the device goes on while one is under way.

In: the ATen graph, where an exchange begins where its result is needed, and is awaited at once.
Out: the same graph, where gathers begin early and every wait is late. The order of what stays is
that of the graph, so all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from cotrain_compile.capture.nodes.exchanges import (
    Exchange,
    begin_early,
    exchanges_in,
    last_write,
    put_wait,
    writes_into,
)
from cotrain_compile.collectives import copies_its_input, is_collective

# So many exchanges are under way at most: what they make and nobody reads yet takes memory, and an
# update on the host, or on the way there, begins behind the wait.
MOST_UNDER_WAY = 4
# Of gathers, and of scatters, which both hold what they read: so many times the largest.
MOST_TIMES_LARGEST = 2


def gather_early(graph: fx.Graph) -> None:
    """Begin gathers of parameters while those before them are waited for.

    Each begins before the wait for an earlier one, so that at most `MOST_UNDER_WAY` are under way,
    with no more than `MOST_TIMES_LARGEST` times the bytes of the largest. What is written in the
    step is gathered behind the write.
    """
    gathers = [e for e in exchanges_in(graph) if _gathers_input(e)]
    written = writes_into(graph)
    ahead = dict(_ahead(gathers))
    for gather in gathers:
        before = ahead.get(gather)
        write = last_write(gather, written)
        if before is not None and (write is None or write < before):
            begin_early(gather, before)


def wait_late(graph: fx.Graph) -> None:
    """Put the wait for each exchange before the first use of what it brings.

    Or before a later exchange begins, so that at most `MOST_UNDER_WAY` are waited for at a time,
    and of those that read what they are given until they end no more than `MOST_TIMES_LARGEST`
    times the bytes of the largest. The order in which exchanges begin stays as it is.
    """
    exchanges = exchanges_in(graph)
    begun = [node for node in graph.nodes if is_collective(node)]
    last = dict(zip(begun, begun[MOST_UNDER_WAY:], strict=False))
    crowded = dict(_crowded([e for e in exchanges if not copies_its_input(e.begin)]))
    for exchange in exchanges:
        limits = [limits[exchange.begin] for limits in (last, crowded) if exchange.begin in limits]
        put_wait(exchange, min([exchange.first_use, *limits]))


def _gathers_input(exchange: Exchange) -> bool:
    return "all_gather" in str(exchange.begin.target) and exchange.lead is not None


def _ahead(gathers: Sequence[Exchange]) -> Iterator[tuple[Exchange, fx.Node]]:
    """Each gather with the wait before which it may begin."""
    most = MOST_TIMES_LARGEST * max((gather.nbytes for gather in gathers), default=0)
    first, under_way = 0, 0
    for number, gather in enumerate(gathers):
        under_way += gather.nbytes
        while number - first >= MOST_UNDER_WAY or under_way > most:
            under_way -= gathers[first].nbytes
            first += 1
        if first < number:
            yield gather, gathers[first].wait


def _crowded(holding: Sequence[Exchange]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The beginning of each exchange with that of a later one, which would be too much with it."""
    most = MOST_TIMES_LARGEST * max((exchange.nbytes for exchange in holding), default=0)
    first, under_way = 0, 0
    for later in holding:
        under_way += later.nbytes
        while under_way > most:
            yield holding[first].begin, later.begin
            under_way -= holding[first].nbytes
            first += 1
