"""The step that is written for a configuration trains, compiled, as it does in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from cotrain_compile.migrate.counterparts import Optimizer, Precision, Training
from cotrain_compile.migrate.read import step_text

ADAM = Optimizer("torch.optim.AdamW", {"lr": 0.01, "betas": [0.9, 0.95]})
TRAININGS = {
    "plain": Training(ADAM),
    "clipped, in micro-batches, autocast": Training(
        ADAM, precision=Precision.AUTOCAST_BF16, micro_batches=4, clip=0.1
    ),
}


def trained(text: str, model: torch.nn.Module) -> list[float]:
    """Losses of three calls of the step in `text`, on `model`, with batches of it."""
    batches = [torch.linspace(-1, 1, 24).reshape(3, 8) * (i + 1) for i in range(4)]
    names: dict[str, Any] = {"model": model, "loss_of": lambda model, x: model(x).square().mean()}
    exec(text, names)
    given = batches if "for batch in batches" in text else batches[0]
    return [float(names["step"](given).detach()) for _ in range(3)]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_written_step_trains_as_in_eager(name: str) -> None:
    text = step_text(TRAININGS[name]).replace('autocast("cuda"', 'autocast("cpu"')
    eager = text[: text.rindex("step = torch.compile")]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    other = copy.deepcopy(model)
    compiled = trained(text, model)
    assert compiled == pytest.approx(trained(eager, other), rel=1e-2)
    assert compiled[0] > 1.02 * compiled[-1]
