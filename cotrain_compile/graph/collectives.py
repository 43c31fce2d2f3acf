"""Collectives: which nodes of a graph let the ranks of a process group exchange data.

A functional collective (`torch.ops._c10d_functional`) issues the exchange and returns at once;
`wait_tensor` makes what follows wait until its result is there, in the same memory.

Private torch API used: the names of the ops of `torch.ops._c10d_functional`, and what finds a
process group by its name. Reason: they are what every collective becomes in a trace, also
`torch.distributed.all_reduce` and what a DTensor does.
Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_WAIT = "wait_tensor"


def is_wait(node: fx.Node) -> bool:
    """Whether `node` waits for the result of a collective."""
    return _name(node) == _WAIT


def awaited_by(node: fx.Node) -> fx.Node | None:
    """The collective whose result `node` waits for, if it waits for one."""
    if not is_wait(node):
        return None
    begun = node.args[0]
    return begun if isinstance(begun, fx.Node) and is_collective(begun) else None


def is_collective(node: fx.Node) -> bool:
    """Whether `node` lets ranks exchange data; a wait for it is none."""
    return _name(node) not in ("", _WAIT)


def group_name_of(node: fx.Node) -> str:
    """The name of the process group of a collective, by which torch finds it in this process."""
    schema = node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    found = node.kwargs.get("group_name", None)
    if found is None and "group_name" in names and names.index("group_name") < len(node.args):
        found = node.args[names.index("group_name")]
    return str(found or "")


def group_numbers(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """By the name of each group that exchanges something in `nodes`, its place among them.

    Ranks in different rows of a mesh exchange the same in groups of other names.
    """
    names = dict.fromkeys(group_name_of(node) for node in nodes if is_collective(node))
    return {name: number for number, name in enumerate(names)}


def ranks_in(node: fx.Node) -> int:
    """How many ranks exchange something in a collective."""
    name: Any = group_name_of(node)  # a type of its own for checkers
    group = torch._C._distributed_c10d._resolve_process_group(name)
    return int(group.size())


def all_ranks() -> int:
    """How many processes train together."""
    return torch.distributed.get_world_size()


def kind_of(node: fx.Node) -> str:
    """What a collective is called, such as `all_reduce`."""
    return _name(node)


def copies_its_input(node: fx.Node) -> bool:
    """Whether a collective works on a copy: others read what they are given until the wait."""
    return _name(node) in ("all_reduce", "broadcast")


def stand_in(node: fx.Node) -> Callable[..., Any] | None:
    """What makes a result as large as that of a collective and asks no other rank; None: nothing.

    For a dry run, which a rank may have to end where others go on.
    """
    return _STAND_INS.get(_name(node))


def _gathered(part: torch.Tensor, ranks: int, *_: Any) -> torch.Tensor:
    return torch.cat([part] * ranks)


def _scattered(whole: torch.Tensor, how: str, ranks: int, *_: Any) -> torch.Tensor:
    del how
    return whole.chunk(ranks)[0].clone()


def _exchanged(rows: torch.Tensor, received: Sequence[int], *_: Any) -> torch.Tensor:
    return rows.new_zeros((sum(received), *rows.shape[1:]))


def _same(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "all_reduce": _same,
    "broadcast": _same,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_to_all_single": _exchanged,
}


def _name(node: fx.Node) -> str:
    """What a collective or wait is called, such as `all_reduce`; "" for all else."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") not in _NAMESPACES:
        return ""
    return str(node.target._opname)  # type: ignore[union-attr]
