"""From `torch.compile` to the CUDA runtime, on a card of threads.

What is CUDA is replaced: which device a step runs on, and its card. Homes are moved while the step
is compiled and, for another batch size, when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import cotrain_compile
from cotrain_compile.backends import devices
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.dry_run import ROUNDS
from cotrain_compile.entry import compile_step as pipeline
from cotrain_compile.errors import HostMemoryError, OptionError, OutOfDeviceMemory
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.simulate.reserved import Reserved
from cotrain_compile.plan import Placement
from cotrain_compile.runtime.cuda import device as device_module
from cotrain_compile.runtime.cuda.card import is_out_of_memory
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.cuda.setup import in_pieces, tell_if_not_free
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from tests.graph.gradients.test_gradients_between_calls import (
    CALLS,
    MICRO_BATCHES,
    Loop,
    OnTheHost,
    gradients,
)
from tests.support.steps import CASES, OPTIMIZERS, Run, all_tensors, cotrain, make_step, train
from tests.support.thread_card import ThreadCard


class ThreadCuda:
    """Stands in for CUDA: every compiled step gets the one card and pool."""

    def __init__(self) -> None:
        self.card = ThreadCard(seed=1)
        self.pool = PinnedPool(self.card.pin, self.card.unpin, lambda: 1 << 40)

    def runtime_for(
        self,
        step: object,
        problem: Problem,
        placement: object,
        kernels: Mapping[str, HostKernel],
        options: Options,
    ) -> CudaDevice:
        return CudaDevice(self.card, self.pool, problem.budgets[Tier.HOST], kernels)


@pytest.fixture
def cuda() -> Iterator[ThreadCuda]:
    fake = ThreadCuda()
    with ExitStack() as stack:
        for name, stand_in in (
            ("runs_on_cuda", lambda step: True),
            ("runtime_for", fake.runtime_for),
            ("within_free_memory", lambda options, *_: options),
            ("tell_if_in_pieces", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(pipeline, name, stand_in))
        torch._dynamo.reset()
        yield fake
    assert not fake.card.faults


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        ("mlp", "streamed"),
        *(
            pytest.param(case, policy, marks=pytest.mark.long)
            for case, policy in (
                *(("mlp", policy) for policy in ("resident", "coarse")),
                *(("tied", policy) for policy in ("resident", "streamed", "coarse")),
            )
        ),
    ],
)
def test_training_through_torch_compile_is_exact(cuda: ThreadCuda, case: str, policy: str) -> None:
    made = CASES[case], OPTIMIZERS["sgd"]
    expected = train(*made, cotrain(policy="resident"))
    torch._dynamo.reset()
    found = train(*made, cotrain(policy=policy, host_kernels="captured"))
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
    assert found.losses == expected.losses


def test_homes_of_the_first_plan_stay_for_other_batch_sizes(cuda: ThreadCuda) -> None:
    case = CASES["mlp"]
    torch.manual_seed(0)
    model = case.make_model()
    optimizers = OPTIMIZERS["sgd"](model)
    step = cotrain(policy="fraction:1", host_kernels="captured")(
        make_step(model, optimizers, case.loss_of)
    )
    placements: list[Placement] = []
    sizes = (8, 6, 10, 8)
    for rows in sizes:
        step(torch.randn(rows, 12), torch.randint(0, 4, (rows,)))
        placements.append(cotrain_compile.inspect(step).plan.placement)
    assert {tuple(sorted(p.homes.items())) for p in placements} == {
        tuple(sorted(placements[0].homes.items()))
    }
    hosted = {name for name, tier in placements[0].homes.items() if tier is Tier.HOST}
    assert hosted
    params = dict(model.named_parameters())
    named = params | {
        f"{name}.{key}": value
        for name, param in params.items()
        for key, value in optimizers[0].state[param].items()
    }
    assert all(cuda.pool.holds(named[name]) for name in hosted)
    assert len(all_tensors(model, optimizers)) > len(hosted)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in sizes:
            step(torch.randn(rows, 12), torch.randint(0, 4, (rows,)))


def test_kept_gradients_rest_where_their_parameters_do_and_compile_nothing_again(
    cuda: ThreadCuda,
) -> None:
    ours, eager = Loop(OnTheHost(meters=False)), Loop()
    places: list[tuple[bool, bool]] = []

    def look(loop: Loop) -> list[torch.Tensor]:
        for param in loop.model.parameters():
            assert param.grad is not None
            places.append((cuda.pool.holds(param), cuda.pool.holds(param.grad)))
        return gradients(loop)

    cycle, all_calls = range(MICRO_BATCHES), range(CALLS)
    found, expected = ours.run(cycle, look), eager.run(all_calls, gradients)
    with torch.compiler.set_stance("fail_on_recompile"):
        found += ours.run(all_calls[MICRO_BATCHES:], look)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(ours.tensors(), eager.tensors(), rtol=0, atol=0)
    assert set(places) == {(True, True), (False, False)}


NO_MEMORY = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Triton Error [CUDA]: out of memory",
)


@pytest.mark.parametrize(
    "said", [NO_MEMORY[0], *(pytest.param(said, marks=pytest.mark.long) for said in NO_MEMORY[1:])]
)
@pytest.mark.parametrize("below_plan_bytes", [pytest.param(1000, marks=pytest.mark.long), 0])
def test_a_library_that_finds_no_memory_leads_to_a_smaller_plan(
    cuda: ThreadCuda, monkeypatch: pytest.MonkeyPatch, said: str, below_plan_bytes: int
) -> None:
    """At the plan's own peak it is what libraries take beside it that did not fit."""
    monkeypatch.setattr(device_module, "SLACK_BYTES", 1000)
    case = CASES["mlp"]
    expected = train(case, OPTIMIZERS["sgd"], cotrain(policy="resident"))
    budgets: list[int] = []
    dry_run = CompiledStep.dry_run

    def run_full(self: CompiledStep, inputs: Any, *, again: bool = False) -> None:
        budgets.append(self.problem.budgets[Tier.DEVICE])
        cuda.card.peak = 0
        if len(budgets) == 1:
            cuda.card.peak = self.predicted.peak_bytes[Tier.DEVICE] - below_plan_bytes
            raise RuntimeError(said)
        dry_run(self, inputs, again=again)

    torch._dynamo.reset()
    with (
        mock.patch.object(CompiledStep, "dry_run", run_full),
        pytest.warns(UserWarning, match="ran out of it; nothing was changed"),
    ):
        found = train(case, OPTIMIZERS["sgd"], cotrain(host_kernels="captured"))
    assert budgets[1] <= budgets[0] - 1000
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def test_what_kernels_take_to_be_tuned_in_their_first_call_is_no_overshoot(
    cuda: ThreadCuda,
) -> None:
    cuda.card.tuning_bytes = 96 << 20  # as the L2 cache of an L40S
    compiled: list[CompiledStep] = []
    train(
        CASES["mlp"],
        OPTIMIZERS["sgd"],
        cotrain(memory_budget="1MiB"),
        lambda step: compiled.append(cotrain_compile.inspect(step)),
        steps=1,
    )
    assert (compiled[0].dry_run_device_bytes or 0) < 1 << 20
    assert not any("a dry run took" in note for note in compiled[0].plan.notes)


