"""Cuts: values of each layer that may stay, so that its replay is in parts.

In: a Dataflow and a level of values that are made again. Out: the `Cut`s of that level, from the
end of the layers to their beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.dataflow.regions import whole_name
from cotrain_compile.placement.recompute.levels import StepLevel

# A value of a layer with a smaller share of the layer's bytes is none to cut its replay in.
TELLING = 0.02


@dataclass(frozen=True)
class Cut:
    """A value of each layer in which its replay is cut in two: the `at`-th from its end.

    What is made of it is made again when the backward needs that, and what it is made of later.
    They have `nbytes` in all.
    """

    at: int
    nbytes: int
    names: frozenset[str]


def cuts_of(dataflow: Dataflow, level: StepLevel) -> tuple[Cut, ...]:
    """One value of each layer, from the last one that it makes back to the first.

    Those that are large enough to tell, of what `level` makes again. What a layer makes in parts is
    one value.
    """
    made = dict.fromkeys(name for op in reversed(dataflow.ops) for name in reversed(op.writes))
    layers = (_values(made, names) for names in level.by_region if names)
    groups = (
        frozenset(name for value in values for name in value)
        for values in zip_longest(*layers, fillvalue=())
    )
    sized = ((sum(dataflow.buffer[name].nbytes for name in group), group) for group in groups)
    telling = (each for each in sized if each[0] > TELLING * level.saved_bytes)
    return tuple(Cut(at, *each) for at, each in enumerate(telling))


def _values(made: Iterable[str], names: Collection[str]) -> Collection[Sequence[str]]:
    """Those of `names` in the order in which they are `made`, the parts of one value together."""
    found: dict[str, list[str]] = {}
    for name in made:
        if name in names:
            found.setdefault(whole_name(name), []).append(name)
    return found.values()
