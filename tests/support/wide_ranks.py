"""What ranks do whose layers have widths: the example, and a GPT-2 in residual layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import cotrain_compile
from cotrain_compile.errors import DistributeError
from tests.support.helped_ranks import example
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


def other_plans(rank: int) -> str:
    try:
        cotrain_compile.burst(example("burst").make_model(), {"0": 2, "2": 1 + rank // 2})
    except DistributeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
