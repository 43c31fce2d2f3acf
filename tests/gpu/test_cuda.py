"""Training on a card: exact in every mode, within its budget, with homes that really are pinned."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.runtime.cuda import card
from cotrain_compile.runtime.cuda.card import register_pinned
from cotrain_compile.runtime.cuda.pinned import ALIGNMENT
from cotrain_compile.runtime.cuda.setup import pool
from tests.gpu.cuda_training import CUDA, CudaTraining, resident_peak_bytes

pytestmark = [
    pytest.mark.gpu,
    # Inductor says so wherever a float32 product could be faster; here exact ones are wanted.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]

SMALL = ("mlp", "tied", "llama")
MIB = 2**20


@pytest.fixture(autouse=True)
def as_on_paper() -> Iterator[None]:
    """The same sums in the same order every time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Within it torch adds up in one order; what has none is said in a warning, and runs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*[Dd]eterministic (behavior|implementation)")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Exactness.


@pytest.mark.parametrize("name", [*SMALL, "wide"])
def test_what_stays_on_the_device_is_what_eager_computes(name: str) -> None:
    placed, eager = CudaTraining(name, policy="resident"), CudaTraining(name)
    found = placed.run()
    torch.testing.assert_close(found, eager.run(eager.eager), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", [*SMALL, "wide"])
def test_streamed_states_change_no_bit(name: str) -> None:
    """Triton would choose the sizes of a sum's parts by timing them, in each plan anew.

    The gradient of an embedding is added up with atomics, in any order, unless torch is asked for
    deterministic algorithms.
    """
    settings = {"deterministic": True}
    with deterministic_algorithms():
        expected = CudaTraining(name, policy="resident", inductor=settings).run()
        training = CudaTraining(name, policy="streamed", inductor=settings)
        assert_equal(training.run(), expected)
    assert training.inspected.plan.tasks or name != "wide"


@pytest.mark.parametrize("policy", ["zero-offload", "coarse", "fraction:0.5"])
@pytest.mark.parametrize("kernels", ["captured", "fused"])
@pytest.mark.parametrize("name", ["llama", "wide"])
def test_updates_on_the_host_are_those_of_the_device_but_for_rounding(
    name: str, policy: str, kernels: str
) -> None:
    """The processors contract multiplications and additions differently."""
    expected = CudaTraining(name, policy="resident").run()
    training = CudaTraining(name, policy=policy, host_kernels=kernels)
    torch.testing.assert_close(training.run(), expected, rtol=2e-3, atol=2e-4)
    assert training.inspected.plan.host_updates


def test_activations_and_weights_may_leave() -> None:
    expected = CudaTraining(rows=8192, policy="resident").run()
    budget = int(0.75 * resident_peak_bytes(rows=8192))
    training = CudaTraining(rows=8192, memory_budget=budget, host_kernels="captured")
    found = training.run()
    plan = training.inspected.plan
    assert plan.transfers
    exact = not plan.host_updates
    torch.testing.assert_close(
        found, expected, rtol=0 if exact else 2e-3, atol=0 if exact else 2e-4
    )


# Memory.


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_step_keeps_to_its_budget_by_the_allocator(share: float) -> None:
    budget = int(share * resident_peak_bytes(rows=8192))
    training = CudaTraining(rows=8192, memory_budget=budget)
    training.run()
    measured = training.inspected.measured
    assert measured is not None
    assert measured.peak_bytes[Tier.DEVICE] <= training.inspected.allowed_bytes
    assert measured.peak_bytes[Tier.HOST] > 0


def test_homes_on_the_host_are_pinned_and_homes_on_the_device_are_there() -> None:
    training = CudaTraining(policy="zero-offload")
    training.run()
    hosted = training.hosted()
    assert hosted
    for name, tensor in training.tensors().items():
        if name in hosted:
            assert tensor.device.type == "cpu", name
            assert tensor.is_pinned(), name
        else:
            assert tensor.device.type == CUDA, name


def test_measuring_the_card_leaves_nothing_registered_that_is_unmapped() -> None:
    """The driver would refuse what is mapped there next, and say only that it cannot be pinned."""
    registered: list[int] = []

    def counting(register: Any, address: int, nbytes: int, clear: Any) -> None:
        registered.append(nbytes)
        register_pinned(register, address, nbytes, clear)

    before = pool(0).held_bytes
    small = Sizes(copy_bytes=2**22, matmul_side=256, updated_parameters=2**18, until_s=0.0)
    with mock.patch.object(card, "register_pinned", counting):
        calibrate(device=CUDA, sizes=small)
    gc.collect()
    assert sum(registered) == pool(0).held_bytes - before


def test_pinned_memory_is_not_rounded_up() -> None:
    before = pool(0).held_bytes
    training = CudaTraining(policy="zero-offload")
    training.run(steps=1)
    needed = sum(tensor.nbytes for tensor in training.hosted().values())
    plan = training.inspected.plan
    slabs = len(training.hosted()) + sum(t.is_offload for t in plan.transfers)
    most = needed + plan.bytes_moved("offload") + ALIGNMENT * slabs
    assert pool(0).held_bytes - before <= most


@pytest.mark.parametrize("policy", ["zero-offload", "coarse", "streamed"])
def test_fifty_steps_leak_nothing(policy: str) -> None:
    training = CudaTraining(policy=policy)
    training.run(steps=10)
    gc.collect()
    on_device, pinned = torch.cuda.memory_allocated(), pool(0).held_bytes
    training.run(steps=40)
    gc.collect()
    assert torch.cuda.memory_allocated() == on_device
    # Copies on the host come and go with the timing of the lanes, one gradient more or less.
    assert pool(0).held_bytes <= pinned + 8 * MIB


# Homes and traces.


def test_a_model_left_on_the_cpu_trains_as_one_on_the_card() -> None:
    expected = CudaTraining(policy="streamed").run()
    training = CudaTraining(built_on="cpu", device=CUDA, policy="streamed")
    assert_equal(training.run(), expected)
    hosted = training.hosted()
    assert all(t.is_cuda for n, t in training.tensors().items() if n not in hosted)


def test_a_model_on_the_cpu_is_never_all_on_the_card() -> None:
    budget = int(0.6 * resident_peak_bytes())
    training = CudaTraining(built_on="cpu", device=CUDA, memory_budget=budget)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.run(steps=1)
    assert training.hosted()
    assert torch.cuda.max_memory_allocated() - before <= training.inspected.allowed_bytes


def test_another_batch_size_is_traced_with_mixed_homes_and_then_never_again() -> None:
    training = CudaTraining(policy="streamed")
    expected = CudaTraining(policy="resident")
    sizes = (256, 512, 128, 256, 1024)
    for steps in (training, expected):
        torch.manual_seed(11)
        for rows in sizes:
            steps.compiled(*steps.batch(rows))
    found = [t.detach().cpu() for t in training.tensors().values()]
    assert_equal(found, [t.detach().cpu() for t in expected.tensors().values()])
    torch.manual_seed(12)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in sizes:
            assert math.isfinite(float(training.compiled(*training.batch(rows))))


def test_loaded_states_find_their_homes() -> None:
    training = CudaTraining(policy="zero-offload")
    training.run(steps=2)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.run(steps=2)
    assert all(tensor.is_pinned() for tensor in training.hosted().values())


def test_eager_goes_on_from_compiled_steps_with_the_same_numbers() -> None:
    """Step counts are on the card then, where eager has them on the host."""
    training, eager = CudaTraining("mlp", policy="resident"), CudaTraining("mlp")
    training.run(steps=2)
    eager.run(eager.eager, steps=2)
    assert not training.optimizer.param_groups[0]["capturable"]
    found = training.run(training.eager, steps=2)
    torch.testing.assert_close(found, eager.run(eager.eager, steps=2), rtol=2e-3, atol=2e-4)


# Safety.


def test_a_card_with_less_memory_than_the_budget_says_is_planned_for_again() -> None:
    resident = CudaTraining(rows=8192, policy="resident")
    expected = resident.run()
    measured = resident.inspected.measured
    assert measured is not None
    peak = measured.peak_bytes[Tier.DEVICE]
    del resident
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    training = CudaTraining(rows=8192, memory_budget=2 * peak, host_kernels="captured")
    # All of what is there now counts; the step may have 70 % of what it takes on top.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.7 * peak) / total)
    try:
        with pytest.warns(UserWarning, match="planned again"):
            found = training.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


def test_a_timed_step_shows_copies_beside_compute() -> None:
    training = CudaTraining(rows=4096, policy="coarse", timeline=True)
    training.run()
    measured = training.inspected.measured
    assert measured is not None
    used = (Lane.DEVICE, Lane.HOST, Lane.D2H, Lane.H2D)
    lanes: dict[Any, int] = {lane: len(measured.lane(lane)) for lane in used}
    assert all(lanes.values()), lanes
    assert all(span.end_s >= span.start_s for span in measured.spans)
    copies = measured.lane(Lane.D2H)
    assert copies[0].start_s < measured.lane(Lane.DEVICE)[-1].end_s
