"""Models of Hugging Face, in checkpoints or not, train in parts as whole, up to rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import streamed
from cotrain_compile.placement.schedule.schedule import schedule
from tests.support.captured_steps import Training, captured_training, place_step
from tests.support.steps import CASES, OPTIMIZERS, Case

# The kinds of their regions, with windows: of a layer in checkpoints both forwards are of one.
PLAIN = {
    "llama": {("attention", 2), ("mlp", 2), ("loss", 1)},
    "gpt2": {("mlp", 2), ("loss", 1)},
    "bert": {("mlp", 2), ("loss", 1)},
}
CHECKPOINTED = {
    "llama": {("attention", 1), ("attention", 2), ("mlp", 1), ("loss", 1)},
    "gpt2": {("mlp", 1), ("loss", 1)},
    "bert": {("mlp", 1), ("loss", 1)},
}
IN_EVERY_RUN = {("llama", True)}
CELLS = [(name, checkpoints) for name in PLAIN for checkpoints in (False, True)]


def case_of(name: str, checkpoints: bool) -> Case:
    case = CASES[name]

    def make_model() -> nn.Module:
        model: Any = case.make_model()
        name = "activation_checkpointing_enable"  # an older one has "gradient_..." alone
        if checkpoints:
            (getattr(model, name, None) or model.gradient_checkpointing_enable)(
                {"use_reentrant": False}
            )
        return model  # type: ignore[no-any-return]

    return Case(make_model, case.make_batch, case.loss_of)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    ("name", "checkpoints"),
    [pytest.param(*cell, marks=() if cell in IN_EVERY_RUN else pytest.mark.long) for cell in CELLS],
)
def test_a_model_in_parts_trains_as_the_whole(name: str, checkpoints: bool, parts: int) -> None:
    step = captured_training(Training(case_of(name, checkpoints), OPTIMIZERS["sgd"]))
    regions = step.dataflow.regions
    kinds = (CHECKPOINTED if checkpoints else PLAIN)[name]
    assert {(region.kind, len(region.windows)) for region in regions} == kinds
    splits = {region.name: min(parts, region.length) for region in regions}
    problem = step.problem()
    plan = schedule(problem, replace(streamed(step.dataflow), splits=splits))
    check(problem, plan)
    expected = step.train(lambda inputs: step.step.module(*inputs))
    found = step.train(place_step(step, plan))
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
