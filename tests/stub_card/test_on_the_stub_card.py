"""Steps on real streams, events and allocators of `torch.cuda`, over a runtime of our own.

Copies and ops come late, each by chance. Every wait that the runtime asks CUDA for is needed: with
one kind of them left out the numbers are wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cotrain_compile.errors import HostMemoryError
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane, carried_out
from cotrain_compile.runtime.cuda import device as cuda
from cotrain_compile.runtime.cuda.card import CudaCard
from cotrain_compile.runtime.cuda.setup import pool
from tests.gpu.cuda_training import CudaTraining
from tests.stub_card import card

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not card.is_loaded(),
        reason=card.why_not() or "the stub card is loaded by `make stub-card` alone",
    ),
]

MIB = 2**20
LATE_US = 3000
POLICIES = ("streamed", "zero-offload", "coarse", "fraction:0.5")


@pytest.fixture(autouse=True)
def nothing_was_done_wrong() -> Iterator[None]:
    """The kernels of attention are CUDA's own, all but the one that is made of other ops."""
    for choose in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{choose}_sdp")(False)
    yield
    assert not card.faults()


class Training(CudaTraining):
    """What is compiled for a card by Triton has no kernel here: ops run one by one."""

    def __init__(self, name: str = "wide", **options: Any) -> None:
        small = {"rows": 32, "width": 64, "layers": 3, "lowering": "eager", "machine": "h100"}
        super().__init__(name, **{**small, **options})
        self._first = [param.detach().cpu() for param in self.model.parameters()]

    def run_again(self) -> list[Tensor]:
        """`run` from the start, compiled as it is."""
        torch.cuda.synchronize()
        with torch.no_grad():
            for param, first in zip(self.model.parameters(), self._first, strict=True):
                param.copy_(first)
                for state in self.optimizer.state.get(param, {}).values():
                    state.zero_()
        torch.cuda.synchronize()
        return self.run()


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """What a step leaves that stays on the device."""
    return Training(policy="resident").run()


@pytest.fixture(scope="module", params=POLICIES)
def placed(request: pytest.FixtureRequest, expected: list[Tensor]) -> Training:
    """A step under one policy; its first steps have been right."""
    made = Training(policy=request.param, host_kernels="captured")
    assert_equal(made.run(), expected)
    assert made.inspected.plan.tasks
    return made


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_ops_and_copies_on_the_card_are_those_of_the_cpu() -> None:
    """The card itself: in order on a stream, in none between two of them."""
    x = torch.randn(300, 200)
    with card.delays(copies_us=LATE_US, ops_us=LATE_US):
        on_card = x.to("cuda")
        product = (on_card @ on_card.t()).relu().cpu()
    torch.testing.assert_close(product, (x @ x.t()).relu())
    pinned, stream, late = torch.randn(2**20).pin_memory(), torch.cuda.Stream(), []
    with card.delays(copies_us=20 * LATE_US):
        for _ in range(8):
            with torch.cuda.stream(stream):
                there = pinned.to("cuda", non_blocking=True)
            too_early = there.clone()
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(there.cpu(), pinned)
            late.append(not torch.equal(too_early.cpu(), pinned))
    assert any(late)


# Exact, whatever comes late.


@pytest.mark.parametrize("late", ["copies", "ops", "both"])
def test_a_placed_step_is_exact(placed: Training, expected: list[Tensor], late: str) -> None:
    us = {f"{kind}_us": LATE_US for kind in ("copies", "ops") if late in (kind, "both")}
    with card.delays(**us):
        assert_equal(placed.run_again(), expected)


# Every kind of wait is needed.


def _without_holds(of_copies: bool) -> AbstractContextManager[Any]:
    hold = CudaCard.hold

    def left_out(self: CudaCard, stream: Any, event: Any) -> None:
        if (stream is not None) != of_copies:
            hold(self, stream, event)

    return mock.patch.object(CudaCard, "hold", left_out)


# By what is left out: how, the policy that needs it, and what comes late.
LEFT_OUT: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, str]] = {
    "a copy for what makes its source": (lambda: _without_holds(True), "zero-offload", "ops"),
    "the step for a copy": (lambda: _without_holds(False), "streamed", "copies"),
    "the host for a copy": (
        lambda: mock.patch.object(cuda, "_ends", return_value=[]),
        "zero-offload",
        "copies",
    ),
    "the user for a copy to a home": (
        lambda: mock.patch.object(cuda.CudaDevice, "_end_of_copy"),
        "streamed",
        "copies",
    ),
}


VERY_LATE = {"ops": {"ops_us": 10 * LATE_US}, "copies": {"copies_us": 50 * LATE_US, "every": 1}}


@pytest.mark.parametrize(
    ("wait", "placed"),
    [(name, policy) for name, (_, policy, _) in LEFT_OUT.items()],
    indirect=["placed"],
)
def test_a_wait_that_is_left_out_shows(placed: Training, expected: list[Tensor], wait: str) -> None:
    left_out, _, late = LEFT_OUT[wait]
    with left_out(), card.delays(**VERY_LATE[late]):
        found = placed.run_again()
        torch.cuda.synchronize()
    with pytest.raises(AssertionError):
        assert_equal(found, expected)


# Other steps.


def test_attention_and_embeddings_train_as_in_eager() -> None:
    placed, eager = Training("llama", policy="zero-offload"), CudaTraining("llama")
    with card.delays(copies_us=LATE_US, ops_us=LATE_US):
        found = placed.run()
    torch.testing.assert_close(found, eager.run(eager.eager), rtol=2e-3, atol=2e-4)


