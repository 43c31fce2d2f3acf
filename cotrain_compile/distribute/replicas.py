"""Replicas: which parameters have to be the same on which ranks, and whether they are.

In: a step graph. An update keeps a parameter the same on some ranks if all that it is made of is:
the parameter itself, settings, and what these ranks have exchanged. What is not proved so, such as
a part of a sharded parameter, is a rank's own, and nobody compares it. Buffers are none: running
statistics are each rank's own until the next broadcast.

`digests` are of every bit, in one pass over the memory that asks for almost none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import fx

from cotrain_compile.dataflow import Role
from cotrain_compile.distribute.same_numbers import is_compared, numbers_compared
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.graph.collectives import group_name_of, is_collective, kind_of
from cotrain_compile.graph.random_ops import is_random

Ranks = frozenset[int]

# A parameter and what its updates keep are the same by induction; a number is compared when a step
# begins, whatever it comes with. A batch, buffer or gradient of an earlier call is a rank's own.
_SAME_AT_FIRST = (Role.PARAM, Role.OPTIMIZER_STATE, Role.HYPERPARAMETER)
# Their results are the same on every rank of the group.
_SAME_AFTER = ("all_reduce", "broadcast", "all_gather_into_tensor")
# Of a digest: how many columns are summed, the bytes of a word, and an odd number with mixed bits.
_COLUMNS, _WORD, _FACTOR = 1024, 8, 0x1E3779B97F4A7C15


def same_on(
    step: StepGraph, rank: int, world: Ranks, members: Callable[[str], Ranks]
) -> dict[str, Ranks]:
    """By name of each parameter that `step` updates, the ranks that have the same as `rank`.

    `world` are the ranks that run the step, all with the same ops and sizes; `members` says who is
    in a group. A parameter that is this rank's own is left out.
    """
    own = frozenset({rank})
    written = [(destination, value) for _, destination, value in writes(step.module.graph)]
    item_of, compared = step.input_of_node, numbers_compared(step)
    updated = {destination for destination, _ in written}
    # A frozen parameter may well differ by rank.
    same = {
        node: world
        if node in compared
        or (
            (role := item_of[node.name].role) in _SAME_AT_FIRST
            and (node in updated or role is not Role.PARAM)
        )
        else own
        for node in step.nodes
        if node.op == "placeholder"
    }
    while True:
        values = dict(same)
        for node in step.nodes:
            if node.op != "placeholder":
                values[node] = _after(node, values, own, world, members)
        found = {node: same[node] & values[value] for node, value in written if node in same}
        if all(same[node] == ranks for node, ranks in found.items()):
            break
        same |= found
    params = [(item_of[node.name], same[node]) for node in same if node in updated]
    return {
        item.name: ranks for item, ranks in params if item.role is Role.PARAM and len(ranks) > 1
    }


def first_apart(
    digests: Sequence[Mapping[str, int]],
    ranks_of: Mapping[str, Sequence[Sequence[int]]],
    ranks: Sequence[int],
) -> tuple[str, int, list[int]] | None:
    """The first parameter that is not the same on all ranks that have to have the same.

    With the first of these ranks, and those that differ from it. `digests` has those of each of
    `ranks`, and `ranks_of` by parameter who has the same as each.
    """
    of_rank = dict(zip(ranks, digests, strict=True))
    for name, each in ranks_of.items():
        for same in each:
            differing = [rank for rank in same if of_rank[rank][name] != of_rank[same[0]][name]]
            if differing:
                return name, same[0], differing
    return None


class Digests:
    """The digests of some tensors; those of a card are waited for by `read`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._of: dict[torch.device, tuple[list[str], torch.Tensor]] = {}
        devices: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            devices.setdefault(tensor.device, []).append(name)
        for device, names in devices.items():
            found = torch.stack([digest(tensors[name]) for name in names])
            self._of[device] = names, found

    def read(self) -> dict[str, int]:
        """The digests by name."""
        return {
            name: number
            for names, found in self._of.values()
            for name, number in zip(names, found.tolist(), strict=True)
        }


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that hangs on every bit of `tensor`, and where it is; on its device."""
    with torch.no_grad():
        values = tensor.detach()
        if not values.is_contiguous():
            values = _in_order_of_memory(values)
        found = torch.zeros((), dtype=torch.int64, device=values.device)
        for words in _words(values.reshape(-1)):
            found = found * _FACTOR + _digest_of_words(words)
        return found


def _in_order_of_memory(values: torch.Tensor) -> torch.Tensor:
    """A view of `values` without gaps, if there is one, else a copy."""
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).contiguous()


def _words(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The memory of `flat` as 64-bit words, then the bytes that are left over."""
    size = flat.element_size()
    per_word = max(1, _WORD // size)
    if flat.data_ptr() % _WORD or flat.storage_offset() * size % _WORD:
        flat = flat.clone()  # in a buffer of several parameters
    whole = flat.numel() - flat.numel() % per_word
    yield flat[:whole].view(torch.int64)
    if whole < flat.numel():
        yield flat[whole:].clone().view(torch.uint8).to(torch.int64)


def _digest_of_words(words: torch.Tensor) -> torch.Tensor:
    """Sums of columns, each weighted: no temporary of the size of `words`. Overflows wrap."""
    rows = words.numel() // _COLUMNS
    weights = _weights(words.device)
    whole = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    left = words[rows * _COLUMNS :]
    return (whole * weights).sum() * _FACTOR + (left * weights[: left.numel()]).sum()


@functools.lru_cache(8)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, the same everywhere."""
    numbers = [(2 * place + 1) * _FACTOR % 2**63 | 1 for place in range(_COLUMNS)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _after(
    node: fx.Node,
    values: Mapping[fx.Node, Ranks],
    own: Ranks,
    world: Ranks,
    members: Callable[[str], Ranks],
) -> Ranks:
    """The ranks that have the same result of `node`."""
    before = reduce(Ranks.__and__, (values[source] for source in node.all_input_nodes), world)
    if is_random(node) or (node.op == "get_attr" and not is_compared(node)):
        return own
    if not is_collective(node):
        return before
    group = members(group_name_of(node))
    if kind_of(node) not in _SAME_AFTER:
        return own
    if group <= before:
        return before
    # Of a mesh: what was the same along one dimension is so now along the other as well.
    is_mesh = group & before == own and len(group) * len(before) == len(world)
    return world if is_mesh else group
