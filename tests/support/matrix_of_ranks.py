"""Every way to share a model x memory x optimizer x way to train, on several ranks.

A `Cell` is one of them; `problems` runs many on a rank, one after the other, as a start of ranks is
slow, and says what is wrong with each.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cotrain_compile.errors import CotrainError
from tests.support.sharded_training import Trained, Training, furthest, part_of_batch, train

SHARED = ("ddp", "fully_shard", "shard", "replicas of fully_shard", "tensor parallel")
# Whose layers are split; the latter needs an even number of ranks.
SPLIT = ("tensor parallel", "sharded tensor parallel")
OPTIMIZERS = ("sgd", "adam", "adamw", "nadam", "rmsprop", "adagrad")
WAYS = ("plain", "clipped", "accumulated", "autocast", "scaled")
MEMORIES = ("resident", "budget", "again")
# Of parameters about 1. Compiled optimizers take bias corrections in float32; in bfloat16 eager may
# add up gradients in another order.
ROUNDING = {"autocast": 2e-3}
USUAL_ROUNDING = 1e-5
SHARE = 0.6


@dataclass(frozen=True)
class Cell:
    """`shared` is how the model is shared; `memory` is "resident", or less.

    With "budget" and "again" it is the part `SHARE` of what the resident step takes; with "again" a
    block makes its values again for the backward, and leaves the same bits.
    """

    shared: str
    memory: str
    optimizer: str
    way: str

    def training(self) -> Training:
        """The step in eager, where nothing needs to be made again: numbers are the same."""
        way = self.way
        if self.shared in SPLIT and way == "clipped":
            way = "clipped together"  # torch takes no norm of tensors that are shared in two ways
        return Training(self.shared, way, self.optimizer, bare=True)


def _exists(cell: Cell) -> bool:
    """In eager a GradScaler takes no gradients of tensors that are shared in two ways."""
    return cell.shared not in SPLIT or cell.way != "scaled"


_EVERY = itertools.starmap(Cell, itertools.product(SHARED, MEMORIES, OPTIMIZERS, WAYS))
ALL = [cell for cell in _EVERY if _exists(cell)]


def sample(count: int, first: int = 0) -> list[Cell]:
    """`count` cells, of which neighbours differ in every dimension."""
    stride = 101  # shares no factor with the number of cells
    return [ALL[(first + number) * stride % len(ALL)] for number in range(count)]


def alike(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells that differ in their memory alone, together."""
    found: dict[Training, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.training(), []).append(cell)
    return list(found.values())


def problems(rank: int, cells: Sequence[Cell]) -> dict[Cell, str]:
    """What is wrong with each cell on this rank; "" where nothing is.

    Cells that differ in their memory alone have one step in eager and one with everything on the
    device, which tells their budget.
    """
    found: dict[Cell, str] = {}
    for those in alike(cells):
        training = those[0].training()
        try:
            of_memory = _of_memories(rank, training, {cell.memory for cell in those})
            found |= {cell: of_memory[cell.memory] for cell in those}
        except CotrainError as error:
            found |= dict.fromkeys(those, f"{type(error).__name__}: {error}")
    return found


def _of_memories(rank: int, training: Training, memories: Collection[str]) -> dict[str, str]:
    """What is wrong with a step in each of `memories`."""
    at = part_of_batch(training.model, rank)
    eager = train(at, training)
    resident = _compiled(at, training, {"policy": "resident"})
    wrong = _apart(resident, eager, ROUNDING.get(training.way, USUAL_ROUNDING))
    found = {"resident": wrong and f"resident, of eager: {wrong}"}
    budget = _budget(resident)
    options = {"memory_budget": budget, "policy": "greedy", "host_kernels": "captured"}
    for memory in set(memories) - {"resident"}:
        placed = _compiled(at, replace(training, checkpointed=memory == "again"), options)
        found[memory] = found["resident"] or _of_placed(placed, resident, budget)
    return found


def _budget(resident: Trained) -> int:
    """The same on all ranks."""
    peak_bytes = torch.tensor(resident.predicted_peak)
    dist.all_reduce(peak_bytes, dist.ReduceOp.MAX)
    return int(SHARE * int(peak_bytes))


def _compiled(rank: int, training: Training, options: Mapping[str, object]) -> Trained:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # A kernel that takes a few bytes for itself passes a plan of few kilobytes.
        warnings.filterwarnings("ignore", "cotrain: a dry run", UserWarning)
        return train(rank, replace(training, options=options))


def _of_placed(placed: Trained, resident: Trained, budget: int) -> str:
    if wrong := _apart(placed, resident, 0.0):
        return f"placed, of resident: {wrong}"
    if placed.measured_peak > budget:
        return f"took {placed.measured_peak} of {budget} bytes"
    return "" if placed.plan["transfers"] else f"nothing is moved: {placed.plan}"


def _apart(found: Trained, expected: Trained, most: float) -> str:
    by = furthest(found, expected)
    return "" if by <= most else f"parameters differ by {by:.1e} of their largest element"
