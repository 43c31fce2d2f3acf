"""Ops that look at data to raise an error, and tensors without data: refused, with a way on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.errors import CaptureError, OptionError
from tests.support.steps import cotrain


def weight_after(
    solve: Callable[[Tensor, Tensor], Tensor], compile_with: Callable[..., Callable[[], None]]
) -> Tensor:
    weight = nn.Parameter(torch.eye(2) * 2)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        solve(weight, torch.ones(2, 2)).square().sum().backward()
        optimizer.step()

    compile_with(step)()
    return weight


@pytest.mark.parametrize(
    ("solve", "name", "instead"),
    [
        (torch.linalg.solve, "solve", lambda a, b: torch.linalg.solve_ex(a, b)[0]),
        (lambda a, b: torch.linalg.inv(a) @ b, "inv", lambda a, b: torch.linalg.inv_ex(a)[0] @ b),
        (
            lambda a, b: torch.linalg.cholesky(a) @ b,
            "cholesky",
            lambda a, b: torch.linalg.cholesky_ex(a)[0] @ b,
        ),
    ],
)
def test_an_op_that_raises_by_its_data_has_one_that_does_not(
    solve: Callable[[Tensor, Tensor], Tensor],
    name: str,
    instead: Callable[[Tensor, Tensor], Tensor],
) -> None:
    advice = rf"{__file__}:.*torch\.linalg\.{name}_ex\(\.\.\.\)\[0\]"
    with pytest.raises(CaptureError, match=advice):
        weight_after(solve, cotrain())
    expected = weight_after(solve, lambda step: step)
    assert torch.equal(weight_after(instead, cotrain(host_kernels="captured")), expected)


@pytest.mark.parametrize("older", [Tensor.inverse, torch.inverse, torch.cholesky])
def test_older_names_of_such_an_op_are_refused_as_well(older: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"torch\.linalg\.\w+_ex"):
        weight_after(lambda a, b: older(a) @ b, cotrain())


def test_an_op_of_the_users_may_be_called_as_one_that_raises() -> None:
    @torch.library.custom_op("cotrain_tests::solve", mutates_args=())
    def solve(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    solve.register_fake(lambda a, b: torch.empty_like(a))
    solve.register_autograd(lambda _, grad: (grad, None))
    expected = weight_after(torch.ops.cotrain_tests.solve, lambda step: step)
    assert torch.equal(weight_after(torch.ops.cotrain_tests.solve, cotrain()), expected)


@pytest.mark.parametrize("batch_on", ["meta", "cpu"])
def test_a_model_on_meta_gets_memory_and_values_first(batch_on: str) -> None:
    model = nn.Linear(2, 1, device="meta")

    def train() -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        device = batch_on if model.weight.is_meta else "cpu"
        loss: Tensor = cotrain()(step)(torch.ones(3, 2, device=device))
        return loss

    with pytest.raises(OptionError, match=r"model\.to_empty\(device=\.\.\.\)"):
        train()
    model.to_empty(device="cpu")
    model.reset_parameters()
    assert train().isfinite()


def test_an_embedding_that_scales_its_rows_is_told_how_to_in_the_step() -> None:
    words = nn.Embedding(4, 2, max_norm=0.1)
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        words(x).sum().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"leave max_norm out.*index_copy_\(0, rows"):
        cotrain()(step)(torch.tensor([0, 2]))
