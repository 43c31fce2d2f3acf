"""What a step raises itself comes out as eager raises it, with the line, and nothing is updated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.errors import CaptureError
from tests.support.raising_losses import LOSSES, caught_in_the_step

Loss = Callable[[Any, Tensor], Any]


def raised(loss_of: Loss, *, compiled: bool) -> BaseException:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    if compiled:
        step = torch.compile(step, backend="cotrain", options={"quiet": True})
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        step(torch.ones(2, 4))
    assert all(map(torch.equal, model.parameters(), before))
    return caught.value


@pytest.mark.parametrize("loss_of", LOSSES)
def test_it_is_the_error_of_eager(loss_of: Loss) -> None:
    eager, found = raised(loss_of, compiled=False), raised(loss_of, compiled=True)
    assert type(found) is type(eager)
    assert str(found) == re.sub(r" \(/.*\)$", "", str(eager))  # without the module's file
    assert vars(found).keys() - {"__notes__"} == vars(eager).keys()
    line = loss_of.__code__.co_firstlineno
    (note,) = found.__notes__
    place = re.match(r"(.*):(\d+) in (\w+): ", note)
    assert place is not None
    assert place[1] == loss_of.__code__.co_filename
    assert line < int(place[2]) < line + 5
    assert place[3] == loss_of.__name__


def test_a_function_that_is_called_with_too_few_arguments() -> None:
    def two(a: Any, b: Any) -> Any:
        return a + b

    found = raised(lambda model, x: two(model(x)), compiled=True)  # type: ignore[call-arg]
    assert type(found) is TypeError
    assert re.search(r"two\(\).*missing.*b", str(found))


def test_the_step_may_catch_what_it_raises() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        raised(caught_in_the_step, compiled=True)


def test_shapes_that_do_not_fit_are_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    found = raised(lambda model, x: model(x) @ torch.ones(3, 3), compiled=True)
    assert isinstance(found, CaptureError)
    assert "2" in str(found)
    assert capfd.readouterr().err == ""
