"""When exchanges are awaited, so that the device goes on while one is under way.

In: the ATen graph, where every exchange is awaited at once. Out: the same graph, where waits are
late. The order in which exchanges begin stays as it is, so all ranks have the same.
"""

from __future__ import annotations

from torch import fx

from cotrain_compile.capture.nodes.exchanges import exchanges_in, put_wait
from cotrain_compile.graph.collectives import copies_its_input, is_collective

# So many exchanges are under way at most: what they make and nobody reads yet takes memory, and an
# update on the host, or on the way there, begins behind the wait.
MOST_UNDER_WAY = 4


def wait_late(graph: fx.Graph) -> None:
    """Put the wait for each exchange before the first use of what it brings.

    Or before a later exchange begins, so that at most `MOST_UNDER_WAY` are waited for at a time.
    Where an exchange reads what it is given until it ends, as a gather or scatter, it is awaited at
    once. The order in which exchanges begin stays as it is.
    """
    begun = [node for node in graph.nodes if is_collective(node)]
    last = dict(zip(begun, begun[MOST_UNDER_WAY:], strict=False))
    for exchange in exchanges_in(graph):
        if copies_its_input(exchange.begin):
            first_use = exchange.first_use
            put_wait(exchange, min(first_use, last.get(exchange.begin, first_use)))
