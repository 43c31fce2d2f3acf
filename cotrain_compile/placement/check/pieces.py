"""Pieces: does what goes in pieces add up to the whole, in the order of the step?

In: the Dataflow of a step, and the one in which some updates go in pieces. Out: nothing, or
`PlanError` with the name that is wrong.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.check.rules import require


def check_pieces(whole: Dataflow, dataflow: Dataflow) -> None:
    """Raise `PlanError` unless each update in pieces does what it does in `whole`, to all of it."""
    covered: dict[str, int] = {}
    for piece, name in dataflow.pieces.wholes.items():
        covered[name] = covered.get(name, 0) + dataflow.buffer[piece].nbytes
    for name, nbytes in covered.items():
        size = whole.buffer[name].nbytes
        require(nbytes == size, f"the pieces of {name} have {nbytes} bytes of {size}")
    for param, parts in dataflow.pieces.parts.items():
        _check_update(whole, dataflow, param, parts)


def _check_update(
    whole: Dataflow, dataflow: Dataflow, param: str, parts: tuple[tuple[str, ...], ...]
) -> None:
    group, number = whole.update[param], len(parts)
    require(group.elements > 0, f"{param} is updated in pieces, but not element by element")
    done = sum(len(part) for part in parts)
    ops = [whole.ops[whole.position[name]] for name in group.ops]
    full = [
        op
        for op in ops
        if any(whole.buffer[n].nbytes >= group.elements for n in (*op.reads, *op.writes))
    ]
    once = len(ops) - len(full)
    require(
        done == once + number * len(full) and len(full) == len(parts[-1]),
        f"the pieces of the update of {param} run {done} ops, where it has {len(full)} for each "
        f"of {number} pieces and {once} more",
    )
    # Single numbers are made once, with the first piece, which comes where all of it was done.
    numbers = [op for op in ops if op not in full]
    last = ops.index(full[-1])
    first = [*(op for op in numbers if ops.index(op) < last), *full]
    first += [op for op in numbers if ops.index(op) > last]
    for part in parts:
        targets = [dataflow.ops[dataflow.position[name]].target for name in part]
        own = [op.target for op in (first if part is parts[0] else full)]
        require(targets == own, f"a piece of the update of {param} runs other ops than the update")
    places = [dataflow.position[name] for part in parts[1:] for name in part]
    require(places == sorted(places), f"the pieces of the update of {param} are shuffled")
