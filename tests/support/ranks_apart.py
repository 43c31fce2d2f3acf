"""Steps that one of two ranks alone compiles anew, cannot compile, or fails in; then both go on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile.errors import CotrainError, OutOfDeviceMemory
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.meter import MemoryMeter


def in_turn(rank: int) -> dict[str, tuple[str, str]]:
    """By what happens on rank 1 alone, the error of this rank, and what kind it is.

    Between them both ranks train, with equal parameters at the end.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor, selects: bool = False) -> Tensor:
        optimizer.zero_grad()
        chosen = x[x > 0].sum() if selects else x.sum()
        loss = F.cross_entropy(model(x), y) + 0 * chosen
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = torch.compile(step, backend="cotrain", options={"quiet": True}, dynamic=False)
    found = {}

    def attempt(what: str, size: int = 4, *more: Any) -> None:
        before = [param.detach().clone() for param in model.parameters()]
        try:
            run(torch.full((size, 8), 1.0 + rank), torch.zeros(size, dtype=torch.long), *more)
        except CotrainError as error:
            found[what] = type(error).__name__, str(error)
            assert all(map(torch.equal, before, model.parameters())), what
        else:
            found[what] = "", ""

    attempt("first")
    attempt("a new shape", 7 if rank else 4)
    attempt("after a new shape")
    attempt("other shapes", 5 + rank)
    attempt("after other shapes")
    attempt("a refusal", 4, *([True] if rank else []))
    attempt("after a refusal")
    with mock.patch.object(MemoryMeter, "count", _too_little if rank else MemoryMeter.count):
        attempt("out of memory")
    attempt("after out of memory")
    with mock.patch.object(MemoryMeter, "count", _too_little_in_backward):
        attempt("both in the backward")
    attempt("after both in the backward")
    of_all = [torch.empty_like(model.module[0].weight) for _ in range(2)]
    torch.distributed.all_gather(of_all, model.module[0].weight.detach())
    assert torch.equal(*of_all)
    return found


_count = MemoryMeter.count


def _too_little(self: MemoryMeter, storage: Any, tier: Tier, name: str, nbytes: int) -> None:
    if name.startswith("addmm"):
        raise OutOfDeviceMemory("for once there is too little", tier=tier)
    _count(self, storage, tier, name, nbytes)


def _too_little_in_backward(
    self: MemoryMeter, storage: Any, tier: Tier, name: str, nbytes: int
) -> None:
    if name.startswith("all_reduce_1"):
        raise OutOfDeviceMemory("for once there is too little", tier=tier)
    _count(self, storage, tier, name, nbytes)
