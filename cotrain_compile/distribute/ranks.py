"""Ranks: how many processes train together, and whether a step exchanges anything with them.

From which torch on a step can hold what they share, and what of it all have to issue alike.

Private torch API used: `_resolve_process_group`, which no public function is. Tried on torch
2.13.0.

In order: exchanges that a backward begins, in one order on all ranks.

Autograd makes gradients in an order of its own, and ranks have to issue their exchanges alike: each
waits for its own gradients, and for the exchange before it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.torch_version import TorchVersion

from cotrain_compile.dataflow import Role
from cotrain_compile.errors import DistributeError
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.collectives import group_numbers, is_collective

# Dynamo of torch 2.11 takes no DTensor as a leaf that a gradient is computed for.
_FIRST_WITH_DTENSORS = "2.13"


def why_no_dtensor_steps() -> str | None:
    """Why this torch cannot trace a step with sharded parameters; None where it can."""
    if TorchVersion(torch.__version__) >= _FIRST_WITH_DTENSORS:
        return None
    return (
        f"sharded parameters need torch {_FIRST_WITH_DTENSORS} or newer, and this is "
        f"{torch.__version__}: its Dynamo cannot trace the gradients of a DTensor; install a newer "
        "torch, or train with DistributedDataParallel"
    )


def require_dtensor_steps() -> None:
    """Raise `DistributeError` where this torch cannot trace a step with sharded parameters."""
    why = why_no_dtensor_steps()
    if why is not None:
        raise DistributeError(why)


def count_of_ranks() -> int:
    """The ranks of the default process group; 1 where none is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# Functions whose ranks exchange what has to be exchanged before and after them, with the ranks.
_exchange_outside: dict[CodeType, tuple[int, ...]] = {}


def note_exchanges_outside(code: CodeType, ranks: tuple[int, ...]) -> None:
    """`ranks` run a function of this `code`; all train together, though it may exchange nothing."""
    _exchange_outside[code] = ranks


def ranks_that_run(code: CodeType | None) -> tuple[int, ...]:
    """Those that run the function of this `code`: all, if nothing else is noted."""
    noted = _exchange_outside.get(code) if code else None
    return noted or tuple(range(dist.get_world_size()))


# Functions whose ranks are meant to get batches of other sizes, and weigh their losses by them.
_unequal_batches: set[CodeType] = set()


def note_unequal_batches(code: CodeType) -> None:
    """Ranks that run a function of this `code` may have batches of different sizes."""
    _unequal_batches.add(code)


def warn_where_ranks_train_apart(step: StepGraph, code: CodeType | None = None) -> None:
    """Warn where there are several ranks, and each would train a model of its own.

    `code` is the user's function.
    """
    ranks = count_of_ranks()
    if code in _exchange_outside:
        return
    if ranks > 1 and not any(map(is_collective, step.nodes)):
        warnings.warn(
            f"cotrain: a process group of {ranks} ranks is initialised, but the step exchanges "
            "nothing with the other ranks: each trains a model of its own. Wrap the model, "
            "model = torch.nn.parallel.DistributedDataParallel(model), and call that in the step; "
            "or reduce the gradients in the step, after backward() (torch.distributed.all_reduce)",
            stacklevel=2,
        )


def signature_of_step(step: StepGraph, code: CodeType | None = None) -> str:
    """Equal for steps that issue the same collectives, on batches of the same shape.

    What a rank does between them may differ, as with parts of unequal size, which each pads or
    slices in its own way; so may its batch, where that is noted for `code`, the user's function.
    """
    lines = [f"{item.name} {item.role}" for item in step.inputs]
    groups = group_numbers(step.nodes)
    lines += [_exchanged(node, groups) for node in step.nodes if is_collective(node)]
    if code not in _unequal_batches:
        lines.append(told_of_step(step))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _exchanged(collective: fx.Node, groups: Mapping[str, int]) -> str:
    """What all ranks have to issue alike: the collective, its settings, and its result's shape."""
    value = collective.meta.get("val")
    result = (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None
    settings = [
        groups.get(item, item) if isinstance(item, str) else item
        for item in collective.args
        if not isinstance(item, fx.Node | list | tuple)
    ]
    return f"{collective.target} {settings} {result}"


def told_of_step(step: StepGraph) -> str:
    """What tells steps apart, in words."""
    exchanges = sum(map(is_collective, step.nodes))
    batch = [
        f"{item.name} {tuple(value.shape)}"
        for item, node in zip(step.inputs, step.nodes, strict=False)
        if item.role is Role.BATCH and isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    return f"{exchanges} collectives, batch {', '.join(batch) or 'none'}"


def members_of(group_name: str) -> tuple[int, ...]:
    """The ranks of the process group of that name."""
    name: Any = group_name  # a type of its own for checkers
    group = torch._C._distributed_c10d._resolve_process_group(name)
    return tuple(sorted(dist.get_process_group_ranks(group)))


def groups_apart(groups: Mapping[int, Sequence[Sequence[int]]]) -> str:
    """Of ranks with the same exchanges, in words, the first that two of them do not share."""
    for rank, own in groups.items():
        for place, members in enumerate(own):
            for other in members:
                if groups[other][place] != members:
                    return (
                        f"rank {rank} exchanges with ranks {list(members)} what rank {other} "
                        f"exchanges with {list(groups[other][place])}"
                    )
    return ""


@contextmanager
def calls_in_order(
    groups: Sequence[Sequence[torch.Tensor]], begin_next: Callable[[], None]
) -> Iterator[None]:
    """Within it, `begin_next` is called for each of `groups` of parameters, one after the other.

    It is when a backward has made the gradients of the group and of those before it; not for those
    whose gradients it does not make.
    """
    missing = [{id(param) for param in group} for group in groups]
    begun = 0

    def note(param: torch.Tensor) -> None:
        nonlocal begun
        for group in missing:
            group.discard(id(param))
        while begun < len(missing) and not missing[begun]:
            begun += 1
            begin_next()

    params = dict.fromkeys(param for group in groups for param in group)
    handles = [param.register_post_accumulate_grad_hook(note) for param in params]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
