"""Sequences of changes around a compiled step leave what the same sequence leaves in eager.

What holds is in `lock_step`; `bench.reliability.api_sequences` runs sequences by the clock.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.errors import CaptureError
from tests.support.fuzz.fuzz_compare import Broken
from tests.support.sequences.actions import ACTIONS
from tests.support.sequences.lock_step import distance, run
from tests.support.sequences.sequence import Sequence, random_sequence, simplest
from tests.support.sequences.twin import Setup
from tests.support.steps import cotrain

SHORT = 1
LONG = tuple(range(SHORT, 20))


@pytest.mark.parametrize(
    "seed", [*range(SHORT), *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG)]
)
def test_a_random_sequence_keeps_every_promise(seed: int) -> None:
    outcome = run(random_sequence(seed))
    assert outcome.held["call"]
    assert outcome.compiles


def test_the_same_seed_gives_the_same_sequence_and_seeds_reach_every_action() -> None:
    assert random_sequence(3) == random_sequence(3)
    drawn = {name for seed in range(300) for name, _ in random_sequence(seed).actions}
    assert drawn == set(ACTIONS)


def test_a_sequence_is_printed_as_a_program_and_shrunk_to_what_breaks() -> None:
    sequence = random_sequence(5)
    printed: dict[str, object] = {"Sequence": Sequence, "Setup": Setup}
    text = str(sequence).partition("print(run(")[2].removesuffix("))")
    assert eval(text, printed) == sequence
    with_wrong = replace(sequence, actions=(*sequence.actions, ("wrong", 1)))
    left = simplest(with_wrong, lambda s: ("wrong", 1) in s.actions)
    assert left == Sequence(Setup(), (("wrong", 1),))


def test_an_action_that_only_one_twin_sees_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is asked: a change of a parameter by one part in a million is seen."""

    def nudge(training: object, rng: random.Random) -> None:
        if training.compile_step is not None:  # type: ignore[attr-defined]
            with torch.no_grad():
                training.model.head.bias.mul_(1 + 1e-6)  # type: ignore[attr-defined]

    monkeypatch.setitem(ACTIONS, "nudge", nudge)
    setup = Setup(options={"host_kernels": "captured", "policy": "resident"})
    with pytest.raises(Broken, match=r"action 0, nudge: model.head.bias is 1e-06 from eager's"):
        run(Sequence(setup, (("nudge", 0),)))


def test_a_distance_is_relative_to_the_largest_element_of_the_tensor() -> None:
    small = torch.tensor([1e-3, 0.0], dtype=torch.float64)
    assert distance(small, small * 1.01) == pytest.approx(0.01)
    assert distance(small, small / 0) == float("inf")


# What sequences have broken.


def test_updates_on_the_host_take_the_gradient_of_their_parameter_of_one_flat_buffer() -> None:
    """Several inputs show one storage: which of them an update reads must not be mixed up."""

    def trained(compile_step: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        flat = torch.zeros(2, 4, 4, dtype=torch.float64)
        for param, gradient in zip(model.parameters(), flat, strict=True):
            param.grad = gradient

        def step(x: Tensor) -> None:
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()

        run_step = cotrain(policy="zero-offload", quiet=True)(step) if compile_step else step
        for _ in range(2):
            run_step(torch.ones(3, 4, dtype=torch.float64))
        return torch.cat([param.detach() for param in model.parameters()])

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-12, atol=1e-15)


def test_parameters_that_become_parts_of_one_vector_are_refused_before_a_write() -> None:
    """In a plan for parameters apart, the vector would be on the device whole: out of memory there,
    behind the norm that has counted its batch."""
    options = {"plan_cache": False, "policy": "auto"}
    setup = Setup("batch", "plain SGD", "returns much", 0.0, options, device_share=0.85)
    outcome = run(Sequence(setup, (("call", 42), ("set_data_in_one_storage", 16), ("call", 44))))
    (refused,) = outcome.refused
    assert re.match(r"call: CaptureError: first.weight and norm.\w+ share memory", refused)


def test_what_eager_refuses_in_a_backward_is_told_with_the_users_line() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    compiled = cotrain(quiet=True)(step)
    with (
        torch.no_grad(),
        pytest.raises(
            CaptureError, match=r"test_sequences.py:\d+ in step: .*does not require a gradient"
        ),
    ):
        compiled(torch.ones(3, 4))
