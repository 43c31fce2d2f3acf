"""Branches: the layers of a profile as one sequence, with branches that fork and join inside it.

In: a `LayerProfile`. Out: `Item`s in order, each a layer with all ways that lead to it from the
item before. `OptionError` where layers are not nested like that. Pure function. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.cluster.model.profiles import BATCH, Layer, LayerProfile
from cotrain_compile.errors import OptionError


@dataclass(frozen=True)
class Item:
    """A layer and the branches that lead to it from the item before, or from the batch.

    A branch is the items on it, none where the layer reads the item before itself. A layer of a
    chain has one branch with nothing on it.
    """

    layer: Layer
    branches: tuple[tuple[Item, ...], ...]


def sequence_of(profile: LayerProfile) -> tuple[Item, ...]:
    """The layers from the batch to the last one; branches in the order of who reads first."""
    ends = [name for name, readers in profile.readers.items() if not readers]
    if len(ends) > 1:
        raise OptionError(
            f"layers {', '.join(ends)} of {profile.name} are read by none; a plan of widths needs "
            "one last layer, such as the loss"
        )
    joins = _joins(profile)
    items = _between(profile, joins, BATCH, None)
    if (found := sum(map(_count, items))) != len(profile.layers):
        raise OptionError(
            f"the layers of {profile.name} are not a chain with branches inside one another: "
            f"{len(profile.layers) - found} layers counted twice or missed; merge layers that read "
            "across branches into one"
        )
    return items


def _joins(profile: LayerProfile) -> dict[str, str]:
    """By layer, the first later layer through which all goes that it makes."""
    order = [BATCH, *(layer.name for layer in profile.layers)]
    place = {name: i for i, name in enumerate(order)}
    last = len(order) - 1
    join = [last] * len(order)
    for i in reversed(range(last)):
        first, *others = (place[name] for name in profile.readers[order[i]])
        for other in others:
            while first != other:
                if first < other:
                    first = join[first]
                else:
                    other = join[other]
        join[i] = first
    return {order[i]: order[join[i]] for i in range(last)}


def _between(
    profile: LayerProfile, joins: dict[str, str], start: str, end: str | None
) -> tuple[Item, ...]:
    """The items after `start` and before `end`; to the last one where `end` is None."""
    items = []
    at = start
    while at in joins and joins[at] != end:
        join = joins[at]
        layer = profile.layers[profile.index[join]]
        branches = tuple(
            () if reader == join else _branch(profile, joins, reader, join)
            for reader in profile.readers[at]
        )
        sources = {branch[-1].layer.name if branch else at for branch in branches}
        if sources != {read.source for read in layer.reads}:
            raise OptionError(
                f"layer {join} of {profile.name} reads {sorted(r.source for r in layer.reads)}, "
                f"but the branches from {at or 'the batch'} end in {sorted(sources)}; merge layers "
                "that read across branches into one"
            )
        items.append(Item(layer, branches))
        at = join
    return tuple(items)


def _branch(profile: LayerProfile, joins: dict[str, str], first: str, end: str) -> tuple[Item, ...]:
    """A branch that begins with layer `first` and ends before `end`."""
    layer = profile.layers[profile.index[first]]
    if len(layer.reads) > 1:
        raise OptionError(
            f"layer {first} of {profile.name} joins a branch with one that began elsewhere; merge "
            "layers that read across branches into one"
        )
    return (Item(layer, ((),)), *_between(profile, joins, first, end))


def _count(item: Item) -> int:
    return 1 + sum(_count(inner) for branch in item.branches for inner in branch)
