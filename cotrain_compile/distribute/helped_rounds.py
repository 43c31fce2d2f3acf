"""Helped rounds: which gradients go together, who owns which of them, and who brings them.

In: a model, how many machines with workers and helpers there are. Out: rounds in the order in which
a backward makes gradients, and the places of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cotrain_compile.cluster.helpers import Chunk, Sharing, chunks_of, share
from cotrain_compile.distribute.meet import first_line
from cotrain_compile.errors import DistributeError, ExchangeFailed

# In the first half of the first round, and in the second half of the last, helpers only receive or
# only send: with so many rounds an exchange takes an eighth longer than the planner's.
ROUNDS = 8


@dataclass(frozen=True)
class Flat:
    """Gradients of one type that go in a round, and who owns which elements of them."""

    dtype: torch.dtype
    params: tuple[tuple[str, nn.Parameter], ...]
    sharing: Sharing
    chunks: tuple[Chunk, ...]
    number: int = 0

    @property
    def owned(self) -> list[int]:
        """How many elements each rank sums."""
        counts = [0] * (self.sharing.machines + self.sharing.helpers)
        for chunk in self.chunks:
            counts[chunk.owner] += chunk.nbytes // self.dtype.itemsize
        return counts

    @property
    def exchanged(self) -> list[nn.Parameter]:
        """The parameters of which some elements go in this round."""
        by_name = dict(self.params)
        return [by_name[name] for name in dict.fromkeys(chunk.layer for chunk in self.chunks)]

    def pieces(self) -> list[tuple[int, nn.Parameter, slice]]:
        """The elements of parameters, with their owners, those of one owner next to each other."""
        by_name = dict(self.params)
        size = self.dtype.itemsize
        return [
            (
                chunk.owner,
                by_name[chunk.layer],
                slice(chunk.begin // size, (chunk.begin + chunk.nbytes) // size),
            )
            for chunk in sorted(self.chunks, key=lambda chunk: chunk.owner)
        ]


@dataclass(frozen=True)
class Places:
    """Workers by machine, `each` of them a machine, and helpers behind them."""

    machines: int
    each: int
    helpers: int

    @property
    def workers(self) -> int:
        return self.machines * self.each

    def of_rank(self, rank: int) -> int:
        """The place among machines and helpers, as shares count them."""
        return rank // self.each if rank < self.workers else rank - self.workers + self.machines

    def carriers(self, number: int) -> list[int]:
        """The rank of each machine that brings the rounds of that number."""
        own = number % self.each
        return [machine * self.each + own for machine in range(self.machines)]

    def machine(self, number: int) -> list[int]:
        """The workers of a machine."""
        return list(range(number * self.each, (number + 1) * self.each))


def rounds_of(
    model: nn.Module, machines: int, helpers: int, helper_rate: float, chunk_bytes: int
) -> tuple[Flat, ...]:
    """The gradients of `model` in rounds, those of one type together, last parameters first.

    Raises `DistributeError` where nothing is trained.
    """
    by_type: defaultdict[torch.dtype, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, param in reversed(list(model.named_parameters())):
        if param.requires_grad and param.numel():
            by_type[param.dtype].append((name, param))
    if not by_type:
        raise DistributeError("the model has no parameters to train")
    flats: list[Flat] = []
    for dtype, params in by_type.items():
        sizes = [(name, param.numel() * dtype.itemsize) for name, param in params]
        sharing = share(machines, helpers, sum(size for _, size in sizes), 1.0, helper_rate)
        chunks = chunks_of(sizes, sharing, chunk_bytes)
        rounds = max(1, min(ROUNDS, sum(chunk.nbytes for chunk in chunks) // chunk_bytes))
        each = math.ceil(len(chunks) / rounds)
        flats += [
            Flat(dtype, tuple(params), sharing, chunks[first : first + each], len(flats) + number)
            for number, first in enumerate(range(0, len(chunks), each))
        ]
    return tuple(flats)


@dataclass(frozen=True)
class UnderWay:
    """An all-to-all that has begun, with what it reads and writes; no `work` where another worker
    of the machine brings it."""

    flat: Flat
    given: torch.Tensor
    output: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """What came."""
        if self.work is not None:
            with lost_ranks():
                self.work.wait()
        return self.output


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Errors of an exchange say that another rank is lost."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: BaseException) -> ExchangeFailed:
    return ExchangeFailed(
        f"another rank has died, hangs, or did not come to this exchange: {first_line(error)}. "
        "Look at the first error of the other ranks; start all ranks again from a checkpoint"
    )
