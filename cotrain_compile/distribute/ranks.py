"""Ranks: how many processes train together, and whether a step exchanges anything with them.

And from which torch on a step can hold what they share.
"""

from __future__ import annotations

import warnings
from types import CodeType

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from cotrain_compile.errors import DistributeError
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.collectives import is_collective

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


# Functions whose ranks exchange what has to be exchanged before and after them.
_exchange_outside: set[CodeType] = set()


def note_exchanges_outside(code: CodeType) -> None:
    """Ranks that run a function of this `code` train together, though it exchanges nothing."""
    _exchange_outside.add(code)


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
