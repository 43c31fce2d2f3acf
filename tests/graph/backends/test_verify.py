"""Verified steps: sound plans pass unchanged, whatever is broken is caught and named."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cotrain_compile.backends import devices, verify
from cotrain_compile.backends.verify import (
    elements_apart,
    largest_difference,
    on,
    run_reference,
)
from cotrain_compile.entry import compile_step as pipeline
from cotrain_compile.errors import OptionError, VerifyError
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes import run_passes
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.host.trial import TOLERANCE
from cotrain_compile.runtime.ops import Launch
from cotrain_compile.runtime.task_nodes import region_calls
from tests.support.steps import (
    CASES,
    OPTIMIZERS,
    Run,
    Step,
    cotrain,
    make_step,
    train,
    train_placed,
    train_unplaced,
    vectors,
)


def same(run: Run, other: Run) -> bool:
    return run.tensors.keys() == other.tensors.keys() and all(
        torch.equal(value, other.tensors[name]) for name, value in run.tensors.items()
    )


# Sound plans.


SHORT = [
    ("mlp", "adamw", "coarse", "fused"),
]
LONG = [
    *(
        pytest.param("mlp", "adamw", policy, "captured", marks=pytest.mark.long)
        for policy in ("resident", "coarse")
    ),
    pytest.param("mlp", "sgd", "coarse", "captured", marks=pytest.mark.long),
    pytest.param("mlp", "muon", "streamed", "fused", marks=pytest.mark.long),
    *(
        pytest.param(case, optimizer, "zero-offload", "fused", marks=pytest.mark.long)
        for case in CASES
        for optimizer in OPTIMIZERS
    ),
]


@pytest.mark.parametrize(("case", "optimizer", "policy", "host_kernels"), [*SHORT, *LONG])
def test_a_sound_plan_passes_with_the_same_numbers(
    case: str, optimizer: str, policy: str, host_kernels: str
) -> None:
    """The model with dropout draws the same numbers with and without verification."""
    options = {"policy": policy, "host_kernels": host_kernels}
    verified = train_placed(CASES[case], OPTIMIZERS[optimizer], **options, verify=10)
    torch._dynamo.reset()
    assert same(verified, train_placed(CASES[case], OPTIMIZERS[optimizer], **options))


def test_the_first_steps_of_every_plan_are_verified() -> None:
    with mock.patch.object(verify, "run_reference", wraps=run_reference) as reference:
        step = momentum_step(verify=2)
        for rows in (8, 8, 8, 4, 4, 4, 6, 6, 6, 8):
            x, y = vectors()
            step(x[:rows], y[:rows])
    # Sizes are fixed in the first graph and dynamic in the second, which plans for each of them.
    assert reference.call_count == 2 * 4 - 1


def test_nothing_is_verified_by_default() -> None:
    with mock.patch.object(verify, "run_reference") as reference:
        momentum_step()(*vectors())
    assert not reference.called


@pytest.mark.parametrize("value", [-1, True, 1.5, "3"])
def test_the_option_is_a_number_of_steps(value: object) -> None:
    with pytest.raises(OptionError, match="a number of steps, 0 or more"):
        momentum_step(verify=value)(*vectors())


# Broken ones.


def momentum_step(policy: str = "fraction:1", **options: Any) -> Step:
    torch.manual_seed(0)
    model = CASES["mlp"].make_model()
    step = make_step(model, OPTIMIZERS["sgd"](model), CASES["mlp"].loss_of)
    return cotrain(policy=policy, **options)(step)


def position_in_region(placed: StepGraph, param: str) -> int:
    """At which input of its host update a parameter comes in."""
    for _, call in region_calls(placed.module.graph):
        nodes = call.given(placed.module)
        items = [placed.input_of_node.get(node.name) for node in nodes]
        names = [item.name if item else "" for item in items]
        if param in names:
            return names.index(param)
    raise AssertionError(f"no host update of {param}")


@contextmanager
def broken_update(of: str, by: Callable[[Tensor], Any]) -> Iterator[None]:
    """Within it, steps are compiled with a host update of one parameter after which `by` acts."""

    def make(placed: StepGraph, choice: str, guesses_below: float) -> dict[str, HostKernel]:
        kernels = host_kernels(placed, choice, guesses_below)
        sound = kernels[f"update.{of}"]
        position = position_in_region(placed, of)

        def kernel(inputs: Sequence[Any], *rest: Any) -> None:
            sound(inputs, *rest)
            by(inputs[position])

        return {**kernels, f"update.{of}": kernel}

    with mock.patch.object(pipeline, "host_kernels", make):
        yield


def next_float(tensor: Tensor) -> None:
    tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, torch.inf)))


def test_a_wrong_update_names_the_parameter_its_home_and_its_tasks() -> None:
    with broken_update("0.weight", lambda weight: weight[0, 0].add_(0.25)):
        step = momentum_step(verify=3)
        with pytest.raises(VerifyError) as failure:
            step(*vectors())
    told = str(failure.value)
    assert "param 0.weight differs in 1 of 288 elements, by 0.25 at most" in told
    assert "its home is the device" in told
    assert "update.0.weight" in told
    assert "report" in told


def test_one_bit_is_seen_where_the_captured_ops_run_and_is_rounding_elsewhere() -> None:
    with broken_update("0.weight", next_float):
        momentum_step(verify=1, host_kernels="fused")(*vectors())
        torch._dynamo.reset()
        with pytest.raises(VerifyError, match=r"param 0\.weight differs in 288 of 288"):
            momentum_step(verify=1, host_kernels="captured")(*vectors())


def test_after_a_mismatch_the_numbers_are_those_of_the_captured_step() -> None:
    caught: list[str] = []

    def tolerate(step: Step) -> Step:
        compiled = cotrain(policy="zero-offload", verify=2)(step)

        def run(*batch: Tensor) -> Tensor:
            try:
                compiled(*batch)
            except VerifyError as error:
                caught.append(str(error))
            return torch.zeros(())

        return run

    with broken_update("0.weight", lambda weight: weight.zero_()):
        run = train(CASES["mlp"], OPTIMIZERS["sgd"], tolerate, steps=2)
    assert len(caught) == 2  # a step that fails is not counted as verified
    torch._dynamo.reset()
    with mock.patch("tests.support.steps.train", functools.partial(train, steps=2)):
        expected = train_unplaced(CASES["mlp"], OPTIMIZERS["sgd"])
    assert same(run, expected)


class ForgetfulDevice(EmulatedDevice):
    """Loses what one buffer holds on the way to the device."""

    forgets = ""

    def prefetch(self, source: Tensor, launch: Launch) -> Tensor:
        lost = source.zero_() if launch.task.endswith(self.forgets) else source
        return super().prefetch(lost, launch)


def test_a_lost_state_is_named_though_its_update_overwrites_it() -> None:
    with (
        mock.patch.object(devices, "EmulatedDevice", ForgetfulDevice),
        mock.patch.object(ForgetfulDevice, "forgets", "0.weight.momentum_buffer"),
    ):
        step = momentum_step("streamed", verify=3, host_kernels="captured")
        step(*vectors())  # the state is zero so far
        with pytest.raises(VerifyError, match=r"differs in \d+ of 288") as failure:
            step(*vectors())
    assert "optimizer_state 0.weight.momentum_buffer differs" in str(failure.value)
    assert "its home is the host" in str(failure.value)
    assert re.search(r"touch it: .*0\.weight\.momentum_buffer", str(failure.value))


def test_what_the_step_only_reads_must_stay_as_it_is() -> None:
    torch.manual_seed(0)
    model = CASES["frozen"].make_model()
    loss_of = CASES["frozen"].loss_of
    step = cotrain(policy="zero-offload", verify=1)(
        make_step(model, OPTIMIZERS["sgd"](model), loss_of)
    )
    with (
        broken_update("4.weight", lambda _: model[0].weight.add_(1)),  # type: ignore[index]
        pytest.raises(
            VerifyError, match=r"param 0\.weight differs in 288 of 288 .* touch it: none"
        ),
    ):
        step(*vectors())


def test_a_wrong_pass_is_caught_at_the_loss() -> None:
    def double_the_loss(step: StepGraph, plan: Plan, *observers: Any) -> StepGraph:
        placed = run_passes(step, plan)
        output = next(iter(placed.module.graph.find_nodes(op="output")))
        with placed.module.graph.inserting_before(output):
            doubled = placed.module.graph.call_function(
                torch.ops.aten.mul.Tensor, (output.args[0][0], 2)
            )
        output.args = ((doubled, *output.args[0][1:]),)
        placed.module.recompile()
        return placed

    with (
        mock.patch.object(pipeline, "run_passes", double_the_loss),
        pytest.raises(VerifyError, match=r"output 0 \(.*\) differs in 1 of 1 elements"),
    ):
        momentum_step(verify=1)(*vectors())


# How tensors are compared and moved.


def test_equal_is_equal_bit_by_bit_but_for_nan() -> None:
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([1.0, nan, inf, 2.0, nan])
    b = torch.tensor([1.0, nan, inf, 2.5, 0.0])
    assert elements_apart(a, b, 0.0) == 2
    assert elements_apart(a, b, 0.5) == 1
    assert largest_difference(a, b) == inf
    assert largest_difference(a[:4], b[:4]) == 0.5
    large = torch.tensor([2**60, 7])
    assert elements_apart(large, large + torch.tensor([1, 0]), 0.0) == 1


def test_a_tensor_keeps_its_strides_where_it_goes() -> None:
    view = torch.arange(24.0).view(4, 6).t()[1:3]
    moved = on(torch.device("meta"), view)
    assert (moved.stride(), moved.storage_offset()) == (view.stride(), view.storage_offset())
    copied = on(torch.device("cpu"), view, copy=True)
    assert torch.equal(copied, view)
    assert copied.data_ptr() != view.data_ptr()


def test_small_second_moments_are_not_taken_for_zeros() -> None:
    """What rounding explains is a share of the change of that tensor, however small it is."""
    right = torch.full((4,), 9e-6)
    allowed = verify._rounding(right, change=9e-6, may_differ=TOLERANCE)
    assert 0 < allowed < 1e-7
    assert elements_apart(torch.zeros(4), right, allowed) == 4


def test_what_follows_from_few_digits_may_differ_by_a_rounding_to_them() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        in_parts = x @ x
        return in_parts.bfloat16().float() + 1, in_parts + 1, x + 1

    nodes = make_fx(step)(torch.ones(2, 2)).graph.nodes
    in_parts = next(node for node in nodes if "mm" in node.name)
    may_differ = verify._rounded(nodes, [in_parts])
    coarse, fine, apart = next(iter(reversed(nodes))).args[0]
    assert may_differ[coarse] == verify.ROUNDINGS * torch.finfo(torch.bfloat16).eps
    assert may_differ[fine] == TOLERANCE
    assert apart not in may_differ
