"""`torch.inference_mode` in a step gives eager's numbers, and leaves the process whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.errors import CaptureError

Reference = Callable[[nn.Module, Tensor], Tensor]
OUTSIDE = torch.inference_mode()


def in_a_with_block(reference: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return reference(x[:, :4])  # type: ignore[no-any-return]


def by_a_named_mode(reference: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(mode=True):
        return reference(x[:, :4])  # type: ignore[no-any-return]


def switched_off_within_no_grad(reference: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.inference_mode(False):
        assert torch.is_grad_enabled()
        return reference(x[:, :4])  # type: ignore[no-any-return]


def made_outside(reference: nn.Module, x: Tensor) -> Tensor:
    with OUTSIDE:
        return reference(x[:, :4])  # type: ignore[no-any-return]


def written_in_place(reference: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        out: Tensor = reference(x[:, :4])
        out[0].mul_(2)
    return out.clone()


@torch.inference_mode()
def decorated(reference: nn.Module, x: Tensor) -> Tensor:
    return reference(x[:, :4])  # type: ignore[no-any-return]


def train(reference_of: Reference, compiled: bool, made: Any = torch.no_grad) -> list[float]:
    """The losses of three steps towards a reference model that was made under `made`."""
    torch.manual_seed(0)
    policy = nn.Linear(4, 4)
    with made():
        reference = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (policy(x[:, :4]) - reference_of(reference, x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    if compiled:
        step = torch.compile(step, backend="cotrain", options={"quiet": True})
    return [float(step(torch.ones(2, 5))) for _ in range(3)]


@pytest.mark.parametrize(
    "reference_of",
    [
        in_a_with_block,
        by_a_named_mode,
        switched_off_within_no_grad,
        made_outside,
        written_in_place,
        decorated,
    ],
)
def test_the_numbers_are_those_of_eager(reference_of: Reference) -> None:
    assert train(reference_of, True) == pytest.approx(train(reference_of, False), rel=1e-6)
    assert (torch.ones(2) + 1).tolist() == [2, 2]


def test_a_reference_model_made_in_inference_mode_is_read() -> None:
    expected = train(in_a_with_block, False, torch.inference_mode)
    found = train(in_a_with_block, True, torch.inference_mode)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_call_within_it_is_told_why_there_is_no_gradient() -> None:
    with torch.inference_mode(), pytest.raises(CaptureError, match=r"around the call of the step"):
        train(in_a_with_block, True)
    assert train(in_a_with_block, True) == pytest.approx(train(in_a_with_block, False), rel=1e-6)
