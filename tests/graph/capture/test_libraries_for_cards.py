"""Libraries that launch kernels of their own, imported while a step is traced for a card.

As bitsandbytes does where it sees one, they take the getter of the card's stream from torch. A
torch for the CPU has none; that of a torch for cards is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import OptionError
from tests.fake_cuda.library import compiler
from tests.support.fresh_process import run_fresh

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch for the CPU"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def built() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    return step, (torch.ones(2, 4),)


def takes_the_getter() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    torch._C._cuda_getCurrentRawStream  # noqa: B018
    return built()


def launches_a_kernel() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    torch._C._cuda_getCurrentRawStream(0)
    return built()


def traced(build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> tuple[int, bool]:
    """How many ops the step has, and whether torch has the getter afterwards."""
    ops = trace(build, device="cuda", machine="rtx4090").ops
    return len(ops), hasattr(torch._C, "_cuda_getCurrentRawStream")


def test_a_library_that_takes_the_getter_is_imported() -> None:
    count, has_getter = run_fresh(traced, takes_the_getter)
    assert count
    assert not has_getter


def test_a_kernel_that_it_launches_is_refused_in_words() -> None:
    with pytest.raises(OptionError, match="launches a kernel of its own on the card"):
        run_fresh(traced, launches_a_kernel)