def test_what_libraries_keep_after_their_first_call_counts(cuda: ThreadCuda) -> None:
    cuda.card.kept_bytes = 96 << 20
    with pytest.raises(OutOfDeviceMemory, match=r"needs 96\.0 MiB on the device"):
        train(CASES["mlp"], OPTIMIZERS["sgd"], cotrain(memory_budget="1MiB"))


@contextmanager
def as_planned(cuda: ThreadCuda) -> Iterator[list[CompiledStep]]:
    """The card has as much in tensors as was planned; what has had a dry run."""
    dry_run, found = CompiledStep.dry_run, list[CompiledStep]()

    def run(self: CompiledStep, inputs: Any, *, again: bool = False) -> None:
        found.append(self)
        dry_run(self, inputs, again=again)
        planned = self.predicted.peak_bytes[Tier.DEVICE]
        cuda.card.peak += planned - self.peak_bytes[Tier.DEVICE]

    with mock.patch.object(CompiledStep, "dry_run", run):
        yield found


def mlp_in(budget: int | None) -> Run:
    torch._dynamo.reset()
    options = {"host_kernels": "captured", "memory_budget": budget}
    return train(CASES["mlp"], OPTIMIZERS["sgd"], cotrain(**options))


@pytest.fixture
def whole_bytes(cuda: ThreadCuda, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the step takes that stays on the device."""
    monkeypatch.setattr(device_module, "SLACK_BYTES", 0)
    with as_planned(cuda) as plans:
        mlp_in(1 << 30)
    cuda.card.peak = 0
    return plans[-1].predicted.peak_bytes[Tier.DEVICE]


def test_memory_in_pieces_leads_to_a_plan_for_less(cuda: ThreadCuda, whole_bytes: int) -> None:
    """What is reserved is within the budget then, and the plan says why it is for less."""
    expected = train(CASES["mlp"], OPTIMIZERS["sgd"], cotrain(policy="resident"))
    cuda.card.peak = 0
    cuda.card.pieces_bytes = lambda: cuda.card.peak_bytes() // 5
    with as_planned(cuda) as plans, pytest.warns(match="allocator reserved .* planned again for"):
        found = mlp_in(whole_bytes)
    first, last = plans[0], plans[-1]
    assert plans[:2] == [first, first]  # without what the allocator keeps for later
    assert last is not first
    assert last.measured_reserved_bytes is not None
    assert last.measured_reserved_bytes <= last.allowed_bytes == whole_bytes
    assert any("as torch's allocator reserved" in note for note in last.plan.notes)
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def test_pieces_that_no_plan_is_without_are_told_and_end_nothing(
    cuda: ThreadCuda, whole_bytes: int
) -> None:
    cuda.card.pieces_bytes = lambda: whole_bytes
    with as_planned(cuda) as plans:
        mlp_in(whole_bytes)
    assert len(set(plans)) <= 1 + ROUNDS
    assert plans[-1].steps
    assert "no plan for less was found" in plans[-1].plan.notes[-1]


@pytest.mark.usefixtures("whole_bytes")
def test_a_default_budget_has_left_room_for_pieces(cuda: ThreadCuda) -> None:
    cuda.card.pieces_bytes = lambda: 1 << 50
    with as_planned(cuda) as plans:
        mlp_in(None)
    assert len(plans) == 1
    assert not any("reserved" in note for note in plans[-1].plan.notes)


def test_what_the_allocator_keeps_of_before_is_not_the_steps(
    cuda: ThreadCuda, whole_bytes: int
) -> None:
    cuda.card.cached_bytes = 1 << 30
    with as_planned(cuda) as plans:
        mlp_in(whole_bytes)
    assert len(set(plans)) == 1
    assert not any("reserved" in note for note in plans[-1].plan.notes)


def test_other_errors_are_no_lack_of_memory() -> None:
    assert all(is_out_of_memory(RuntimeError(said)) for said in NO_MEMORY)
    others = (
        ValueError("CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        HostMemoryError("the driver cannot pin 8 MiB (CUDA error: out of memory)"),
    )
    assert not any(map(is_out_of_memory, others))


def test_a_gradient_that_stays_is_refused_where_its_parameter_rests_on_the_host() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    item = SimpleNamespace(name="weight")
    compiled: Any = SimpleNamespace(
        graph=SimpleNamespace(inputs=[item]),
        plan=SimpleNamespace(placement=Placement("greedy", {"weight": Tier.HOST}, {})),
        problem=SimpleNamespace(dataflow=SimpleNamespace(kept_gradients={})),
    )
    with (
        mock.patch.object(devices, "runs_on_cuda", return_value=True),
        pytest.raises(OptionError, match=r"gradients in \.grad of 1 .*weight.*zero_grad"),
    ):
        devices.refuse_gradients_of_hosted(compiled, [param], {id(param)})
    devices.refuse_gradients_of_hosted(compiled, [param], set())


def test_what_does_not_fit_for_its_pieces_alone_is_said_before_it_runs() -> None:
    said = in_pieces(Reserved(10 << 30, 13 << 30), 12 << 30)
    assert "10.0 GiB in tensors" in said
    assert "expandable_segments" in said
    assert not in_pieces(Reserved(10 << 30, 13 << 30), 13 << 30)
    # Without its pieces it would not fit either: that is for the budget to say.
    assert not in_pieces(Reserved(10 << 30, 13 << 30), 9 << 30)
    with pytest.warns(UserWarning, match=r"memory_budget is 12\.0 GiB, but only 11\.0 GiB"):
        tell_if_not_free(12 << 30, 11 << 30)
    tell_if_not_free(11 << 30, 11 << 30)


def test_the_cuda_device_is_refused_where_there_is_none() -> None:
    model = torch.nn.Linear(2, 2)
    step = make_step(model, OPTIMIZERS["sgd"](model), lambda m, x: m(x).sum())
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="sees no CUDA device"):
            cotrain(device="cuda")(step)(torch.zeros(1, 2))
