"""What compiles again, as docs/training.md lists it, where no other test has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import cotrain_compile
from cotrain_compile.capture.dynamo.recompiles import why_again
from cotrain_compile.entry import compile_step as backend
from tests.support.captured_steps import make_lean_mlp
from tests.support.steps import SEED, Step, all_tensors, cotrain, cross_entropy, make_step, vectors

STEPS = 5


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


class Remembering(nn.Module):
    """Notes on itself what it was first called with, as Hugging Face's classifiers do."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.inner, self.kind = make_lean_mlp(), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "single_label"
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "expected"), [(None, 2), ("single_label", 1)])
def test_what_a_model_notes_in_its_first_step_compiles_once_more(
    kind: str | None, expected: int
) -> None:
    model = Remembering(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = cotrain()(make_step(model, [optimizer], cross_entropy))
    for _ in range(STEPS):
        step(*vectors())
    assert model.kind == "single_label"
    assert graphs() == expected


def test_a_second_compile_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = cotrain(policy="resident")(make_step(model, [optimizer], cross_entropy))

    def said(rows: int) -> str:
        x, y = vectors()
        step(x[:rows], y[:rows])
        told = [line for line in capsys.readouterr().err.splitlines() if "again" in line]
        return "".join(told)

    assert not said(8)
    optimizer.param_groups[0]["lr"] = 0.04
    assert "param_groups[0]['lr'] == 0.05` no longer holds" in said(8)
    model.eval()
    assert "training == True` no longer holds" in said(8)
    model[1].bias.requires_grad_(False)
    assert "requires_grad mismatch. expected requires_grad=1" in (last := said(8))
    assert "torch._dynamo" not in last
    assert "size mismatch at index 0. expected 8, actual 4" in said(4)
    assert not said(4)
    assert graphs() == 5


class Training:
    """A training whose step is a method, so that all of them run one code."""

    def __init__(self) -> None:
        model = make_lean_mlp()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.compute = make_step(model, [self.optimizer], cross_entropy)
        self.run = cotrain(policy="resident")(self.step)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.compute(x, y)
        return loss

    def graphs_with(self, *changing: str) -> list[int]:
        """How many graphs there are more after the first call, and after each setting changed."""
        found, before = [], graphs()
        self.run(*vectors())
        found.append(graphs() - before)
        for setting in changing:
            self.optimizer.param_groups[0][setting] *= 0.5
            self.run(*vectors())
            found.append(graphs() - before)
        return found


def test_what_has_changed_in_one_training_says_nothing_of_the_next_by_the_same_code() -> None:
    """Ranks that had trained before, in different ways, compiled the same step differently."""
    before = Training()
    assert before.graphs_with("weight_decay") == [1, 2]
    torch._dynamo.reset()
    # A memory of both would make all settings inputs in the second compile, the decay's.
    assert Training().graphs_with("lr", "weight_decay", "eps") == [1, 2, 3, 3]


@pytest.mark.long  # the story above forgets them, too
def test_settings_are_forgotten_where_dynamo_is_reset() -> None:
    training = Training()
    assert training.graphs_with("weight_decay") == [1, 2]
    torch._dynamo.reset()
    assert training.graphs_with("lr", "weight_decay", "eps") == [1, 2, 3, 3]


def test_a_term_that_comes_and_goes_compiles_once_for_each() -> None:
    def train(compile_with: Callable[[Step], Step]) -> dict[str, Any]:
        torch.manual_seed(SEED)
        model = make_lean_mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.0, foreach=False)
        step = compile_with(make_step(model, [optimizer], cross_entropy))
        for decay in (0.0, 0.1, 0.0, 0.1, 0.0):
            optimizer.param_groups[0]["weight_decay"] = decay
            x, y = vectors()
            step(x.double(), y)
        return all_tensors(model, [optimizer])

    torch.testing.assert_close(train(cotrain()), train(lambda step: step))
    assert graphs() == 2


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_step_that_counts_in_its_closure_is_found_again(lowering: str) -> None:
    model = make_lean_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    calls, last = 0, torch.zeros(())

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls, last
        calls += 1
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y) / calls
        loss.backward()
        optimizer.step()
        last = loss.detach()
        return loss

    run = cotrain(lowering=lowering)(step)
    first = run(*vectors())
    for _ in range(STEPS - 1):
        run(*vectors())
        assert cotrain_compile.inspect(run).measured is not None
    assert calls == STEPS
    assert last < first / 2  # divided by the number of calls, in compiled code too
    assert graphs() == 2


def test_a_guard_is_told_as_the_user_writes_it() -> None:
    guard = "G['model']._modules['h']._modules['0']._parameters['bias'].grad is None"
    assert why_again(guard) == "`model.h[0].bias.grad is None` no longer holds"


def test_slices_of_longer_and_longer_rows_are_planned_once() -> None:
    """A stride is none of the step's sizes where its ops run as they are."""
    torch._dynamo.reset()
    model = make_lean_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = cotrain()(make_step(model, [optimizer], cross_entropy))
    x, y = vectors()
    with mock.patch.object(backend, "compile_step", wraps=backend.compile_step) as planned:
        for longer in range(5):
            step(torch.randn(len(x), x.shape[1] + longer)[:, : x.shape[1]], y)
    assert planned.call_count == 2  # for its own strides, then for any
