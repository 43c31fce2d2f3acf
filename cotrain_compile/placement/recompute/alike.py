"""Alike: values of a step that play the same part in it, one in each of its layers.

In: a Dataflow. Out: the kind of each buffer. Two are of one kind where ops of the same kind make
and read them: at first that is what an op is and what a buffer holds, then what is known of the
buffers and ops around them (colour refinement; Weisfeiler and Leman 1968). So the first and the
last layers may differ from those between.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from cotrain_compile.dataflow import Dataflow

# So often what is known of neighbours is added.
ROUNDS = 2

# An op by its name, and the place of a buffer among those that it reads or writes.
_Use = tuple[str, int]


def kinds_of(dataflow: Dataflow) -> Mapping[str, int]:
    """The kind of each buffer, by its name: numbers in the order in which they are first met."""
    made: dict[str, list[_Use]] = {buffer.name: [] for buffer in dataflow.buffers}
    read: dict[str, list[_Use]] = {buffer.name: [] for buffer in dataflow.buffers}
    for op in dataflow.ops:
        for uses, names in ((made, op.writes), (read, op.reads)):
            for place, name in enumerate(names):
                uses[name].append((op.name, place))
    ops = _numbered({op.name: (op.target, op.phase) for op in dataflow.ops})
    kinds = _numbered({b.name: (b.nbytes, b.role) for b in dataflow.buffers})

    def around(names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(kinds[name] for name in names)

    def seen(uses: list[_Use]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((ops[name], place) for name, place in uses))

    for _ in range(ROUNDS):
        ops = _numbered({op.name: (ops[op.name], around(op.reads)) for op in dataflow.ops})
        kinds = _numbered({n: (kinds[n], seen(made[n]), seen(read[n])) for n in kinds})
    return kinds


def _numbered(keys: Mapping[str, Hashable]) -> dict[str, int]:
    """Equal numbers for what has equal keys."""
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(key, len(numbers)) for name, key in keys.items()}
