"""What ranks do whose layers have widths: the example, and a GPT-2 in residual layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import cotrain_compile
from cotrain_compile.errors import CotrainError, DistributeError
from tests.support.example_scripts import example
from tests.support.pipelines import STEPS, Trained, loss_of, made, tokens

LAYERS = "model.transformer.h"


def trained_example(rank: int, folder: Path) -> Any:
    code = example("burst")
    return code.train(code.WIDTHS, 3, folder / "model.pt")


def trained_gpt2(rank: int, widths: dict[str, int]) -> Trained:
    model = made("gpt2")
    wide = cotrain_compile.burst(model, widths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        losses.append(wide.backward(loss_of, *tokens(step)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, model.state_dict())


def sums_begun(rank: int) -> tuple[int, int]:
    """How many sums have begun when the first layer gets its gradient, and in all."""
    code = example("burst")
    model = code.make_model()
    wide = cotrain_compile.burst(model, code.WIDTHS)
    early: list[int] = []
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        first = next(model.parameters())
        first.register_hook(lambda gradient: early.append(sums.call_count))
        wide.backward(F.cross_entropy, *code.batch(0))
        return early[0], sums.call_count


def other_plans(rank: int) -> str:
    try:
        cotrain_compile.burst(example("burst").make_model(), {"0": 2, "2": 1 + rank // 2})
    except DistributeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fails_and_goes_on(rank: int, place: str) -> tuple[str, bool, list[float]]:
    """Rank 1 fails once in layer 1, in its forward or its backward; then all train.

    What this rank is told, whether it has a gradient then, and the losses of its steps.
    """
    code = example("burst")
    model = code.make_model()
    wide = cotrain_compile.burst(model, code.WIDTHS)

    def fail(*args: Any) -> None:
        raise ArithmeticError("a bad batch")

    layer = model[1]
    hooks = {
        "forward": layer.register_forward_hook,
        "backward": layer.register_full_backward_hook,
    }
    handle = hooks[place](fail) if rank == 1 else None
    told = "nothing"
    try:
        wide.backward(F.cross_entropy, *code.batch(0))
    except (ArithmeticError, CotrainError) as error:
        told = f"{type(error).__name__}: {error}"
    has_gradient = any(param.grad is not None for param in model.parameters())
    if handle is not None:
        handle.remove()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        losses.append(wide.backward(F.cross_entropy, *code.batch(number)))
        optimizer.step()
    return told, has_gradient, losses
