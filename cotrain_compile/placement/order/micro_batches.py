"""Micro-batches: for which of them each op of a step works, and in which layer of the model.

In: a Dataflow. Out: `MicroBatches`, or `OrderIsKept` with the reason why the step has none. They
are found by structure: a forward through numbered modules, then a backward, and the same again.
What comes before the first layer counts as part of it, what follows the last one as part of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow, Phase, Role

# Levels of numbered modules that are tried, from the outermost inwards.
_DEPTHS = 3


class OrderIsKept(Exception):
    """A step whose ops run in the order that it has; the message is the reason, in words."""


@dataclass(frozen=True)
class Turn:
    """What one op works for: a micro-batch and a layer, both by number, in forward or backward."""

    micro_batch: int
    layer: int
    is_backward: bool


@dataclass(frozen=True)
class MicroBatches:
    """`count` passes through `layers`. `turns` is by position of the op; None is what follows."""

    layers: tuple[str, ...]
    count: int
    turns: tuple[Turn | None, ...]


def find_micro_batches(dataflow: Dataflow) -> MicroBatches:
    """The micro-batches of a step; raises `OrderIsKept` where it has not at least two."""
    for depth in range(1, _DEPTHS + 1):
        layers = _layers(dataflow, depth)
        rounds = list(_rounds(dataflow, layers))
        if len(rounds) < 2 and depth == 1:
            raise OrderIsKept("the step has one micro-batch, or no numbered modules")
        if len(rounds) < 2:
            break
        visited = [_visited(round_, layers) for round_ in rounds]
        if any(names != visited[0] for names in visited):
            raise OrderIsKept(
                "its passes go through other layers each: they are no micro-batches of one model"
            )
        if len(visited[0]) > 1:
            turns = _turns(dataflow, rounds, layers, visited[0])
            return MicroBatches(visited[0], len(rounds), turns)
    raise OrderIsKept("the model has a single layer")


@dataclass(frozen=True)
class _Round:
    """Positions of the ops of a pass: its forward, and its backward."""

    forward: range
    backward: range


def _layers(dataflow: Dataflow, depth: int) -> list[str]:
    """The layer whose module called each op, or that uses the parameter it reads; "" for none.

    A backward knows no modules. A parameter is of the layer that the forward first uses it in, as
    is its low-precision copy; where the forward knows no modules either, of that in its name.
    """
    used_in = {b.name: _numbered(b.name, depth) for b in dataflow.buffers if b.role is Role.PARAM}
    used_in |= {g.low_precision: used_in[g.param] for g in dataflow.updates if g.low_precision}
    for op in reversed(dataflow.ops):
        if op.module and op.phase is Phase.FORWARD and op.writes:
            used_in |= {name: _numbered(op.module, depth) for name in op.reads if name in used_in}
    found = []
    for op in dataflow.ops:
        read = [used_in[name] for name in op.reads if name in used_in and op.writes]
        of_params = next((name for name in reversed(read) if name), "")
        found.append(_numbered(op.module, depth) if op.module else of_params)
    return found


def _numbered(path: str, depth: int) -> str:
    """`path` up to its `depth`-th number; "" where it has fewer."""
    parts = path.split(".")
    ends = [position for position, part in enumerate(parts, 1) if part.isdigit()]
    return ".".join(parts[: ends[depth - 1]]) if len(ends) >= depth else ""


def _rounds(dataflow: Dataflow, layers: Sequence[str]) -> Iterator[_Round]:
    """Each forward through layers with the backward that follows it.

    What lies between two of them, a sum of losses or the way to the first layer, begins the second.
    """
    start, backward, last = 0, 0, -1  # of this round: first op, first and last of its backward
    in_layers = False
    for position, op in enumerate(dataflow.ops):
        if op.phase is Phase.BACKWARD and in_layers:
            backward = position if last < start else backward
            last = position
        elif op.phase is Phase.FORWARD and layers[position] and op.writes:
            if last >= start:
                yield _Round(range(start, backward), range(backward, last + 1))
                start = last + 1
            in_layers = True
    if last >= start:
        yield _Round(range(start, backward), range(backward, last + 1))


def _visited(round_: _Round, layers: Sequence[str]) -> tuple[str, ...]:
    """The layers of a forward, in the order in which it comes to them."""
    return tuple(dict.fromkeys(layers[at] for at in round_.forward if layers[at]))


def _turns(
    dataflow: Dataflow, rounds: Sequence[_Round], layers: Sequence[str], visited: Sequence[str]
) -> tuple[Turn | None, ...]:
    """The turn of each op. Within a pass layers only rise in the forward, and fall in the backward,
    so that the ops of a micro-batch stay in their order."""
    number = {name: index for index, name in enumerate(visited)}
    turns: list[Turn | None] = [None] * len(dataflow.ops)
    for micro_batch, round_ in enumerate(rounds):
        current = 0
        for at in round_.forward:
            current = max(current, number.get(layers[at], 0))
            turns[at] = Turn(micro_batch, current, is_backward=False)
        for at in round_.backward:
            current = min(current, number.get(layers[at], current))
            turns[at] = Turn(micro_batch, current, is_backward=True)
    return tuple(turns)
