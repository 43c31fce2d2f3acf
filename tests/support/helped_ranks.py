"""What ranks do whose gradients CPU helpers sum too; the last one helps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cotrain_compile
from cotrain_compile.errors import DistributeError
from tests.support.example_scripts import example

HELPERS = 1


def mixed_model() -> nn.Module:
    """Parameters of two types, one of them in many parts, one of them not contiguous."""
    return nn.ParameterList(
        [
            nn.Parameter(torch.zeros(13, 17).t()),
            nn.Parameter(torch.zeros(5, dtype=torch.float64)),
            nn.Parameter(torch.zeros(301)),
        ]
    )


def integers(
    rank: int, helpers: int = HELPERS, devices_a_machine: int = 1
) -> tuple[list[torch.Tensor], list[torch.Tensor], int, int]:
    """Means of whole-numbered gradients by helpers and by all-reduce, bytes counted and planned."""
    model = mixed_model()
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    with cotrain_compile.cpu_helpers(
        model, helpers, chunk_bytes=64, devices_a_machine=devices_a_machine
    ) as exchange:
        if exchange.helps:
            exchange.serve()
        else:
            for param in params:
                drawn = torch.randint(-(2**20), 2**20, param.shape, generator=generator)
                param.grad = drawn.to(param.dtype)
            reduced = [param.grad.clone() for param in params if param.grad is not None]
            exchange.average_gradients()
    if exchange.helps:
        reduced = [torch.zeros_like(param).contiguous() for param in params]
    for tensor in reduced:
        dist.all_reduce(tensor)
    found = [param.grad for param in params if param.grad is not None]
    return (
        found,
        [tensor / exchange.workers for tensor in reduced],
        exchange.sent_bytes,
        exchange.planned_bytes,
    )


def beside_backward(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Means by an exchange beside the backward, and by all-reduce; what was sent before the first
    layer had its gradient, in all, and by the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    params = list(model.parameters())
    sent: list[int] = []
    with cotrain_compile.cpu_helpers(model, HELPERS, chunk_bytes=64) as exchange:
        if exchange.helps:
            exchange.serve()
        else:
            params[0].register_hook(lambda gradient: sent.append(exchange.sent_bytes))
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
            loss = model(x).square().mean()
            own = torch.autograd.grad(loss, params, retain_graph=True)
            sent.clear()
            with exchange.beside_backward():
                loss.backward()
    reduced = [torch.zeros_like(param) for param in params] if exchange.helps else list(own)
    for tensor in reduced:
        dist.all_reduce(tensor)
    means = [tensor / exchange.workers for tensor in reduced]
    found = [param.grad for param in params if param.grad is not None]
    return found, means, [*sent, exchange.sent_bytes, exchange.planned_bytes]


def ahead_of_forward(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Parameters after three steps whose updates are ahead of the next forward, and of one process;
    what was sent when the second forward came to each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    alone = copy.deepcopy(model)
    batches = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(1))

    def made(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    sent: list[int] = []
    with cotrain_compile.cpu_helpers(model, HELPERS, chunk_bytes=64) as exchange:
        if exchange.helps:
            exchange.serve()
        else:
            for layer in model:
                layer.register_forward_hook(lambda *_: sent.append(exchange.sent_bytes))
            for batch in batches:
                loss = model(batch[rank]).square().mean()
                with exchange.ahead_of_forward(model, made):
                    loss.backward()
            exchange.finish_updates()
    optimizer = made(list(alone.parameters()))
    for batch in batches:
        optimizer.zero_grad()
        alone(batch.flatten(0, 1)).square().mean().backward()
        optimizer.step()
    found, wanted = ([p.detach() for p in each.parameters()] for each in (model, alone))
    return found, wanted, sent[8:16]


def trained(rank: int, folder: Path) -> Any:
    return example("cpu_helpers").train(HELPERS, 3, folder / "model.pt")


def _told(run: Any) -> str:
    try:
        run()
    except (DistributeError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def one_fails(rank: int) -> str:
    """What each rank is told where rank 1 fails in its second step."""

    def run() -> None:
        model = nn.Linear(2, 2)
        with cotrain_compile.cpu_helpers(model, HELPERS) as exchange:
            if exchange.helps:
                exchange.serve()
                return
            for step in range(3):
                if rank == 1 and step == 1:
                    raise ArithmeticError("a bad batch")
                model(torch.ones(1, 2)).sum().backward()
                exchange.average_gradients()

    return _told(run)


def one_is_done_early(rank: int) -> str:
    def run() -> None:
        model = nn.Linear(2, 2)
        with cotrain_compile.cpu_helpers(model, HELPERS) as exchange:
            if exchange.helps:
                exchange.serve()
                return
            for _ in range(2 - rank):
                model(torch.ones(1, 2)).sum().backward()
                exchange.average_gradients()

    return _told(run)


def other_models(rank: int) -> str:
    return _told(lambda: cotrain_compile.cpu_helpers(nn.Linear(2, 2 + rank // 2), HELPERS))
