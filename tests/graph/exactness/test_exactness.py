"""Placed steps are exact: bitwise the captured graph, and eager's numbers up to rounding.

The reference is the captured graph run as it is. Ten steps are compared by every loss, parameter,
buffer and optimizer state. The device's memory is checked after each placed step.
"""

from __future__ import annotations

import functools

import pytest
import torch
from _pytest.mark import ParameterSet

import cotrain_compile
from cotrain_compile.errors import PlacementError
from cotrain_compile.runtime.host.fused_kernel import FusedKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.support.closeness import assert_near
from tests.support.loops import graphs
from tests.support.steps import (
    CASES,
    OPTIMIZERS,
    Run,
    Step,
    cotrain,
    in_float64,
    train,
    train_placed,
    train_unplaced,
)

POLICIES = ("resident", "zero-offload", "coarse", "fraction:0.5")
SLOW = ("gpt2", "llama", "bert", "t5")
WITH_FUSED_KERNELS = ("adamw", "adamw-groups", "adam", "sgd", "adagrad")

# Ops of one step round at most a few times in the last place of float32: 10 steps stay below 1e-5
# of the value. Torch's compiled Adam takes 1 - beta2 ** step in float32, which is off by up to
# eps / 2 / (1 - 0.999) = 6e-5 of an update, and an update is at most about lr = 2e-3: 10 updates
# are off by at most 2e-6.
ROUNDING = (1e-5, 2e-6)


def is_short(policy: str, case: str, optimizer: str) -> bool:
    """Of each policy a step; `test_modes` has random plans of every kind of model in every run."""
    if policy == "coarse":
        return (case, optimizer) == ("tied", "adamw")
    if policy == "fraction:0.5":
        return (case, optimizer) == ("conv", "adamw")
    if policy == "resident":  # what runs is the captured graph itself
        return False
    return (case, optimizer) == ("mlp", "adamw")


def combinations(policies: tuple[str, ...]) -> list[ParameterSet]:
    """All policies with all models and optimizers."""
    found = []
    for policy in policies:
        for case in CASES:
            for optimizer in OPTIMIZERS:
                marks = () if is_short(policy, case, optimizer) else pytest.mark.long
                found.append(pytest.param(policy, case, optimizer, marks=marks))
    return found


@functools.cache
def captured_run(case: str, optimizer: str) -> Run:
    torch._dynamo.reset()
    return train_unplaced(CASES[case], OPTIMIZERS[optimizer])


def assert_bitwise_equal(run: Run, reference: Run) -> None:
    assert run.tensors.keys() == reference.tensors.keys()
    different = [n for n, v in reference.tensors.items() if not torch.equal(v, run.tensors[n])]
    assert not different
    assert torch.equal(torch.stack(run.losses), torch.stack(reference.losses))


def assert_close(run: Run, reference: Run) -> None:
    rtol, atol = ROUNDING
    assert run.tensors.keys() == reference.tensors.keys()
    torch.testing.assert_close(run.losses, reference.losses, rtol=rtol, atol=atol)
    # By the largest element of each tensor: one near zero is what larger ones leave of each other,
    # as in RMSprop's momentum, which adds up gradients by their size.
    assert_near(run.tensors, reference.tensors, rtol, atol)


@pytest.mark.parametrize(("policy", "case", "optimizer"), combinations(POLICIES))
def test_placed_steps_are_bitwise_those_of_the_captured_graph(
    policy: str, case: str, optimizer: str
) -> None:
    run = train_placed(CASES[case], OPTIMIZERS[optimizer], policy=policy, host_kernels="captured")
    assert graphs() == 1
    assert_bitwise_equal(run, captured_run(case, optimizer))


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        pytest.param(*each, marks=pytest.mark.long if each[0] in SLOW else ())
        for each in (
            *((case, "adamw") for case in CASES),
            *(("mlp", name) for name in OPTIMIZERS if name != "adamw"),
        )
    ],
)
def test_captured_steps_are_those_of_eager_up_to_rounding(case: str, optimizer: str) -> None:
    eager = train(CASES[case], OPTIMIZERS[optimizer])
    assert_close(captured_run(case, optimizer), eager)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_captured_steps_are_those_of_eager_in_float64(case: str, optimizer: str) -> None:
    """In float32 an optimizer that divides by the gradient's size makes its rounding errors large.

    So it is where a gradient is zero but for rounding: the bias of an attention's keys.
    """
    double = in_float64(CASES[case])
    eager = train(double, OPTIMIZERS[optimizer])
    assert_close(train_unplaced(double, OPTIMIZERS[optimizer]), eager)


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("mlp", "adamw"),  # and more with settings that change, in `test_hyperparameters`
        *(
            pytest.param("mlp", name, marks=pytest.mark.long)
            for name in ("sgd", "adagrad", "adamw-groups", "adam")
        ),
        *(pytest.param("llama", name, marks=pytest.mark.long) for name in WITH_FUSED_KERNELS),
    ],
)
def test_fused_host_kernels_are_used_and_differ_by_rounding_only(case: str, optimizer: str) -> None:
    compiled: list[Step] = []

    def compile_step(step: Step) -> Step:
        compiled.append(cotrain(policy="zero-offload", host_kernels="fused")(step))
        return compiled[0]

    run = train(CASES[case], OPTIMIZERS[optimizer], compile_step)
    kernels = host_kernels(cotrain_compile.inspect(compiled[0]).graph, "fused")
    assert kernels
    assert all(isinstance(kernel, FusedKernel) for kernel in kernels.values())
    assert_close(run, captured_run(case, optimizer))


def least_budget_bytes(policy: str) -> int:
    """The smallest device budget that the MLP's step fits, by the shortfall a refusal names."""
    torch._dynamo.reset()
    with pytest.raises(PlacementError) as refusal:
        train(CASES["mlp"], OPTIMIZERS["sgd"], cotrain(policy=policy, memory_budget=1))
    return 1 + refusal.value.shortfall_bytes


def test_zero_offload_is_exact_in_the_least_memory_it_says_it_needs() -> None:
    least = least_budget_bytes("zero-offload")
    assert least < least_budget_bytes("resident")
    run = train_placed(
        CASES["mlp"],
        OPTIMIZERS["sgd"],
        policy="auto",
        memory_budget=least,
        host_kernels="captured",
    )
    assert_bitwise_equal(run, captured_run("mlp", "sgd"))


def test_throttled_copies_change_no_number() -> None:
    run = train_placed(
        CASES["mlp"],
        OPTIMIZERS["sgd"],
        policy="zero-offload",
        host_kernels="captured",
        throttle=True,
    )
    assert_bitwise_equal(run, captured_run("mlp", "sgd"))
