"""Exchanges that fail: an error of a process group, said in the words of the user's step.

In: the node of a collective, or of the wait for it, and what torch raised. Out: an error that names
the user's line.
"""

from __future__ import annotations

from torch import fx

from cotrain_compile.distribute.meet import first_line
from cotrain_compile.errors import CotrainError, ExchangeFailed
from cotrain_compile.graph.collectives import is_collective, is_wait, kind_of
from cotrain_compile.graph.user_lines import user_line

GO_ON = (
    "Another rank has failed or died, hangs, or takes longer than the timeout of the process "
    "group: look at the first error of the other ranks"
)
RANKS_DIFFER = (
    "Other ranks may have updated theirs, so that parameters may differ between ranks: start all "
    "ranks again from a checkpoint"
)


def exchange_failed(node: fx.Node, error: Exception) -> ExchangeFailed | None:
    """The error to raise where `node` lets ranks exchange data; None for all other nodes."""
    if isinstance(error, CotrainError) or not (is_collective(node) or is_wait(node)):
        return None
    begun = node.all_input_nodes[0] if is_wait(node) else node
    kind = kind_of(begun) or "exchange"
    line = user_line(begun.stack_trace) or user_line(node.stack_trace) or f"op {begun.name}"
    return ExchangeFailed(
        f"{line}: the {kind} that this line needs ({begun.name}) came to no end: "
        f"{first_line(error)}. {GO_ON}"
    )
