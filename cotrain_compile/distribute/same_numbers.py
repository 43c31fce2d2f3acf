"""Same numbers: what ranks have to compute their updates with alike, and where they differ.

In: a step graph. Out: the numbers that it computes with and the settings of its optimizers, which
ranks exchange, and in words what differs. Where gradients are means over ranks, an update is the
same on every rank only if all that comes after the exchange is; what a rank does before it, such
as weighing its loss by its share of the tokens, is its own. Sizes, dimensions and offsets are not
compared: those of parts hang on the rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotrain_compile.dataflow import Phase, Role
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.graph.user_lines import user_line

_UPDATED = (Role.PARAM, Role.OPTIMIZER_STATE)
_GIVEN = (Role.HYPERPARAMETER, Role.BATCH)
# What schemas call arguments whose whole numbers are sizes, dimensions or offsets.
_COUNTS = ("int", "SymInt", "Optional[int]", "Optional[SymInt]")
_OPTIMIZER = "the optimizer"
# So many differences are told, and numbers of a table.
_TOLD, _FEW = 3, 8


@dataclass(frozen=True)
class Computed:
    """The numbers that an op computes with, and where the user wrote it."""

    op: str
    numbers: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class Numbers:
    """What a rank computes its step with.

    `settings` has by parameter and key the value in the group of the parameter, and which optimizer
    it is of. `after` are the numbers from the exchange of gradients to the updates, `before` all
    others.
    """

    settings: Mapping[tuple[str, str], str]
    after: tuple[Computed, ...]
    before: tuple[Computed, ...]

    @property
    def of_updates(self) -> str:
        """Equal for ranks that update alike."""
        return _digest((sorted(self.settings.items()), _alike(self.after)))

    @property
    def of_losses(self) -> str:
        """Equal for ranks whose forward and backward have the same numbers."""
        return _digest(_alike(self.before))


def numbers_of(step: StepGraph) -> Numbers:
    """The numbers of `step` on this rank."""
    shared = _shared_writes(step)
    updating = _updating(step, shared)
    after: list[Computed] = []
    before: list[Computed] = []
    for node in step.nodes:
        # A whole number before the exchange may be an offset of a part.
        found = tuple(_numbers(node, wholes=node in updating))
        if found:
            into = after if node in updating else before
            where = user_line(node.stack_trace) or f"op {node.name}"
            into.append(Computed(str(node.target), found, where))
    return Numbers(_settings(step, shared), tuple(after), tuple(before))


def settings_read(step: StepGraph) -> dict[str, int]:
    """The positions, by name, of the numbers among the inputs that shared updates read.

    As a learning rate that a scheduler changes, or what else of the user's has changed once: what
    gradients are clipped to, which comes with the batch. Of those that the step writes itself none.
    """
    updating = _updating(step, _shared_writes(step))
    written = {destination for _, destination, _ in writes(step.module.graph)}
    return {
        item.name: position
        for position, (item, node) in enumerate(zip(step.inputs, step.nodes, strict=False))
        if item.role in _GIVEN and node in updating and node not in written
    }


def numbers_compared(step: StepGraph) -> frozenset[fx.Node]:
    """Inputs of `step` that are the same number on every rank, or it ends: see `values_of`."""
    nodes = list(step.nodes)
    read = (nodes[position] for position in settings_read(step).values())
    return frozenset(node for node in read if _is_at_hand(node.meta.get("val")))


def values_of(settings: Mapping[str, int], inputs: Sequence[Any]) -> dict[str, str]:
    """What `settings` are in this step, those on a card left out: to read one waits for it."""
    values = {name: inputs[position] for name, position in settings.items()}
    return {name: _plain(_item(value)) for name, value in values.items() if _is_at_hand(value)}


def updates_apart(found: Sequence[Numbers], *, settings_alone: bool) -> list[str]:
    """In words, what ranks would not update alike; nothing where they do."""
    apart = _settings_apart([of_rank.settings for of_rank in found])
    if apart or settings_alone:
        return apart
    return _computed_apart([of_rank.after for of_rank in found])


def losses_apart(found: Sequence[Numbers]) -> list[str]:
    """In words, what differs before the exchange."""
    return _computed_apart([of_rank.before for of_rank in found])


def values_apart(found: Sequence[Mapping[str, str]]) -> list[str]:
    """In words, which settings of a step that runs differ."""
    names = dict.fromkeys(name for of_rank in found for name in of_rank)
    told = ((name, [of_rank.get(name, "none") for of_rank in found]) for name in names)
    return [f"{name} is {by_rank(values)}" for name, values in told if len(set(values)) > 1]


def by_rank(values: Sequence[str]) -> str:
    """`1.0 on rank 0 and 0.1 on ranks 1 and 2`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    told = (
        f"{value} on rank{'s' if len(which) > 1 else ''} {_listed(which)}"
        for value, which in ranks.items()
    )
    return _listed(list(told))


