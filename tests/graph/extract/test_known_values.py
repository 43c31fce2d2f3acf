"""What a model's constructor reads of tensors, while a step is traced with nothing allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import cotrain_compile
from cotrain_compile.capture.offline.offline import LARGEST, KnownValues, skip_initialisation
from cotrain_compile.errors import CaptureError


@pytest.fixture
def known() -> Iterator[KnownValues]:
    """As while a model is built; `test_fake_cuda.py` has one that is built on a card."""
    with FakeTensorMode(), KnownValues() as values:
        yield values


class Branches(nn.Module):
    """As in a vision transformer: each branch is dropped at a rate of its own."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in rates)
        self.drops = [nn.Dropout(rate) for rate in rates]

    def forward(self, x: Tensor) -> Tensor:
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = x + drop(layer(x))
        return x


def test_a_model_whose_constructor_reads_rates_from_a_tensor_is_traced() -> None:
    read: list[float] = []

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        read[:] = [x.item() for x in torch.linspace(0, 0.5, 3)]
        model = Branches(read)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, (torch.randn(2, 4),)

    traced = cotrain_compile.trace(build)
    assert read == [0, 0.25, 0.5]
    assert sum("native_dropout.default" in op.target for op in traced.ops) == 2


def test_a_teacher_that_is_a_copy_of_copied_layers_is_traced() -> None:
    """`nn.TransformerEncoder` copies its layer; what is then copied again is computed with."""

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        student = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        teacher = copy.deepcopy(student)
        for own, of_student in zip(teacher.parameters(), student.parameters(), strict=True):
            own.data.copy_(of_student.data)
            own.requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = (student(x) - teacher(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, (torch.randn(2, 3, 4),)

    traced = cotrain_compile.trace(build)
    assert traced.updates
    assert any("teacher" in buffer.name for buffer in traced.buffers)


class Quantized(nn.Parameter):
    """As bitsandbytes makes its weights of 8 bits."""

    def __new__(cls, data: Tensor) -> Quantized:
        return torch.Tensor._make_subclass(cls, data, False)


def test_weights_of_a_librarys_class_are_refused_in_words() -> None:
    with pytest.raises(CaptureError, match=r"the class Quantized .* torchao's quantize_"):
        cotrain_compile.trace(lambda: Quantized(torch.zeros(2)))  # type: ignore[arg-type,return-value]


def test_values_made_of_constants_are_those_of_eager(known: KnownValues) -> None:
    rates = torch.linspace(0, 1, 5)
    assert [part.tolist() for part in rates.split([2, 3])] == [[0, 0.25], [0.5, 0.75, 1]]
    counted = torch.tensor([3, 1, 2]).cumsum(0)
    counted[1:] += 1
    counted.view(3, 1)[0] = 7
    assert counted.tolist() == [7, 5, 7]
    assert bool((torch.arange(4) * 2 == torch.tensor([0, 2, 4, 6])).all())
    assert int(torch.full((2, 2), 3).sum()) == 12


def test_what_is_drawn_or_large_or_as_memory_was_stays_unknown(known: KnownValues) -> None:
    written, filled = torch.zeros(3), torch.zeros(3)
    view = written[1:]
    written.uniform_()
    with skip_initialisation(known.forget):
        nn.init.trunc_normal_(filled)
    for unknown in (
        torch.rand(3),
        torch.empty(3),
        torch.ones(LARGEST + 1),
        torch.ones(3) * torch.rand(3),
        torch.ones(3).add_(torch.rand(3)),
        torch.nn.Parameter(torch.ones(3)).detach().normal_(),
        view,
        written,
        filled,
    ):
        with pytest.raises(DataDependentOutputException):
            unknown[0].item()
