"""Versions: from which torch on a step can hold what several ranks share."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from cotrain_compile.errors import DistributeError

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