def first_few(told: Sequence[str]) -> str:
    """As many as are read, and how many more there are."""
    more = len(told) - _TOLD
    return "; ".join(told[:_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _settings_apart(found: Sequence[Mapping[tuple[str, str], str]]) -> list[str]:
    params: dict[str, list[str]] = {}
    for param, key in dict.fromkeys(entry for of_rank in found for entry in of_rank):
        values = [of_rank.get((param, key)) for of_rank in found]
        optimizers = {of_rank.get((param, _OPTIMIZER)) for of_rank in found}
        if len(set(values)) > 1 and (key == _OPTIMIZER or len(optimizers) == 1):
            told = f"{key} is {by_rank([value or 'none' for value in values])}"
            params.setdefault(told, []).append(param)
    return [f"{told} (for {_few(names)})" for told, names in params.items()]


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _computed_apart(found: Sequence[Sequence[Computed]]) -> list[str]:
    """Of each line the first difference; nothing behind one in which ranks have other ops."""
    told: dict[str, str] = {}
    for position in range(max(map(len, found))):
        here = [of_rank[position] if position < len(of_rank) else None for of_rank in found]
        if len({_alike(filter(None, [computed])) for computed in here}) > 1:
            where = next(computed.where for computed in here if computed is not None)
            values = [_told(computed) for computed in here]
            told.setdefault(where, f"{where} computes with {by_rank(values)}")
            if len({computed and computed.op for computed in here}) > 1:
                break
    return list(told.values())


def _told(computed: Computed | None) -> str:
    if computed is None:
        return "nothing more"
    return f"{', '.join(computed.numbers)} ({computed.op.removeprefix('aten.')})"


def _alike(computed: Iterable[Computed]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Without the lines: where each rank has a branch of its own, the numbers may be the same."""
    return tuple((each.op, each.numbers) for each in computed)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _shared_writes(step: StepGraph) -> list[tuple[fx.Node, fx.Node]]:
    """What updates parameters and states with something that came from other ranks."""
    roles = {item.node: item.role for item in step.inputs}
    shared = _reached(filter(is_collective, step.nodes), lambda node: node.users)
    return [
        (write, destination)
        for write, destination, value in writes(step.module.graph)
        if roles.get(destination.name) in _UPDATED and value in shared
    ]


def _updating(step: StepGraph, shared: Iterable[tuple[fx.Node, fx.Node]]) -> set[fx.Node]:
    """The nodes from the exchange on that have a part in the updates `shared`."""
    sources = _reached((write for write, _ in shared), lambda node: node.all_input_nodes)
    collectives = filter(is_collective, step.nodes)
    exchanged = _reached(collectives, lambda node: node.all_input_nodes)
    phases = step.phases
    return {
        node
        for node in sources
        if node not in exchanged or phases.get(node.name) is Phase.OPTIMIZER
    }


def _reached(
    nodes: Iterable[fx.Node], next_of: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    left = list(nodes)
    found = set(left)
    while left:
        new = [node for node in next_of(left.pop()) if node not in found]
        found.update(new)
        left += new
    return found


def _settings(
    step: StepGraph, shared: Iterable[tuple[fx.Node, fx.Node]]
) -> dict[tuple[str, str], str]:
    updated = {destination.name for _, destination in shared}
    found = {}
    for item in step.inputs:
        if item.node in updated and item.name in step.rules:
            rule = step.rules[item.name]
            found[item.name, _OPTIMIZER] = rule.optimizer.__name__
            found |= {(item.name, key): _plain(value) for key, value in rule.settings.items()}
    return found


def _plain(value: Any) -> str:
    """A setting as text that is equal on ranks where it is: of an object, its class alone."""
    match value:
        case None | bool() | int() | float() | complex() | str():
            return repr(value)
        case list() | tuple():
            return f"({', '.join(map(_plain, value))})"
        case dict():
            return f"{{{', '.join(f'{key}: {_plain(each)}' for key, each in value.items())}}}"
        case _:
            return type(value).__name__


def _is_at_hand(value: Any) -> bool:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
    is_plain = isinstance(value, int | float | torch.SymInt | torch.SymFloat)
    return is_plain or (is_one and value.device.type == "cpu")


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def is_compared(constant: fx.Node) -> bool:
    """Whether ranks compare a constant of the graph: a number, or a table of fractions.

    A table of whole numbers may be of offsets, which hang on the rank.
    """
    value = _constant(constant)
    is_table = type(value) is torch.Tensor and value.is_floating_point()
    return _is_at_hand(value) or (is_table and value.device.type == "cpu")


def _told_of(value: Any) -> str:
    """A constant as text that is equal on ranks where it is; of a long table a digest."""
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return repr(_item(value))
    if value.numel() <= _FEW:
        return repr(value.tolist())
    values = repr((value.shape, value.double().flatten().numpy().tobytes()))
    return f"a table of {value.numel()} numbers ({_digest(values)[:8]})"


def _constant(node: fx.Node) -> Any:
    return getattr(node.graph.owning_module, str(node.target), None)


def _numbers(node: fx.Node, *, wholes: bool) -> Iterator[str]:
    """The numbers among the arguments of a node, not those that say which part it takes.

    Whole ones only with `wholes`.
    """
    if node.op == "get_attr" and is_compared(node):
        yield _told_of(_constant(node))
    schema = getattr(node.target, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    types = {each.name: str(each.type) for each in arguments}
    named = dict(zip(types, node.args, strict=False)) | dict(node.kwargs)
    for name, value in named.items():
        yield from (repr(each) for each in _floats(value))
        if wholes and type(value) is int and types.get(name) not in _COUNTS:
            yield repr(value)


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _floats(each)
    elif type(value) is float:
        yield value
