"""`CudaCard` itself, over a mocked `torch.cuda`: its orders, its numbers, what it does of errors.

The real streams, events and allocator are run by `tests/stub_card`, which needs a CUDA build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import HostMemoryError
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import streamed, zero_offload
from cotrain_compile.runtime.cuda.card import CudaCard
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.support import thread_card
from tests.support.captured_steps import captured, differences, reference
from tests.support.mocked_cuda import MEMORY, MockedCuda, mocked
from tests.support.plans.random_plans import last_moment_plan
from tests.support.thread_card import ThreadCard

NAME = "clipped"
RULES = {"streamed": streamed, "zero-offload": zero_offload}


@pytest.fixture
def cuda() -> Iterator[tuple[CudaCard, MockedCuda]]:
    with mocked(ThreadCard()) as both:
        yield both


def wrong(both: tuple[CudaCard, MockedCuda], rule: str, **settings: Any) -> list[str]:
    """What differs after some steps with every task at the last moment, and faults of the card."""
    card, cuda = both
    problem = captured(NAME).problem()
    plan = last_moment_plan(problem, RULES[rule](problem.dataflow))
    graph = run_passes(captured(NAME).step, plan)
    pool = PinnedPool(card.pin, card.unpin, lambda: 1 << 40)
    kernels = host_kernels(graph, "captured")
    device = CudaDevice(card, pool, 1 << 40, kernels, **settings)
    step = CompiledStep(problem, plan, graph, device)
    found = captured(NAME).train(step)
    card.synchronize()
    assert step.measured is not None
    return [*map(str, differences(found, reference(NAME))), *cuda.threads.faults]


@pytest.mark.parametrize("settings", [{}, {"timed": True}])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_the_card_is_exact(
    cuda: tuple[CudaCard, MockedCuda], rule: str, settings: dict[str, bool]
) -> None:
    assert not wrong(cuda, rule, **settings)
    assert cuda[1].current is cuda[1].compute


def test_a_step_beside_another_card_is_exact(cuda: tuple[CudaCard, MockedCuda]) -> None:
    cuda[1].device_at_hand = 1
    assert not wrong(cuda, "streamed")
    assert cuda[1].current is cuda[1].compute


def without(of_copies: bool) -> Callable[..., None]:
    hold = CudaCard.hold

    def left_out(self: CudaCard, stream: Any, event: Any) -> None:
        if (stream is not None) != of_copies:
            hold(self, stream, event)

    return left_out


def test_a_step_that_does_not_wait_for_its_copies_shows(
    cuda: tuple[CudaCard, MockedCuda],
) -> None:
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(CudaCard, "hold", without(of_copies=False)))
        # Copies that are slower than a step's thread on a busy machine.
        patches.enter_context(mock.patch.object(thread_card, "LONGEST_DELAY_S", 2e-2))
        assert wrong(cuda, "streamed")


def test_memory_is_what_the_allocator_says(cuda: tuple[CudaCard, MockedCuda]) -> None:
    card, _ = cuda
    said = card.allocated_bytes(), card.peak_bytes(), card.reserved_peak_bytes()
    assert said == (3, 5, 11)
    with mock.patch.dict(MEMORY, clear=True):  # before the first allocation
        assert card.allocated_bytes() == card.peak_bytes() == card.reserved_peak_bytes() == 0


def test_pinning_that_fails_leaves_no_error_for_the_next_kernel(
    cuda: tuple[CudaCard, MockedCuda],
) -> None:
    card, driver = cuda
    row = torch.ones(64, dtype=torch.uint8)
    card.pin(row)
    assert not row.any()
    assert driver.threads.pinned == {row.data_ptr(): 64}
    card.unpin(row)
    with pytest.raises(RuntimeError, match="CUDA error 713"):
        card.unpin(row)
    driver.threads.pins_left = 0
    with pytest.raises(HostMemoryError, match=r"cannot pin 64 B .*CUDA error 1"):
        card.pin(row)
    assert driver.kernels == 2
    driver.launch()