def test_bundles_of_small_copies_and_updates_are_exact() -> None:
    small: dict[str, Any] = {"layers": 9, "width": 16}
    expected = Training(policy="resident", **small).run()
    placed = Training(policy="zero-offload", host_kernels="captured", **small)
    with card.delays(copies_us=LATE_US, ops_us=LATE_US):
        assert_equal(placed.run(), expected)
    bundles = [unit for unit in carried_out(placed.inspected.plan.tasks) if len(unit) > 1]
    assert {(unit[0].kind, unit[0].is_fetch) for unit in bundles} == {
        ("transfer", False),
        ("transfer", True),
        ("host_region", False),
    }


def test_activations_and_weights_leave_within_a_budget() -> None:
    whole = Training(rows=512, policy="resident")
    numbers = whole.run()
    budget = int(0.6 * whole.inspected.predicted.peak_bytes[Tier.DEVICE])
    placed = Training(rows=512, memory_budget=budget, host_kernels="captured")
    with card.delays(copies_us=LATE_US, ops_us=LATE_US):
        assert_equal(placed.run(), numbers)
    measured = placed.inspected.measured
    assert measured is not None
    assert placed.inspected.plan.transfers
    assert measured.peak_bytes[Tier.DEVICE] <= placed.inspected.allowed_bytes


def test_a_step_on_a_stream_of_the_user_with_a_batch_from_another(expected: list[Tensor]) -> None:
    """As a prefetcher does: `record_stream` keeps the batch for the stream that computes."""
    placed = Training(policy="streamed")
    loads, computes = torch.cuda.Stream(), torch.cuda.Stream()
    step = placed.compiled

    def on_streams(*batch: Tensor) -> Tensor:
        pinned = [part.cpu().pin_memory() for part in batch]
        with torch.cuda.stream(loads):
            there = [part.to("cuda", non_blocking=True) for part in pinned]
        with torch.cuda.stream(computes):
            computes.wait_stream(loads)
            for part in there:
                part.record_stream(computes)
            loss = step(*there)
        del there  # its memory is the next batch's as soon as this step has read it
        torch.cuda.current_stream().wait_stream(computes)
        return loss

    with card.delays(copies_us=LATE_US, ops_us=LATE_US):
        assert_equal(placed.run(on_streams), expected)


# Memory.


def test_homes_on_the_host_are_pinned_by_the_driver_and_given_back() -> None:
    placed = Training(policy="zero-offload")
    placed.run()
    hosted = placed.hosted()
    assert hosted
    for name, tensor in placed.tensors().items():
        assert tensor.is_pinned() == (name in hosted), name
        assert tensor.is_cuda == (name not in hosted), name
    memory = pool(0)
    address = torch.empty(0)
    del placed, hosted, tensor, address
    torch._dynamo.reset()
    gc.collect()
    memory.release()
    assert memory.held_bytes == 0


def test_a_pin_that_fails_leaves_no_error_for_the_next_kernel() -> None:
    pinning = CudaCard(torch.device("cuda", 0))
    row = torch.empty(2 * MIB, dtype=torch.uint8)
    card.pins_left(0)
    with pytest.raises(HostMemoryError, match=r"cannot pin 2\.0 MiB .*CUDA error 1"):
        pinning.pin(row)
    assert torch.ones(1, device="cuda").item() == 1
    card.pins_left(-1)
    pinning.pin(row)
    assert row.is_pinned()
    with pytest.raises(HostMemoryError, match="CUDA error 712"):
        pinning.pin(row)
    pinning.unpin(row)
    assert not row.is_pinned()
    with pytest.raises(RuntimeError, match="registered memory region"):
        pinning.unpin(row)
    assert torch.ones(1, device="cuda").item() == 1


# Of so little memory, what the allocator takes at once is a large part; that is told, too.
@pytest.mark.filterwarnings("ignore:cotrain. the plan has .* but torch's allocator may reserve")
def test_a_card_with_less_free_than_the_budget_is_planned_for_again() -> None:
    # Tensors from 10 MiB on are segments of their own; smaller ones lie in pieces of 20 MiB, of
    # which as little memory as here has too few.
    settings: dict[str, Any] = {"rows": 8192, "width": 512}
    whole = Training(policy="resident", **settings)
    expected = whole.run()
    peak = whole.inspected.predicted.peak_bytes[Tier.DEVICE]
    del whole
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    # What is made again of a dropout follows CUDA's kernel, which is not the one of this card.
    exact = {"host_kernels": "captured", "split": "off", "recompute": "off"}
    placed = Training(memory_budget=2 * peak, **exact, **settings)
    with (
        card.free(int(0.85 * peak)),
        card.delays(copies_us=LATE_US, ops_us=LATE_US),
        pytest.warns(UserWarning, match=r"planned again|only .* of the card are free"),
    ):
        found = placed.run()
    assert_equal(found, expected)
    assert placed.inspected.plan.tasks


def test_fifty_steps_leak_nothing_and_reserve_no_more() -> None:
    placed = Training(policy="coarse")
    placed.run(steps=10)
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    placed.run(steps=40)
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


# What is told.


def test_a_timed_step_has_a_span_for_every_task() -> None:
    placed = Training(policy="coarse", timeline=True)
    with card.delays(copies_us=LATE_US, ops_us=LATE_US):
        placed.run()
    measured = placed.inspected.measured
    assert measured is not None
    assert {task.name for task in placed.inspected.plan.tasks} <= {s.name for s in measured.spans}
    assert len(measured.lane(Lane.DEVICE)) > 20
    assert all(span.end_s >= span.start_s for span in measured.spans)
