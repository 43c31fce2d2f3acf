"""Job: what readers know a step by. A StepGraph in, the names of its model and batch out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from cotrain_compile.dataflow import Job, Role
from cotrain_compile.graph import StepGraph

# Wrap a model without being one.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")


def job_of(step: StepGraph) -> Job:
    """The class of the outermost module that most ops are in, and the shapes of the batch."""
    models = Counter(_outermost(step))
    batch = {
        item.name: tuple(map(_hint, value.shape))
        for node in step.nodes
        if node.op == "placeholder"
        and (item := step.input_of_node[node.name]).role is Role.BATCH
        and isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    return Job(next((name for name, _ in models.most_common(1)), ""), batch)


def _outermost(step: StepGraph) -> Iterator[str]:
    """By op, the class of the model that called it."""
    for node in step.nodes:
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
            if name not in _WRAPPERS:
                yield name
                break


def _hint(size: int | torch.SymInt) -> int:
    """A size for the traced shapes, without fixing a dynamic one."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
