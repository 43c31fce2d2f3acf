"""From `torch.compile` to the CUDA runtime, on a card of threads.

What is CUDA is replaced: which device a step runs on, and its card. Homes are moved while the step
is compiled and, for another batch size, when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import cotrain_compile
from cotrain_compile import compile as pipeline
from cotrain_compile.backends import devices
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Placement
from cotrain_compile.runtime.cuda import CudaDevice
from cotrain_compile.runtime.cuda_setup import machine_like
from cotrain_compile.runtime.host_kernels import HostKernel
from cotrain_compile.runtime.pinned import PinnedPool
from tests.graph.steps import CASES, OPTIMIZERS, all_tensors, cotrain, make_step, train
from tests.graph.test_gradients_between_calls import (
    CALLS,
    MICRO_BATCHES,
    Loop,
    OnTheHost,
    gradients,
)
from tests.graph.thread_card import ThreadCard


class ThreadCuda:
    """Stands in for CUDA: every compiled step gets the one card and pool."""

    def __init__(self) -> None:
        self.card = ThreadCard(seed=1)
        self.pool = PinnedPool(self.card.pin, self.card.unpin, lambda: 1 << 40)

    def runtime_for(
        self, step: object, problem: Problem, kernels: Mapping[str, HostKernel], options: Options
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
        ):
            stack.enter_context(mock.patch.object(pipeline, name, stand_in))
        torch._dynamo.reset()
        yield fake
    assert not fake.card.faults


@pytest.mark.parametrize("policy", ["resident", "streamed", "coarse"])
@pytest.mark.parametrize("case", ["mlp", "tied"])
def test_training_through_torch_compile_is_exact(cuda: ThreadCuda, case: str, policy: str) -> None:
    made = CASES[case], OPTIMIZERS["adamw"]
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
    optimizers = OPTIMIZERS["adamw"](model)
    step = cotrain(policy="zero-offload", host_kernels="captured")(
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
    states = {
        f"{name}.{key}": value
        for name, param in model.named_parameters()
        for key, value in optimizers[0].state[param].items()
    }
    assert all(cuda.pool.holds(states[name]) for name in hosted)
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


def test_a_gradient_that_stays_is_refused_where_its_parameter_rests_on_the_host() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    item = SimpleNamespace(name="weight")
    compiled: Any = SimpleNamespace(
        graph=SimpleNamespace(inputs=[item]),
        plan=SimpleNamespace(placement=SimpleNamespace(homes={"weight": Tier.HOST})),
        problem=SimpleNamespace(dataflow=SimpleNamespace(kept_gradients={})),
    )
    with (
        mock.patch.object(devices, "runs_on_cuda", return_value=True),
        pytest.raises(OptionError, match=r"gradients in \.grad of 1 .*weight.*zero_grad"),
    ):
        devices.refuse_gradients_of_hosted(compiled, [param], {id(param)})
    devices.refuse_gradients_of_hosted(compiled, [param], set())


@pytest.mark.parametrize(
    ("card", "like"), [("NVIDIA H200", "h200"), ("NVIDIA GH200 480GB", "gh200"), ("A card", "")]
)
def test_a_card_gets_the_rates_of_the_preset_like_it_and_its_own_memory(
    card: str, like: str
) -> None:
    machine: Machine = machine_like(card, 1234 << 20)
    assert machine.device.capacity_bytes == 1234 << 20
    assert f"rates of the preset {like or 'rtx3090'}" in machine.source
    assert ("not known" in machine.source) == (not like)


def test_the_cuda_device_is_refused_where_there_is_none() -> None:
    model = torch.nn.Linear(2, 2)
    step = cotrain(device="cuda")(
        make_step(model, OPTIMIZERS["sgd"](model), lambda m, x: m(x).sum())
    )
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="sees no CUDA device"):
            step(torch.zeros(1, 2))
