"""Divisions: what of the layers of a traced step several ranks can divide among them.

In: the ops of a layer. Out: a `Split`: which of its values and parameters are divided, and which
values ranks exchange. What that is in bytes and seconds follows at any size.

A value of the forward is whole on every rank, or divided. A product of a whole value with a weight
is divided by the columns of the weight; one of a divided value by its rows, so that its results are
parts of a sum: there ranks exchange (Shoeybi et al. 2019). What is made of divided values is
divided. A table of which rows are looked up is divided by rows, and is exchanged as a sum. Weights
that are small beside the largest of a layer, as a router's, are whole. In the backward an op is
divided that reads a divided value, and so is every product.

Experts are weights in a product of batches, or in a module of `experts`; what their first products
read is what ranks bring one another, and take back. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cotrain_compile.cluster.model.profiles import BySamples, Division
from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.machine.op_classes import ATTENTION, OpKind

# By how many ranks layers and experts may be divided where nobody knows their heads and experts.
MOST = 8
# A weight that is smaller than this part of the largest of its layer is whole on every rank.
_SMALL = 1 / 64

_PRODUCTS = frozenset({OpKind.PRODUCT, OpKind.BATCHED_PRODUCT})
_ALWAYS = _PRODUCTS | ATTENTION
_EXPERT = re.compile(r"(?:^|\.)experts(?:\.(\d+))?(?:\.|$)")


@dataclass
class Split:
    """Of a layer: values that are divided, parameters of which ranks have parts, those of experts,
    values that are `summed` in the forward, and those that are `dispatched` to experts.

    `derived` has the parameters that a value is made of alone, `numbers` those of experts.
    """

    step: Dataflow
    divided: set[str] = field(default_factory=set)
    params: set[str] = field(default_factory=set)
    expert_params: set[str] = field(default_factory=set)
    summed: list[str] = field(default_factory=list)
    dispatched: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)
    derived: dict[str, frozenset[str]] = field(default_factory=dict)

    def made_of(self, name: str) -> frozenset[str]:
        """The parameters that a value is, or is made of alone."""
        if self.step.buffer[name].role is Role.PARAM:
            return frozenset({name})
        return self.derived.get(name, frozenset())

    def shares(self, op: Op) -> bool:
        """Whether each rank does a part of an op of the forward or the backward."""
        return op.kind in _ALWAYS or not self.divided.isdisjoint(op.touched)


def split_layer(step: Dataflow, ops: Sequence[Op], params: Sequence[str]) -> Split:
    """Of the ops of a layer, in program order."""
    found = Split(step)
    largest = max((step.buffer[name].nbytes for name in params), default=0)
    for op in ops:
        if op.phase is Phase.FORWARD and op.writes:
            _read(found, op, largest * _SMALL)
    return found


def _read(found: Split, op: Op, small: float) -> None:
    """What an op of the forward makes of what it reads."""
    weights = [name for name in op.reads if found.made_of(name)]
    values = [name for name in op.reads if name not in weights]
    params = {name for weight in weights for name in found.made_of(weight)}
    if weights and not values:
        found.derived |= dict.fromkeys(op.writes, frozenset(params))
        return
    is_divided = any(name in found.divided for name in values)
    large = {name for name in params if found.step.buffer[name].nbytes >= small}
    if op.kind in _PRODUCTS and large:
        found.params |= params
        if _is_of_experts(found, op):
            found.expert_params |= large
            found.dispatched |= set() if is_divided else set(values)
        if is_divided:  # parts of a sum, which is whole behind an exchange
            found.summed += op.writes
        else:
            found.divided |= set(op.writes)
    elif op.kind is OpKind.TABLE and large:
        found.params |= params
        found.summed += op.writes
    elif is_divided:
        found.params |= params
        found.divided |= set(op.writes)


def _is_of_experts(found: Split, op: Op) -> bool:
    match = _EXPERT.search(op.module)
    if match and match[1]:
        found.numbers.add(match[1])
    return match is not None or op.kind is OpKind.BATCHED_PRODUCT


def divisions(
    found: Split, params: Sequence[str], tables: Callable[[str], BySamples], input_: BySamples
) -> tuple[Division | None, Division | None]:
    """By tensors and of experts, with what `figures_of` says at all sizes; None where there is
    nothing to divide.

    Where nothing is summed in the forward, what enters a layer is in the backward.
    """
    nbytes = {name: found.step.buffer[name].nbytes for name in params}
    all_params = sum(nbytes.values())
    if not all_params or not found.params:
        return None, None

    def of_all(names: set[str]) -> float:
        return sum(nbytes.get(name, 0) for name in names) / all_params

    def part(own: str, whole: str) -> float:
        """At the size in the middle."""
        middle = len(tables(own).figures) // 2
        most = tables(whole).figures[middle]
        return min(1.0, tables(own).figures[middle] / most) if most else 0.0

    times = len(found.summed)
    tensor = Division(
        MOST,
        seconds=part("shared_s", "all_s"),
        params=of_all(found.params),
        kept=part("kept_divided", "kept"),
        exchanged=tables("summed").times(1 / times) if times else input_,
        times=times or 1,
    )
    if not found.expert_params:
        return tensor, None
    most = len(found.numbers) or MOST
    dispatched = tables("dispatched")
    return tensor, Division(most, 0.0, of_all(found.expert_params), 0.0, dispatched)


def figures_of(
    found: Split,
    step: Dataflow,
    ops: Sequence[Op],
    kept: Sequence[str],
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Of the layer of `found` what `divisions` asks for, at the sizes of `step`."""
    return {
        "shared_s": sum(seconds[op.name] for op in ops if found.shares(op)),
        "all_s": sum(seconds[op.name] for op in ops),
        "kept_divided": sum(step.buffer[name].nbytes for name in kept if name in found.divided),
        "summed": sum(step.buffer[name].nbytes for name in found.summed),
        "dispatched": sum(step.buffer[name].nbytes for name in found.dispatched),
    }
